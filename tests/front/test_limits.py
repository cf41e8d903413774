"""Each limit of the front: the last value that passes, and the first that does not."""

from __future__ import annotations

import json

import pytest

from smartspec_launch.front import limits
from smartspec_launch.front.refused import Refused

MODEL = b"/v2/models/smartspec"


def status_of(check: object, *arguments: object) -> int:
    """0 where nothing is refused."""
    try:
        check(*arguments)  # type: ignore[operator]
    except Refused as refused:
        return refused.status
    return 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", b"/v2", 0),
        ("GET", b"/v2/health/live", 0),
        ("GET", b"/v2/health/ready", 0),
        ("GET", MODEL, 0),
        ("GET", MODEL + b"/ready", 0),
        ("GET", MODEL + b"/versions/1/ready", 0),
        ("GET", MODEL + b"/config", 0),
        ("GET", MODEL + b"/stats", 0),
        ("GET", b"/v2/models/stats", 0),
        ("POST", MODEL + b"/generate", 0),
        ("POST", MODEL + b"/generate_stream", 0),
        ("POST", MODEL + b"/versions/1/generate", 0),
        ("POST", b"/v2/models/tensorrt_llm_bls/generate", 0),
        ("GET", MODEL + b"/generate", 405),
        ("HEAD", b"/v2", 405),
        ("OPTIONS", b"/v2", 405),
        ("POST", MODEL + b"/infer", 501),
        ("POST", b"/v2/repository/index", 404),
        ("POST", b"/v2/repository/models/smartspec/unload", 404),
        ("POST", b"/v2/systemsharedmemory/region/a/register", 404),
        ("GET", b"/v2/cudasharedmemory/status", 404),
        ("GET", b"/v2/trace/setting", 404),
        ("GET", b"/v2/logging", 404),
        ("POST", MODEL + b"/trace/setting", 404),
        ("POST", MODEL + b"/../../repository/index", 404),
        ("POST", b"/v2/models/%2e%2e/generate", 404),
        ("POST", b"/v2/models/" + b"a" * 257 + b"/generate", 404),
        ("GET", MODEL + b"/ready\n", 404),
        ("GET", b"http://other/v2", 404),
    ],
)
def test_routes(method: str, path: bytes, status: int) -> None:
    assert status_of(limits.check_route, method, path) == status


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        (b"1.1", [(b"content-length", b"100")], 0),
        (b"1.1", [(b"content-length", b"101")], 413),
        (b"1.1", [(b"transfer-encoding", b"chunked")], 0),
        (b"1.1", [(b"transfer-encoding", b"chunked"), (b"content-length", b"1")], 400),
        (b"2.0", [], 505),
        # A name of 1, a value, and 4 for what stands between.
        (b"1.0", [(b"x", b"y" * (limits.MAX_LINE_BYTES - 5))], 0),
        (b"1.0", [(b"x", b"y" * (limits.MAX_LINE_BYTES - 4))], 431),
        (b"1.0", [(b"x", b"y" * 27)] * (limits.MAX_HEADER_BYTES // 32), 0),
        (b"1.0", [(b"x", b"y" * 27)] * (limits.MAX_HEADER_BYTES // 32 + 1), 431),
    ],
)
def test_framing(version: bytes, headers: list[tuple[bytes, bytes]], status: int) -> None:
    assert status_of(limits.check_framing, version, headers, 100) == status


@pytest.mark.parametrize(
    ("value", "status"),
    [(b"", 0), (b"identity", 0), (b"gzip", 415), (b"identity, gzip", 415), (b"\xff", 415)],
)
def test_compressed_bodies(value: bytes, status: int) -> None:
    assert status_of(limits.check_encoding, [(b"content-encoding", value)]) == status


def arrays(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def objects(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"text_input": "\xff"}', 0),
        (b'{"temperature": NaN, "seed": %s}' % (b"9" * 10_000), 0),
        (arrays(limits.MAX_DEPTH), 0),
        (objects(limits.MAX_DEPTH), 0),
        (arrays(limits.MAX_DEPTH + 1), 400),
        (objects(limits.MAX_DEPTH + 1), 400),
        (arrays(500_000), 400),
        (b"[" * 500_000, 400),
        (json.dumps(dict.fromkeys(map(str, range(limits.MAX_MEMBERS)))).encode(), 0),
        (json.dumps(dict.fromkeys(map(str, range(limits.MAX_MEMBERS + 1)))).encode(), 400),
        (b"", 400),
        (b"null", 400),
        (b"[{}]", 400),
        (b"{} {}", 400),
        (b"\xef\xbb\xbf{}", 400),
    ],
)
def test_json(body: bytes, status: int) -> None:
    assert status_of(limits.check_json, body, MODEL + b"/generate_stream") == status


def test_a_stream_needs_its_own_route() -> None:
    """Triton answers a stream on /generate with status 200 and an error in the body."""
    body = json.dumps({"stream": True}).encode()
    assert limits.check_json(body, MODEL + b"/generate_stream") == {"stream": True}
    with pytest.raises(Refused, match=r"^stream: "):
        limits.check_json(body, MODEL + b"/generate")


@pytest.mark.parametrize(
    ("name", "value", "is_sent"),
    [
        (b"content-type", b"application/json", True),
        (b"traceparent", b"00-ab", True),
        (b"accept-encoding", b"gzip, deflate, br", True),
        (b"accept-encoding", b"gzip;q=0.5, *;q=0", True),
        (b"accept-encoding", b"gzip;q=1e999", False),
        (b"accept-encoding", b"gzip;q=" + b"9" * 400, False),
        (b"inference-header-content-length", b"9" * 40, False),
        (b"content-length", b"5", False),
        (b"transfer-encoding", b"chunked", False),
        (b"expect", b"100-continue", False),
        (b"connection", b"close", False),
    ],
)
def test_headers_that_triton_is_sent(name: bytes, value: bytes, is_sent: bool) -> None:
    sent = [(name.decode(), value.decode())] if is_sent else []
    assert limits.forwarded([(name, value)]) == sent


def test_errors_are_shown_as_triton_shows_them() -> None:
    assert limits.error_body('a "b"') == b'{"error": "a \\"b\\""}'
