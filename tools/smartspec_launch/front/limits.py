"""Limits of one HTTP request. Pure checks, which raise Refused.

Triton has no such limits. Release 24.10, which the wheel contains, crashes on large bodies, deep
JSON, many chunks and some headers (docs/operate/security.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from smartspec_launch.front.refused import Refused

Headers = Collection[tuple[bytes, bytes]]
"""Names in lower case."""

MAX_HEADER_BYTES = 32 * 1024
MAX_LINE_BYTES = 8000
"""For one header. At 8,192 bytes Triton closes the connection without an answer."""

MAX_CHUNKS = 4096
"""For one request with chunked encoding. Each chunk takes the parser about 10 microseconds."""

MAX_DEPTH = 32
MAX_MEMBERS = 512
"""For one JSON object. The backend looks up each name, and 50,000 names took 7 s."""

MAX_DIGITS = 20
"""Of an integer; the largest of 64 bits has as many."""

MAX_HELD_BYTES = 256 * 1024 * 1024
"""For the bodies of all requests together."""

MAX_CONNECTIONS = 4096
RECEIVE_S = 30.0
"""Time limit from the start of a request, or of the connection, to the last byte of the body."""

SEND_S = 60.0
"""How long 64 KiB of a response may wait for a client that does not read."""

_MODEL = rb"/v2/models/[\w.-]{1,256}(?:/versions/\d{1,18})?"
_ROUTES = (
    (re.compile(rb"/v2(?:/health/(?:live|ready))?"), "GET"),
    (re.compile(_MODEL + rb"(?:/(?:ready|config|stats))?"), "GET"),  # /v2/models/stats too
    (re.compile(_MODEL + rb"/generate(?:_stream)?"), "POST"),
)
_INFER = re.compile(_MODEL + rb"/infer")
_ENCODING = rb"[\w*-]+(?:\s*;\s*q=[01](?:\.\d{0,3})?)?"
_ACCEPT_ENCODING = re.compile(_ENCODING + rb"(?:\s*,\s*" + _ENCODING + rb")*")

_NOT_FORWARDED = {
    # They describe one connection, not the request (RFC 9110, 7.6.1).
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    # The front sends the body again, in one piece.
    b"content-encoding",
    b"content-length",
    b"expect",
    b"host",
    # Used only by /infer, which is not forwarded. Some values crash some versions of Triton.
    b"inference-header-content-length",
}


def error_body(message: str) -> bytes:
    """The JSON body of an error, in Triton's format."""
    return json.dumps({"error": message}).encode()


def check_route(method: str, path: bytes) -> None:
    """Check method and path. path: raw, without the query."""
    if _INFER.fullmatch(path):
        raise Refused(501, "infer: the model streams; use generate, generate_stream or gRPC")
    for route, allowed in _ROUTES:
        if route.fullmatch(path):
            if method != allowed:
                raise Refused(405, f"{method}: the method must be {allowed} for this path")
            return
    shown = path[:80].decode("ascii", "replace")
    raise Refused(
        404,
        f"{shown}: not served; available are GET /v2, /v2/health/live, /v2/health/ready and "
        "/v2/models/NAME with /ready, /config and /stats, and POST /v2/models/NAME/generate and "
        "/generate_stream",
    )


def check_framing(version: bytes, headers: Headers, max_body_bytes: int) -> None:
    """Check version and headers before the body is read. version: such as b"1.1"."""
    if version not in (b"1.0", b"1.1"):
        raise Refused(505, f"HTTP {version.decode('ascii')}: the version must be 1.0 or 1.1")
    values = dict(headers)
    sizes = [len(name) + len(value) + 4 for name, value in headers]
    if sum(sizes) > MAX_HEADER_BYTES or max(sizes, default=0) > MAX_LINE_BYTES:
        raise Refused(
            431,
            f"headers: got {sum(sizes)} bytes, the longest {max(sizes)}, must be at most "
            f"{MAX_HEADER_BYTES} in total and at most {MAX_LINE_BYTES} each",
        )
    length = values.get(b"content-length")
    if length is not None and b"transfer-encoding" in values:
        raise Refused(400, "Content-Length: must be left out with Transfer-Encoding")
    if length is not None and int(length) > max_body_bytes:
        raise too_large(int(length), max_body_bytes)


def too_large(num_bytes: int, max_body_bytes: int) -> Refused:
    return Refused(
        413,
        f"body: got {num_bytes} bytes or more, must be at most {max_body_bytes}; the limit grows "
        "with limits.max_context_len",
    )


def check_encoding(headers: Headers) -> None:
    """Refuse compressed bodies, because their size after decompression is unknown."""
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            shown = value[:40].decode("ascii", "replace")
            raise Refused(415, f"Content-Encoding: got {shown}, must be identity or left out")


def check_json(body: bytes | bytearray, path: bytes) -> dict[str, Any]:
    """The body as a JSON object, within the limits of depth and members. Text in it is decoded as
    Latin-1.

    path: raw, without query.
    """
    try:
        # Latin-1 decodes any byte and keeps the JSON structure. The backend refuses text that is
        # not UTF-8 and names its field.
        text = body.decode("latin-1")
        document = json.loads(text, parse_int=_number, object_pairs_hook=_members)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise Refused(400, f"body: must be JSON: {error}") from None
    if not isinstance(document, dict):
        raise Refused(400, f"body: got {type(document).__name__}, must be a JSON object")
    _check_depth(document)
    if path.endswith(b"/generate") and document.get("stream") is True:
        raise Refused(400, "stream: got true, must be false for /generate; use /generate_stream")
    return document


def _number(digits: str) -> int | float:
    """Python takes long to convert thousands of digits to an integer."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_MEMBERS:
        raise Refused(
            400, f"body: got an object of {len(pairs)} members, must be at most {MAX_MEMBERS}"
        )
    return dict(pairs)


def _check_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> Refused:
    return Refused(400, f"body: JSON must be nested at most {MAX_DEPTH} deep")


def forwarded(headers: Headers) -> list[tuple[str, str]]:
    """The request headers that are sent to Triton."""
    found = []
    for name, value in headers:
        if name in _NOT_FORWARDED:
            continue
        # Triton 24.10 crashes on a weight such as q=1e999.
        if name == b"accept-encoding" and not _ACCEPT_ENCODING.fullmatch(value):
            continue
        found.append((name.decode("latin-1"), value.decode("latin-1")))
    return found


def returned(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The response headers that are sent to the client."""
    hop_by_hop = (b"connection", b"keep-alive", b"transfer-encoding")
    return [(name, value) for name, value in headers if name.lower() not in hop_by_hop]
