"""Names and types of fields: what passes, and the sentence for what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smartspec_launch.front.fields import check_fields
from smartspec_launch.front.limits import check_json
from smartspec_launch.front.refused import Refused

GOOD = {"text_input": "x", "max_tokens": 4}


def check(fields: dict[str, Any]) -> None:
    """As the front does: JSON in UTF-8, decoded as Latin-1."""
    body = json.dumps(fields, ensure_ascii=False).encode()
    check_fields(check_json(body, b"/v2/models/smartspec/generate"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": [4]},
        {"temperature": 1},
        {"temperature": float("nan")},
        {"seed": 2**64 - 1},
        {"end_id": -1},
        {"stop_words": []},
        {"stop_words": "one"},
        {"input_ids": [1, 2]},
        {"stream": False},
        {"id": "mine", "parameters": {"triton_grpc_error": True}},
        {"early_stopping": False},
        {"max_tokens": -5},
    ],
    ids=str,
)
def test_what_passes(fields: dict[str, Any]) -> None:
    """Ranges are checked by the backend."""
    check(GOOD | fields)


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
        ({"stream": 1}, "stream: got 1, must be true or false"),
        ({"top_p": "0.5"}, 'top_p: got "0.5", must be a number, in [0, 1]'),
        (
            {"stop_words": [5]},
            "stop_words: got 5, must be a list with each element text, at least one character and "
            "at most 1024 bytes",
        ),
        ({"stop": ["x"]}, "stop: use stop_words; to cancel a request, close its stream"),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "messages: not supported; write the conversation as text in text_input",
        ),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        check(GOOD | fields)
    assert (refused.value.status, refused.value.message) == (400, sentence)


def test_long_values_are_cut() -> None:
    with pytest.raises(Refused) as refused:
        check(GOOD | {"max_tokens": "x" * 10_000})
    assert len(refused.value.message) < 200


def test_a_misspelled_field_is_named_before_a_missing_one() -> None:
    with pytest.raises(Refused, match=r"'max_token': did you mean max_tokens"):
        check({"text_input": "x", "max_token": 5})
    with pytest.raises(Refused, match=r"^text_input and max_tokens: required"):
        check({"temperature": 0.0})
