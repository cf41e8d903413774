"""Raw HTTP requests, and a client that reads every answer of one connection."""

from __future__ import annotations

import http.client
import io
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GENERATE = "/v2/models/smartspec/generate"
STREAM = "/v2/models/smartspec/generate_stream"

OK = frozenset({200})
BAD = frozenset({400})
TOO_LARGE = frozenset({413})

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """The bytes of one connection, and the allowed status codes of each answer, in order."""

    kind: str
    steps: Sequence[bytes]
    expected: Sequence[frozenset[int]]


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


class _Reader(io.BufferedReader):
    """A reader that stays open. HTTPResponse closes its reader, which has the next answer too."""

    def close(self) -> None:
        pass


class _Source:
    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def makefile(self, mode: str) -> _Reader:
        return self._reader


def carry_out(case: Case, address: tuple[str, int]) -> str:
    """Send the case on its own connection. Returns the problem, or an empty text."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        for data in case.steps:
            try:
                connection.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                break  # the answer may have arrived earlier
        reader = _Reader(socket.SocketIO(connection, "r"))
        for expected in case.expected:
            try:
                status, body = _answer(reader)
            except (http.client.HTTPException, OSError) as error:
                return f"no answer: {type(error).__name__}: {error}"
            if status not in expected:
                return f"got {status}, expected {sorted(expected)}: {body[:100]!r}"
            if problem := _problem(status, body):
                return problem
        connection.settimeout(0.0)
        try:
            more = reader.read1(100)
        except (BlockingIOError, ConnectionResetError):
            more = b""
        return f"more than one answer: {more!r}" if more else ""


def _answer(reader: _Reader) -> tuple[int, bytes]:
    source: Any = _Source(reader)
    response = http.client.HTTPResponse(source, method="POST")
    response.begin()
    return response.status, response.read()


def _problem(status: int, body: bytes) -> str:
    """A final answer must be JSON, with `error` or `finish_reason`."""
    text = body.decode(errors="replace")
    last = text.rstrip().rpartition("data:")[2] if text.startswith("data:") else text
    try:
        document = json.loads(last)
    except ValueError:
        return f"{status} with a body that is not JSON: {text[:100]!r}"
    wanted = "error" if status != 200 else "finish_reason"
    return "" if wanted in document else f"{status} without {wanted}: {text[:100]!r}"


def normal_request(address: tuple[str, int]) -> str:
    """Send a valid request. Returns the problem, or an empty text."""
    return carry_out(Case("", [request()], [OK]), address)
