"""From JSON to tensors: what passes, and the sentence for what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smartspec_gateway.fields import request_of
from smartspec_gateway.limits import Refused

GOOD = {"text_input": "x", "max_tokens": 4}


def checked(fields: dict[str, Any] | bytes, *, may_stream: bool = True) -> dict[str, Any]:
    body = fields if isinstance(fields, bytes) else json.dumps(fields, ensure_ascii=False).encode()
    return request_of(body, may_stream=may_stream)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"max_tokens": [5]}, {"max_tokens": 5}),
        ({"max_tokens": -5}, {"max_tokens": -5}),
        ({"temperature": 1}, {"temperature": 1}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"stop_words": []}, {}),
        ({"stop_words": ["é", ""]}, {"stop_words": ["é", ""]}),
        ({"stop_words": "one"}, {"stop_words": ["one"]}),
        ({"input_ids": [1, 2]}, {"input_ids": [1, 2]}),
        ({"stream": [True]}, {"stream": True}),
        ({"id": "é"}, {"id": "é"}),
        ({"parameters": None}, {}),
        ({"parameters": {"top_k": 2}}, {"top_k": 2}),
        ({"early_stopping": False}, {}),
    ],
    ids=str,
)
def test_what_passes(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Ranges are checked by the backend."""
    assert checked(GOOD | fields) == GOOD | expected


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
        ({"temperature": 1e39}, "temperature: got 1e+39, must be a number, finite and at least 0"),
        ({"temperature": float("nan")}, "temperature: got nan, must be a number, finite"),
        ({"temperature": -(10**400)}, "temperature: got -1000"),
        ({"top_p": "0.5"}, 'top_p: got "0.5", must be a number, in [0, 1]'),
        (
            {"stop_words": ["a", 5]},
            "stop_words: got 5, must be a list with each element text, at least one character and "
            "at most 1024 bytes",
        ),
        ({"stop": ["x"]}, "stop: unknown; use stop_words"),
        ({"max_token": 5}, "unknown parameter 'max_token': did you mean max_tokens"),
        ({"id": 5}, "id: must be text of at most 256 bytes"),
        ({"id": "a\0b"}, "id: must have no character NUL"),
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
        checked(GOOD | fields)
    assert refused.value.status == 400
    assert refused.value.message.startswith(sentence)
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body: is empty, must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"[{}]", "must be a JSON object"),
        (b"{} {}", "must be JSON"),
        (b"\xef\xbb\xbf{}", "must be JSON"),
        (b"[" * 500_000, "nested"),
        (b'{"a":' * 500_000 + b"1" + b"}" * 500_000, "nested"),
        (b'{"text_input": "a", "max_tokens": 1, "max_tokens": 2}', '"max_tokens": given twice'),
        (b'{"text_input": "\xff", "max_tokens": 1}', "text_input: must be valid UTF-8"),
        (b'{"text_input": "\\ud800", "max_tokens": 1}', "text_input: must be valid UTF-8"),
        (b'{"id": "\\ud800", "text_input": "a"}', "id: must be valid UTF-8"),
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
        checked(body)
    assert refused.value.status == 400
    refused.value.message.encode()


@pytest.mark.parametrize("stream", [True, [True]])
@pytest.mark.parametrize("place", ["field", "parameter"])
def test_a_stream_needs_its_own_route(stream: object, place: str) -> None:
    fields: dict[str, Any] = {"stream": stream}
    fields = fields if place == "field" else {"parameters": fields}
    assert checked(GOOD | fields)["stream"] is True
    with pytest.raises(Refused, match=r"^stream: "):
        checked(GOOD | fields, may_stream=False)
