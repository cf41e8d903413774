"""One streamed request, from beginning to end, without an event loop of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from smartspec_bench.streams import GrpcStreams, Heard, HttpStreams, ask


def ask_alone(
    streams: HttpStreams | GrpcStreams,
    fields: Mapping[str, Any],
    heard: Heard = lambda response: None,
) -> list[Mapping[str, Any]]:
    """The responses to one request, on its own connection and event loop. Raises StreamError."""
    responses: list[Mapping[str, Any]] = []

    def take(response: Mapping[str, Any]) -> None:
        responses.append(response)
        heard(response)

    async def run() -> None:
        async with streams:
            await ask(streams, fields, take)

    asyncio.run(run())
    return responses
