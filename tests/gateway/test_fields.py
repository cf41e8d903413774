"""From JSON to tensors: what passes, and the sentence for what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smartspec_gateway.fields import request_of
from smartspec_gateway.limits import Refused

GOOD = {"text_input": "x", "max_tokens": 4}


def tensors(fields: dict[str, Any] | bytes, *, may_stream: bool = True) -> dict[str, bytes]:
    """Values as bytes by name."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields, ensure_ascii=False).encode()
    request = request_of(body, "smartspec", "", may_stream=may_stream)
    names = [tensor.name for tensor in request.inputs]
    return dict(zip(names, request.raw_input_contents, strict=True))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"max_tokens": [5]}, {"max_tokens": b"\5\0\0\0"}),
        ({"max_tokens": -5}, {"max_tokens": b"\xfb\xff\xff\xff"}),
        ({"temperature": 1}, {"temperature": b"\0\0\x80\x3f"}),
        ({"temperature": 1e39}, {"temperature": b"\0\0\x80\x7f"}),
        ({"temperature": -(10**400)}, {"temperature": b"\0\0\x80\xff"}),
        ({"seed": 2**64 - 1}, {"seed": b"\xff" * 8}),
        ({"stop_words": []}, {}),
        ({"stop_words": ["é", ""]}, {"stop_words": b"\2\0\0\0\xc3\xa9\0\0\0\0"}),
        ({"stop_words": "one"}, {"stop_words": b"\3\0\0\0one"}),
        ({"input_ids": [1, 2]}, {"input_ids": b"\1\0\0\0\2\0\0\0"}),
        ({"stream": True}, {"stream": b"\1"}),
        ({"id": "mine"}, {}),
        ({"parameters": None}, {}),
        ({"parameters": {"top_k": 2}}, {"top_k": b"\2\0\0\0"}),
        ({"early_stopping": False}, {}),
    ],
    ids=str,
)
def test_what_passes(fields: dict[str, Any], expected: dict[str, bytes]) -> None:
    """Ranges are checked by the backend."""
    good = {"text_input": b"\1\0\0\0x", "max_tokens": b"\4\0\0\0"}
    assert tensors(GOOD | fields) == good | expected


def test_the_id_and_the_model_reach_triton() -> None:
    request = request_of(json.dumps(GOOD | {"id": "é"}).encode(), "other", "2", may_stream=True)
    assert (request.id, request.model_name, request.model_version) == ("é", "other", "2")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": "many"}, 'max_tokens: got "many", must be an integer, at least 1'),
        ({"max_tokens": "größer"}, 'max_tokens: got "größer", must be an integer, at least 1'),
        ({"max_tokens": 6.5}, "max_tokens: got 6.5, must be an integer, at least 1"),
        ({"max_tokens": True}, "max_tokens: got true, must be an integer, at least 1"),
        ({"max_tokens": None}, "max_tokens: got null, must be an integer, at least 1"),
        ({"max_tokens": 3_000_000_000}, "max_tokens: got 3000000000, must be in 1..2147483647"),
        ({"seed": -1}, "seed: got -1, must be in 0..18446744073709551615"),
        ({"max_tokens": [4, 4]}, "max_tokens: got 2 values, must be one value"),
        ({"text_input": 7}, "text_input: got 7, must be text"),
        ({"text_input": ["a", "b"]}, "text_input: got 2 values, must be one value"),
        ({"stop_words": ["x"] * 17}, "stop_words: got 17 elements, must be a list of at most 16"),
        ({"stream": 1}, "stream: got 1, must be true or false"),
        ({"top_p": "0.5"}, 'top_p: got "0.5", must be a number, in [0, 1]'),
        (
            {"stop_words": ["a", 5]},
            "stop_words: got 5, must be a list with each element text, at least one character and "
            "at most 1024 bytes",
        ),
        ({"stop": ["x"]}, "stop: unknown; use stop_words"),
        ({"max_token": 5}, "unknown parameter 'max_token': did you mean max_tokens"),
        ({"id": 5}, "id: must be text of at most 256 bytes"),
        ({"id": "x" * 257}, "id: must be text of at most 256 bytes"),
        ({"parameters": [1]}, "parameters: got [1], must be an object"),
        ({"parameters": {"topp": 1}}, "unknown parameter 'topp': did you mean top_p"),
        (
            {"parameters": {"top_k": 4294967297}},
            "top_k: got 4294967297, must be in -1..2147483647",
        ),
        ({"parameters": {"max_tokens": 5}}, "max_tokens: given both as a field and in parameters"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        tensors(GOOD | fields)
    assert refused.value.status == 400
    assert refused.value.message.startswith(sentence)
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "must be JSON"),
        (b"null", "must be a JSON object"),
        (b"[{}]", "must be a JSON object"),
        (b"{} {}", "must be JSON"),
        (b"\xef\xbb\xbf{}", "must be JSON"),
        (b"[" * 500_000, "nested"),
        (b'{"a":' * 500_000 + b"1" + b"}" * 500_000, "nested"),
        (b'{"text_input": "a", "max_tokens": 1, "max_tokens": 2}', '"max_tokens": given twice'),
        (b'{"text_input": "\xff", "max_tokens": 1}', "text_input: must be valid UTF-8"),
        (b'{"text_input": "\\ud800", "max_tokens": 1}', "text_input: must be valid UTF-8"),
        (b'{"\\ud800": 1}', "unknown parameter"),
        (b'{"temperature": 0.0}', "text_input and max_tokens: required"),
        (
            b'{"text_input": "a", "max_tokens": %s}' % (b"9" * 9999),
            "an integer has more than 4300 digits",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bodies_that_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        tensors(body)
    assert refused.value.status == 400
    refused.value.message.encode()


@pytest.mark.parametrize("stream", [True, [True]])
@pytest.mark.parametrize("place", ["field", "parameter"])
def test_a_stream_needs_its_own_route(stream: object, place: str) -> None:
    fields: dict[str, Any] = {"stream": stream}
    fields = fields if place == "field" else {"parameters": fields}
    assert tensors(GOOD | fields)["stream"] == b"\1"
    with pytest.raises(Refused, match=r"^stream: "):
        tensors(GOOD | fields, may_stream=False)
