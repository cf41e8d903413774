"""One hostile connection: the data to send and the allowed answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import Any

GENERATE = "/v2/models/smartspec/generate"
STREAM = "/v2/models/smartspec/generate_stream"

OK = frozenset({200})
BAD = frozenset({400})
TOO_LARGE = frozenset({413})
UNREAD = frozenset({400, 500})
"""Requests that Triton's own parser refuses. It sometimes answers 500 instead of 400."""

ANY = frozenset({200, 400, 404, 405, 408, 413, 415, 431, 500, 501})


class Step(Enum):
    """An action of a client besides sending bytes."""

    HALF_CLOSE = auto()
    RESET = auto()
    """Reset the connection at once, without reading the rest."""

    DRIP = auto()
    """Send one byte per 0.2 s from here on."""

    PAUSE = auto()
    """Read nothing for 2 s."""


@dataclass(frozen=True)
class Case:
    """One case. expected: the allowed status codes of each answer, in order.

    may_be_silent: the connection may also end without an answer, because the client stops first.
    """

    kind: str
    steps: Sequence[bytes | Step]
    expected: Sequence[frozenset[int]]
    may_be_silent: bool = False


def fields(**more: Any) -> dict[str, Any]:
    return {"text_input": "Question:", "max_tokens": 2, **more}


VALID = json.dumps(fields()).encode()


def request(
    body: bytes = VALID,
    headers: Sequence[tuple[str, str]] = (),
    path: str = GENERATE,
    method: str = "POST",
    *,
    has_length: bool = True,
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if has_length:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chunked(chunks: Sequence[bytes], end: bytes = b"0\r\n\r\n", extension: bytes = b"") -> bytes:
    """A request with these chunks."""
    head = request(b"", [("Transfer-Encoding", "chunked")], has_length=False)
    framed = [b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks]
    return head + b"".join(framed) + end


def split(body: bytes, random: Random, most: int) -> list[bytes]:
    """The body in pieces of 1 to `most` bytes."""
    pieces = []
    while body:
        size = random.randint(1, most)
        pieces.append(body[:size])
        body = body[size:]
    return pieces
