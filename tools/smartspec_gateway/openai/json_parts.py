"""JSON in parts of bounded size, so that a large answer keeps no other request waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse

PART = 1 << 15
"""Characters of a part, before the last one that is added. It takes about 10 ms at most."""

MEDIA_TYPE = "application/json"


class Encoded(str):
    """A text that is JSON already."""

    __slots__ = ()


def parts(value: Any) -> Iterator[str]:
    """The JSON of the value in parts, each of PART characters or less."""
    if isinstance(value, dict):
        yield "{"
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' * bool(number)}{_dumped(name)}:"
            yield from parts(each)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "["
        for number, each in enumerate(value):
            yield "," * bool(number)
            yield from parts(each)
        yield "]"
    elif not isinstance(value, str):
        yield _dumped(value)
    elif isinstance(value, Encoded):
        yield from _slices(value)
    else:
        yield '"'
        yield from (_dumped(each)[1:-1] for each in _slices(value))
        yield '"'


async def sliced(shown: Iterable[str]) -> AsyncIterator[str]:
    """The texts joined to parts. Between two, other requests have their turn."""
    waiting: list[str] = []
    size = 0
    for each in shown:
        if size >= PART:
            yield "".join(waiting)
            await asyncio.sleep(0)
            waiting, size = [], 0
        waiting.append(each)
        size += len(each)
    if size:
        yield "".join(waiting)


async def json_response(document: Any) -> Response:
    """The answer with this document."""
    shown = sliced(parts(document))
    first = await anext(shown)
    second = await anext(shown, None)
    if second is None:
        return Response(first, media_type=MEDIA_TYPE)

    async def body() -> AsyncIterator[str]:
        yield first
        yield second
        async for each in shown:
            yield each

    return StreamingResponse(body(), media_type=MEDIA_TYPE)


def json_bytes_response(body: bytes) -> Response:
    """The answer with this JSON, which is written in parts if it is long."""
    if len(body) <= PART:
        return Response(body, media_type=MEDIA_TYPE)

    async def slices() -> AsyncIterator[bytes]:
        for at in range(0, len(body), PART):
            yield body[at : at + PART]
            await asyncio.sleep(0)

    return StreamingResponse(slices(), media_type=MEDIA_TYPE)


def _slices(text: str) -> Iterator[str]:
    return (text[at : at + PART] for at in range(0, len(text), PART))


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
