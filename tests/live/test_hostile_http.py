"""Hostile HTTP: each connection gets the answers it should, and the server then serves on."""

from __future__ import annotations

import gzip
import json

import pytest
from raw_http import (
    BAD,
    OK,
    TOO_LARGE,
    VALID,
    Case,
    carry_out,
    chunked,
    fields,
    normal_request,
    request,
)

from smartspec_launch.triton_server import TritonServer

pytestmark = pytest.mark.triton

REFUSED = frozenset({400, 404, 405, 413, 431, 501, 505})
UNREAD = frozenset({400, 500})
"""Requests that Triton's own parser refuses. It sometimes answers 500 instead of 400."""

NOT_DECODED = frozenset({415})
CHUNKED = [("Transfer-Encoding", "chunked")]


def head(headers: list[tuple[str, str]]) -> bytes:
    return request(b"", headers, has_length=False)


def body(**more: object) -> bytes:
    return request(json.dumps(fields(**more)).encode())


SMUGGLED = [("Content-Length", str(len(VALID))), *CHUNKED]
BOMB = gzip.compress(b" " * 10_000_000)

CASES: dict[str, tuple[bytes, list[frozenset[int]]]] = {
    "chunks of one byte": (chunked([VALID[i : i + 1] for i in range(len(VALID))]), [OK]),
    "chunk extension": (chunked([VALID], extension=b";a=b"), [OK]),
    "2 MB of chunk extension": (chunked([VALID], extension=b";" + b"a" * 2_000_000), [REFUSED]),
    "negative chunk size": (head(CHUNKED) + b"-1\r\n" + VALID, [REFUSED]),
    "chunk longer than announced": (head(CHUNKED) + b"3\r\n" + VALID + b"\r\n0\r\n\r\n", [REFUSED]),
    "200,000 trailers": (chunked([VALID], b"0\r\n" + b"X: y\r\n" * 200_000 + b"\r\n"), [REFUSED]),
    "length and chunks": (head(SMUGGLED) + b"0\r\n\r\n", [REFUSED]),
    "two lengths": (request(headers=[("Content-Length", "1")]), [REFUSED]),
    "length of 6,000 digits": (head([("Content-Length", "9" * 6000)]), [REFUSED]),
    "3,000 headers": (request(headers=[(f"X-{i}", "y" * 100) for i in range(3000)]), [REFUSED]),
    "zero byte in a header": (request(headers=[("X", "a\x00b")]), [BAD]),
    "space in a header's name": (request(headers=[("X Y", "a")]), [BAD]),
    "path of 100,000 bytes": (request(path="/" + "a" * 100_000), [REFUSED]),
    "unload": (request(b"{}", path="/v2/repository/models/smartspec/unload"), [REFUSED]),
    "shared memory": (request(b"{}", path="/v2/systemsharedmemory/region/x/register"), [REFUSED]),
    "two requests in one packet": (request() * 2, [OK, OK]),
    "gzip bomb": (request(BOMB, [("Content-Encoding", "gzip")]), [NOT_DECODED]),
    "announced petabyte": (head([("Content-Length", str(10**15))]) + b"x" * 1000, [TOO_LARGE]),
    "not JSON": (request(b"\xff\xfe{}"), [BAD]),
    "33 levels": (request(b"[" * 33 + b"1" + b"]" * 33), [BAD]),
    "number of 5,000 digits": (
        request(b'{"text_input":"a","max_tokens":%s}' % (b"9" * 5000)),
        [UNREAD],
    ),
    "infinite number": (
        request(b'{"text_input":"a","max_tokens":2,"temperature":1e999}'),
        [UNREAD],
    ),
    "50,000 unknown members": (body(**{f"k{i}": i for i in range(50_000)}), [BAD | TOO_LARGE]),
    "inputs left out": (request(b"{}"), [BAD]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_request_gets_its_answers(front_server: TritonServer, name: str) -> None:
    address = (front_server.address.reach, front_server.address.http_port)
    sent, expected = CASES[name]
    assert carry_out(Case(name, [sent], expected), address) == ""
    assert normal_request(address) == ""
    assert front_server.poll() is None
