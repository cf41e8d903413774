"""Cases with hostile chunks, headers and paths, and with clients that disconnect or wait."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hostile_http.case import (
    ANY,
    BAD,
    GENERATE,
    OK,
    STREAM,
    TOO_LARGE,
    VALID,
    Case,
    Step,
    chunked,
    fields,
    request,
    split,
)

REFUSED = frozenset({400, 404, 405, 413, 431, 501, 505})
BROKEN_OFF = frozenset({200, 400, 408})
CHUNKED = [("Transfer-Encoding", "chunked")]


def small_chunks(random: Random, limit: int) -> Case:
    return Case("small chunks", [chunked(split(VALID, random, random.choice((1, 3, 20))))], [OK])


def too_many_chunks(random: Random, limit: int) -> Case:
    count = random.choice((5000, 100_000, 600_000))
    return Case("too many chunks", [chunked([b" "] * count)], [TOO_LARGE])


def chunk_extensions(random: Random, limit: int) -> Case:
    if random.random() < 0.5:
        return Case("chunk extensions", [chunked([VALID], extension=b";a=b")], [OK])
    long = b";" + b"a" * 2_000_000
    return Case("long chunk extension", [chunked([VALID], extension=long)], [REFUSED])


SIZES = (b"-1", b"g", b"", b"0x5", b"+5", b"5 5", b"f" * 40, b"\x00", b"5;\x00", b" 5")


def bad_chunk_size(random: Random, limit: int) -> Case:
    head = request(b"", CHUNKED, has_length=False)
    sent = head + random.choice(SIZES) + b"\r\n" + VALID + b"\r\n0\r\n\r\n"
    return Case("bad chunk size", [sent], [REFUSED])


def chunk_longer_than_said(random: Random, limit: int) -> Case:
    head = request(b"", CHUNKED, has_length=False)
    return Case("chunk longer than said", [head + b"3\r\n" + VALID + b"\r\n0\r\n\r\n"], [REFUSED])


def no_terminator(random: Random, limit: int) -> Case:
    end = random.choice((b"", b"0", b"0\r\n", b"5\r\nab"))
    steps = [chunked([VALID], end), Step.HALF_CLOSE]
    return Case("no last chunk", steps, [BROKEN_OFF], may_be_silent=True)


def trailers(random: Random, limit: int) -> Case:
    few = random.random() < 0.5
    lines = b"".join(b"X-%d: y\r\n" % i for i in range(3 if few else 200_000))
    return Case(
        "trailers", [chunked([VALID], b"0\r\n" + lines + b"\r\n")], [OK if few else REFUSED]
    )


LENGTHS = ("-1", "+5", "0x10", "5, 6", "1e3", "", " ", "9" * 30, "9" * 6000, "five")


def bad_length(random: Random, limit: int) -> Case:
    headers = [("Content-Length", random.choice(LENGTHS))]
    return Case("bad Content-Length", [request(VALID, headers, has_length=False)], [REFUSED])


def two_framings(random: Random, limit: int) -> Case:
    """Conflicting framing headers, as used for request smuggling."""
    n = str(len(VALID))
    headers = random.choice(
        (
            [("Content-Length", n), *CHUNKED],
            [*CHUNKED, ("Content-Length", n)],
            [("Content-Length", n), ("Content-Length", str(len(VALID) - 1))],
            [("Transfer-Encoding", "gzip, chunked")],
            [("Transfer-Encoding", "identity"), ("Content-Length", n)],
            [*CHUNKED, ("Transfer-Encoding", "identity")],
            [("Transfer-Encoding", "xchunked")],
            [("Transfer-Encoding", "chunked\x0b")],
            [("Transfer-Encoding ", "chunked")],
        )
    )
    sent = request(b"", headers, has_length=False) + b"0\r\n\r\n"
    return Case("two framings", [sent], [REFUSED])


def odd_header(random: Random, limit: int) -> Case:
    name, value, expected = random.choice(
        (
            ("Accept-Encoding", "gzip;q=1e999", OK),
            ("Accept-Encoding", "gzip;q=" + "9" * 5000, OK),
            ("Accept-Encoding", "x" * 7000, OK),
            ("Accept-Encoding", "x" * 8200, REFUSED),
            ("Inference-Header-Content-Length", "9" * 40, OK),
            ("Inference-Header-Content-Length", "-1", OK),
            ("Expect", "200-ok", ANY),
            ("Expect", "100-continue", OK),
            ("Content-Type", "\xff\xfe", OK),
            ("Connection", "Content-Type, Content-Length", OK),
            ("Upgrade", "websocket", OK),
            ("Connection", "Upgrade", OK),
            ("Host", "other", ANY),
            ("traceparent", "00-zz", OK),
            ("endpoint-load-metrics-format", "x" * 1000, OK),
            ("triton_grpc_error", "true", OK),
            ("X", "a\x00b", BAD),
            ("X", "a\rb", BAD),
            ("X\x00", "a", BAD),
            ("X Y", "a", BAD),
            ("", "a", BAD),
        )
    )
    return Case("odd header", [request(VALID, [(name, value)])], [expected])


def many_headers(random: Random, limit: int) -> Case:
    count, length, expected = random.choice(
        ((50, 10, OK), (3000, 100, REFUSED), (1, 10**6, REFUSED))
    )
    headers = [(f"X-{i}", "y" * length) for i in range(count)]
    return Case("many or long headers", [request(VALID, headers)], [expected])


LINES = (
    b"POST / HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET  / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v2\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\r\n" * 50_000,
)


def bad_request_line(random: Random, limit: int) -> Case:
    line = random.choice(LINES)
    steps = [line, Step.HALF_CLOSE]
    return Case("bad request line", steps, [REFUSED], may_be_silent=True)


PATHS = (
    "/v2/repository/index",
    "/v2/repository/models/smartspec/unload",
    "/v2/repository/models/smartspec/load",
    "/v2/systemsharedmemory/region/x/register",
    "/v2/cudasharedmemory/status",
    "/v2/trace/setting",
    "/v2/logging",
    "/v2/models/smartspec/infer",
    "/v2/models/smartspec/../../repository/index",
    "/v2/models/%2e%2e/generate",
    "/v2//models/smartspec/generate",
    "/v2/models/smartspec/versions/-1/generate",
    "/v2/models/" + "a" * 5000 + "/generate",
    "//127.0.0.1/v2",
    "http://127.0.0.1/v2",
    "*",
    "/",
)


def closed_path(random: Random, limit: int) -> Case:
    method = random.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X" * 50))
    return Case(
        "closed path", [request(b"{}", path=random.choice(PATHS), method=method)], [REFUSED]
    )


def wrong_method(random: Random, limit: int) -> Case:
    method = random.choice(("GET", "PUT", "DELETE", "HEAD", "post"))
    return Case("wrong method", [request(VALID, method=method)], [frozenset({405})])


def version_that_is_not(random: Random, limit: int) -> Case:
    path = f"/v2/models/smartspec/versions/{random.choice(('2', '999999999999999999'))}/generate"
    return Case("unknown version", [request(path=path)], [frozenset({400, 404})])


def pipelined(random: Random, limit: int) -> Case:
    count = random.randint(2, 8)
    if random.random() < 0.5:
        return Case("pipelined", [request() * count], [OK] * count)
    sent = request() * count + b"garbage\r\n\r\n"
    return Case("pipelined, then garbage", [sent], [*[OK] * count, BAD])


def reset(random: Random, limit: int) -> Case:
    """A reset at different points of a request, with a short or a long answer."""
    long = str(fields(max_tokens=300, stream=True)).replace("'", '"').replace("True", "true")
    sent = random.choice((request(), request(long.encode(), path=STREAM)))
    at = random.choice((0, 1, 30, len(sent) - 10, len(sent)))
    return Case("reset", [sent[:at], Step.RESET], [BROKEN_OFF], may_be_silent=True)


def half_closed(random: Random, limit: int) -> Case:
    at = random.choice((0, 30, len(request()) - 10, len(request())))
    steps = [request()[:at], Step.HALF_CLOSE]
    return Case("half-closed", steps, [BROKEN_OFF], may_be_silent=True)


FRAMINGS: tuple[Callable[[Random, int], Case], ...] = (
    small_chunks,
    too_many_chunks,
    chunk_extensions,
    bad_chunk_size,
    chunk_longer_than_said,
    no_terminator,
    trailers,
    bad_length,
    two_framings,
    odd_header,
    many_headers,
    bad_request_line,
    closed_path,
    wrong_method,
    version_that_is_not,
    pipelined,
    reset,
    half_closed,
)

LATE = frozenset({408})


def slow_cases() -> list[Case]:
    """Cases that last as long as the server waits."""
    stream = b'{"text_input": "Question:", "max_tokens": 200, "stream": true}'
    begun = request()[:-5]
    return [
        Case("idle connection", [], [LATE], may_be_silent=True),
        Case("slow headers", [b"POST " + GENERATE.encode(), Step.DRIP, b"x" * 1000], [LATE]),
        Case(
            "slow body",
            [request(b"", [("Content-Length", "1000")], has_length=False), Step.DRIP, b" " * 1000],
            [LATE],
        ),
        Case("slow chunks", [chunked([VALID], b""), Step.DRIP, b"1\r\n \r\n" * 500], [LATE]),
        Case(
            "huge chunk", [request(b"", CHUNKED, has_length=False) + b"f" * 16 + b"\r\nx"], [LATE]
        ),
        Case("body that stops", [begun], [LATE]),
        Case("reader that waits", [request(stream, path=STREAM), Step.PAUSE], [OK]),
    ]
