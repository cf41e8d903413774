"""Cases with hostile request bodies: their content and their size."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from random import Random

from hostile_http.case import (
    ANY,
    BAD,
    OK,
    TOO_LARGE,
    UNREAD,
    VALID,
    Case,
    chunked,
    fields,
    request,
    split,
)

DEPTHS = (33, 100, 1000, 10_000, 500_000)
OPENERS = ((b"[", b"]"), (b'{"a":', b"}"))


def _case(kind: str, body: bytes, expected: frozenset[int], limit: int) -> Case:
    return Case(kind, [request(body)], [TOO_LARGE if len(body) > limit else expected])


def random_bytes(random: Random, limit: int) -> Case:
    return _case("random bytes", random.randbytes(random.choice((1, 10, 1000, 50_000))), BAD, limit)


def broken_json(random: Random, limit: int) -> Case:
    """Truncated JSON, or JSON with one changed byte, which may still be valid."""
    at = random.randrange(len(VALID))
    if random.random() < 0.5:
        return _case("cut JSON", VALID[:at], BAD, limit)
    changed = VALID[:at] + bytes([random.randrange(256)]) + VALID[at + 1 :]
    return _case("changed JSON", changed, OK | UNREAD, limit)


def deep(random: Random, limit: int) -> Case:
    depth = random.choice(DEPTHS)
    opener, closer = random.choice(OPENERS)
    inner = opener * depth + b"1" + closer * depth
    body = random.choice((inner, b'{"text_input":' + inner + b',"max_tokens":2}'))
    return _case("deep JSON", body, BAD, limit)


def unclosed(random: Random, limit: int) -> Case:
    return _case("unclosed JSON", random.choice(OPENERS)[0] * random.choice(DEPTHS), BAD, limit)


def huge_field(random: Random, limit: int) -> Case:
    size = random.choice((limit // 8, limit // 2, limit - 1000, limit + 1, 2 * limit, 5_000_000))
    name = random.choice(
        ("text_input", "stop_words", "speculation_policy", "unknown", "parameters")
    )
    body = json.dumps(fields(**{name: "x" * size})).encode()
    return _case("huge field", body, UNREAD, limit)


def many_values(random: Random, limit: int) -> Case:
    count = random.choice((1000, 20_000, 200_000))
    value = random.choice((1, "x", None, 0.5))
    name = random.choice(("text_input", "stop_words", "max_tokens", "bad_words"))
    return _case(
        "many values", json.dumps(fields(**{name: [value] * count})).encode(), UNREAD, limit
    )


def many_members(random: Random, limit: int) -> Case:
    members = {f"k{i}": i for i in range(random.choice((600, 50_000)))}
    body = random.choice((fields(**members), fields(parameters=members)))
    return _case("many members", json.dumps(body).encode(), BAD, limit)


WRONG = (None, True, -1, 10**40, 1e300, "", "text", [], [[]], {}, {"a": 1}, [None], [1, "a"])
NAMES = ("text_input", "max_tokens", "temperature", "stop_words", "seed", "parameters")


def wrong_types(random: Random, limit: int) -> Case:
    """Values of random types. Some are valid, such as a text for a text field."""
    body = fields(**{random.choice(NAMES): random.choice(WRONG)})
    return _case("wrong types", json.dumps(body).encode(), OK | UNREAD, limit)


def left_out(random: Random, limit: int) -> Case:
    body = random.choice(({}, {"text_input": "x"}, {"max_tokens": 2}, {"stream": True}))
    return _case("inputs left out", json.dumps(body).encode(), BAD, limit)


def no_object(random: Random, limit: int) -> Case:
    body = random.choice(
        (b"", b" ", b"null", b"1", b'"x"', b"[]", b"[{}]", b"\xef\xbb\xbf{}", b"{}{}")
    )
    return _case("no JSON object", body, BAD, limit)


RAW = (
    (b'{"text_input":"a","text_input":"b","max_tokens":2}', UNREAD),
    (b'{"text_input":"a","max_tokens":%s}' % (b"9" * 5000), UNREAD),
    (b'{"text_input":"a","max_tokens":-%s}' % (b"9" * 30), UNREAD),
    (b'{"text_input":"a","max_tokens":2,"temperature":1e999}', UNREAD),
    (b'{"text_input":"a","max_tokens":2,"temperature":NaN}', UNREAD),
    (b'{"text_input":"a","max_tokens":2,"temperature":-Infinity}', UNREAD),
    (b'{"text_input":"\xff\xfe","max_tokens":2}', UNREAD),
    (b'{"text_input":"\xc0\x80\xed\xa0\x80","max_tokens":2}', UNREAD),
    (b'{"text_input":"\\ud800","max_tokens":2}', UNREAD),
    (b'{"text_input":"a\x00b","max_tokens":2}', UNREAD),
    (b'{"text_input":"a\\u0000b","max_tokens":2}', OK),
    (b'{"text_input\\u0000":"a","max_tokens":2}', UNREAD),
    (b'{"":"a","text_input":"a","max_tokens":2}', UNREAD),
)


def odd_values(random: Random, limit: int) -> Case:
    return _case("odd values", *random.choice(RAW), limit)


def compressed(random: Random, limit: int) -> Case:
    """A gzip bomb (10 MB in 10 kB) or a valid request, with or without Content-Encoding."""
    body = gzip.compress(random.choice((b" " * 10_000_000, VALID)))
    if random.random() < 0.3:
        return _case("unannounced gzip", body, BAD, limit)
    encoding = random.choice(("gzip", "deflate", "br", "gzip, gzip", "identity, gzip", "x"))
    sent = request(body, [("Content-Encoding", encoding)])
    return Case("compressed body", [sent], [frozenset({415})])


def padded(random: Random, limit: int) -> Case:
    """A valid request with a size near the limit."""
    size = limit + random.choice((-1000, -1, 0, 1, 2, 1000))
    body = VALID + b" " * (size - len(VALID))
    expected = [TOO_LARGE if size > limit else OK]
    if random.random() < 0.5:
        return Case("size at the limit", [request(body)], expected)
    return Case("size at the limit, chunked", [chunked(split(body, random, 65_536))], expected)


def far_too_large(random: Random, limit: int) -> Case:
    """A body above the limit: sent completely, or announced and sent in part."""
    size = random.choice((2 * limit, 8_000_000, 20_000_000))
    if random.random() < 0.5:
        return Case("far too large", [request(b"x" * size)], [TOO_LARGE])
    announced = request(b"", [("Content-Length", str(10**12 + size))], has_length=False)
    return Case("far too large, announced", [announced + b"x" * 1000], [TOO_LARGE])


def valid(random: Random, limit: int) -> Case:
    stop_words = ["x" * random.randint(1, 20) for _ in range(random.randint(1, 16))]
    body = fields(max_tokens=random.randint(1, 20), stop_words=stop_words)
    return _case("valid", json.dumps(body).encode(), OK, limit)


def own_parameters(random: Random, limit: int) -> Case:
    """Parameter names that Triton reserves."""
    name = random.choice(
        (
            "triton_enable_empty_final_response",
            "sequence_id",
            "priority",
            "timeout",
            "headers",
            "id",
        )
    )
    value = random.choice((1, -1, 2**63, "x", True))
    where = random.choice((fields(**{name: value}), fields(parameters={name: value})))
    return _case("Triton's parameters", json.dumps(where).encode(), ANY, limit)


BODIES: tuple[Callable[[Random, int], Case], ...] = (
    random_bytes,
    broken_json,
    deep,
    unclosed,
    huge_field,
    many_values,
    many_members,
    wrong_types,
    left_out,
    no_object,
    odd_values,
    compressed,
    padded,
    far_too_large,
    valid,
    own_parameters,
)
