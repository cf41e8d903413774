"""Requests to a gateway: over `http.client`, or as bytes where they are malformed."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smartspec_launch.address import Address

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
GENERATE = "/v2/models/smartspec/generate"
BODY = b'{"text_input": "a", "max_tokens": 1}'
WAIT_S = 60.0
"""A limit against a hang. A busy machine takes more than 10 s to start and to end a process."""


@contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    yield connection
    connection.close()


@contextmanager
def asked(address: Address, route: str = GENERATE) -> Iterator[http.client.HTTPResponse]:
    """The response to a valid request."""
    with connected(address.http_port) as connection:
        connection.request("POST", route, BODY)
        with connection.getresponse() as response:
            yield response


def error_of(response: http.client.HTTPResponse) -> tuple[int, str]:
    """The status and the sentence of a refusal on Triton's port."""
    return response.status, json.loads(response.read())["error"]


def talk(port: int, sent: bytes) -> bytes:
    """What comes back until the gateway closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(sent)
        received = b""
        while data := client.recv(65_536):
            received += data
    return received


def answered(port: int, sent: bytes) -> tuple[http.client.HTTPResponse, bytes]:
    """The one answer and its body."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(sent)
        response = http.client.HTTPResponse(client)
        response.begin()
        return response, response.read()


def post(body: bytes, headers: bytes = b"", length: int | None = None) -> bytes:
    """A request to generate. length: the stated one, where it is not that of the body."""
    length = len(body) if length is None else length
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n".encode()
    return head + headers + b"\r\n" + body


def chunk(data: bytes) -> bytes:
    """What follows `CHUNKED` and its empty line."""
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n".encode()


def status_of(address: Address, path: str) -> int:
    """Of a GET."""
    with connected(address.http_port) as connection:
        connection.request("GET", path)
        return connection.getresponse().status
