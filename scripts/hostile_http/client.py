"""Runs a case on its own connection and reports wrong answers."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import struct
import time
from typing import Any

from hostile_http.case import GENERATE, VALID, Case, Step, request

TIMEOUT_S = 60.0
DRIP_S = 0.2
PAUSE_S = 2.0


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
    """Run the case. Returns the problem, or an empty text if the answers were as expected."""
    try:
        with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
            if not _send(case, connection):
                return ""
            return _check(case, connection)
    except OSError as error:
        return "" if case.may_be_silent else f"{type(error).__name__}: {error}"


def _send(case: Case, connection: socket.socket) -> bool:
    """Send the steps of the case. Returns whether the connection can still be read."""
    drips = False
    for step in case.steps:
        try:
            match step:
                case Step.RESET:
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    return False
                case Step.HALF_CLOSE:
                    connection.shutdown(socket.SHUT_WR)
                case Step.DRIP:
                    drips = True
                case Step.PAUSE:
                    time.sleep(PAUSE_S)
                case bytes() if drips:
                    _drip(step, connection)
                case bytes():
                    connection.sendall(step)
        except (BrokenPipeError, ConnectionResetError):
            return True  # the answer may have arrived earlier
    return True


def _drip(data: bytes, connection: socket.socket) -> None:
    """Send one byte at a time until the server answers."""
    for byte in data:
        connection.sendall(bytes([byte]))
        connection.settimeout(DRIP_S)
        try:
            connection.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            continue
    connection.settimeout(TIMEOUT_S)


def _check(case: Case, connection: socket.socket) -> str:
    reader = _Reader(socket.SocketIO(connection, "r"))
    is_head = bool(case.steps) and isinstance(case.steps[0], bytes) and case.steps[0][:4] == b"HEAD"
    for number, expected in enumerate(case.expected):
        try:
            status, body, ends = _answer(reader, "HEAD" if is_head else "POST")
        except (http.client.HTTPException, OSError) as error:
            if case.may_be_silent and number == 0:
                return ""
            return f"no answer: {type(error).__name__}: {error}"
        if status not in expected:
            return f"got {status}, expected {sorted(expected)}: {body[:100]!r}"
        if problem := "" if is_head else _problem(status, body):
            return problem
        if ends:
            return "" if number == len(case.expected) - 1 else "closed before the last answer"
    connection.settimeout(0.0)
    try:
        more = reader.read1(100)
    except (BlockingIOError, ConnectionResetError):
        more = b""
    return f"more than one answer: {more!r}" if more else ""


def _answer(reader: _Reader, method: str) -> tuple[int, bytes, bool]:
    """Read one answer: its status, its body, and whether the server closes the connection."""
    source: Any = _Source(reader)
    response = http.client.HTTPResponse(source, method=method)
    response.begin()
    return response.status, response.read(), response.will_close


def _problem(status: int, body: bytes) -> str:
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
    return carry_out(Case("", [request()], [frozenset({200})]), address)


def body_limit(address: tuple[str, int]) -> int:
    """The server's body limit in bytes, from its error message. Raises SystemExit without one."""
    announced = request(b"", [("Content-Length", str(10**12))], has_length=False)
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(announced)
        _, body, _ = _answer(_Reader(socket.SocketIO(connection, "r")), "POST")
    found = re.search(rb"at most (\d+)", body)
    if found is None or int(found[1]) < len(VALID):
        raise SystemExit(f"POST {GENERATE} with 10^12 bytes: the answer has no limit: {body!r}")
    return int(found[1])
