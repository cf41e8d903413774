"""Names of special tokens in the texts of a request."""

from __future__ import annotations

import random
from typing import Any

import pytest
from endpoint_client import http
from standins import TINY

from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.formats.special_names import CUT, SpecialNames

MISTRAL = [*(f"[control_{i}]" for i in range(760)), "[INST]", "[/INST]", "<s>", "</s>", "[A]"]


def test_no_name_is_left() -> None:
    """Names that overlap, contain each other or begin with each other. The text is the same."""
    names = ["ab", "aba", "bb", "b", "a.b", "]^", "c-a", "\\d"]
    special, draw = SpecialNames(names), random.Random(1)
    for _ in range(2000):
        text = "".join(draw.choices("abc.]^-\\d", k=12))
        cut = special.cut(text)
        assert cut.replace(CUT, "") == text
        assert not any(name in cut for name in names if len(name) > 1), text
        assert (CUT in cut) == any(name in text for name in names if len(name) > 1), text
    assert SpecialNames([]).cut({"a": ["ab", 1]}) == {"a": ["ab", 1]}
    assert special.cut({f"a{CUT}b": [f"a{CUT}b", 1, None]}) == {f"a{CUT}b": [f"a{CUT}b", 1, None]}


def test_a_search_tries_few_alternatives_at_a_place() -> None:
    """Names share the branches of their letters: 770 names, and a few alternatives in all."""
    assert SpecialNames(MISTRAL)._pattern.pattern.count("|") < 20


FLOOD = "[" * 40_000
CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": FLOOD}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", FLOOD: "b"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": [FLOOD]}},
        "chat_template_kwargs",
    ),
    (
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": FLOOD}}],
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("body", "field"), CASES, ids=lambda case: str(case)[-30:])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_characters_are_counted_before_they_are_searched(
    path: str, body: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpecialNames, "cut", lambda *_: pytest.fail("searched"))
    error = http().post(path, json=body).json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["message"].endswith("characters, must be at most 32768 characters")


def test_more_cuts_than_tokens_of_the_context_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part between cuts is a text for the tokenizer, and has a token or more."""
    prompts = Prompts(TINY)
    monkeypatch.setattr(prompts, "encode_chat", lambda _: pytest.fail("tokenized"))
    body = {"messages": [{"role": "user", "content": "<|end|>" * 512}]}
    error = http(prompts=prompts).post("/v1/chat/completions", json=body).json()["error"]
    assert "got 512 tokens or more, must be at most 511 tokens" in error["message"]
