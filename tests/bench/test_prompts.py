"""Prompts: real texts, documents of the tiny pair, files, and chat templates."""

from __future__ import annotations

import json
import shutil
import unicodedata
from itertools import islice, pairwise
from pathlib import Path

import pytest
from servers import TINY

from smartspec_bench import texts
from smartspec_bench.live import Load
from smartspec_bench.prompts import (
    Prompt,
    PromptFileError,
    chat_template,
    generated,
    plain,
    read_prompts,
)


@pytest.mark.parametrize(
    ("workload", "shortest", "longest"),
    [
        ("chat", 40, 400),
        ("sql", 150, 700),
        ("summarize", 450, 1200),
        ("qa", 450, 1200),
        ("edit", 1000, 1900),
    ],
)
def test_a_workload_has_40_texts(workload: str, shortest: int, longest: int) -> None:
    """Lengths are in characters: a token has three to five."""
    prompts = texts.prompts(workload)
    assert len(prompts) == texts.NUM_PROMPTS
    assert texts.prompt(workload, 43) == prompts[3]
    for prompt in prompts:
        assert shortest <= len(prompt) <= longest, prompt
        assert prompt == unicodedata.normalize("NFC", prompt).strip()
        assert all(char == "\n" or char.isprintable() for char in prompt), prompt


def test_no_prompt_occurs_twice() -> None:
    prompts = [
        text for name in (*texts.WORKLOADS, texts.EDIT, *texts.TINY) for text in texts.prompts(name)
    ]
    assert len(set(prompts)) == len(prompts)


def test_prompts_of_files(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"text_input": "b", "kind": "k"}\n')
    assert read_prompts(own) == [Prompt("a", 3), Prompt("b", None, "k")]
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    shared = tmp_path / "shared.json"
    shared.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[1:]}]))
    assert read_prompts(shared) == [Prompt("hi", kind="sharegpt")]


def test_the_first_turn_of_a_question_is_its_prompt(tmp_path: Path) -> None:
    """The layout of MT-bench and of Spec-Bench."""
    path = tmp_path / "question.jsonl"
    questions = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x"]},
        {"question_id": 241, "category": "translation", "turns": ["c"]},
        {"turns": ["d"]},
    ]
    path.write_text("\n".join(map(json.dumps, questions)))
    kinds = ("writing", "translation", "")
    assert read_prompts(path) == [Prompt(t, kind=k) for t, k in zip("acd", kinds, strict=True)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "holds no prompt"),
        ("{", "line 1: Expecting"),
        ('{"prompt": ""}', "line 1: prompt: got"),
        ('{"prompt": "a"}\n{"text": "a"}', "line 2: unknown key"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: got 0"),
        ('{"turns": []}', "line 1: turns: got"),
        ('{"turns": [5]}', "line 1: turns: got"),
        ('{"turns": "a"}', "line 1: turns: got"),
        ('[{"conversations": []}]', "holds no prompt"),
        ('[{"conversations": [{"value": "hi"}]}]', "entry 1: 'from'"),
    ],
)
def test_prompt_files_that_are_none(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=word):
        read_prompts(path)


@pytest.mark.parametrize("workload", ["mixed", "tiny"])
def test_generated_prompts_are_the_workloads_in_turn(workload: str) -> None:
    kinds = [prompt.kind for prompt in islice(generated(workload), 5)]
    assert kinds == ["chat", "sql", "summarize", "qa", "chat"]


def test_every_text_is_used_before_one_is_used_again() -> None:
    found = [prompt.text for prompt in islice(generated("qa"), 80)]
    assert len(set(found[:40])) == 40
    assert sorted(found[:40]) == sorted(found[40:])
    assert found[:40] != found[40:]
    assert found[:40] != [prompt.text for prompt in islice(generated("qa", seed=2), 40)]


def test_the_sessions_of_an_agent() -> None:
    """Each request begins with the one before it in its session, and a result follows each call."""
    assert len(texts.sessions("agent")) == 5
    for session in texts.sessions("agent"):
        for before, chat in pairwise(session):
            assert chat.messages[: len(before.messages)] == before.messages
            assert [m["role"] for m in chat.messages[-2:]] == ["assistant", "tool"]
            assert chat.messages[-2]["tool_calls"]


def test_sessions_take_turns() -> None:
    num = sum(map(len, texts.sessions("agent")))
    found = [prompt.text for prompt in islice(generated("agent"), 2 * num)]
    assert sorted(found[:num]) == sorted(found[num:])
    assert len(set(found)) == num
    firsts = {plain(session[0]) for session in texts.sessions("agent")}
    assert set(found[:5]) == firsts
    assert all(text.startswith(tuple(found[:5])) for text in found[5:10])


def test_the_chat_template_of_a_model(tmp_path: Path) -> None:
    """A directory with a template, the same without it, and one without a tokenizer."""
    shutil.copy(TINY / "target" / "tokenizer.json", tmp_path)
    assert chat_template(tmp_path)("hi") == chat_template(None)("hi") == "hi"
    template = "<{{ messages[0].content }}>{{ tools | map(attribute='function.name') | join(',') }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    template = chat_template(tmp_path)
    assert template("hi") == "<hi>"
    assert template(texts.sessions("agent")[0][0]).endswith(">bash,read,edit,write,grep")
    assert all(one.text.startswith("<") for one in islice(generated("mixed", 1, template), 8))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        chat_template(TINY)


@pytest.mark.parametrize("own", [[], [Prompt(c) for c in "abc"]])
def test_a_round_continues_where_the_one_before_ended(own: list[Prompt]) -> None:
    load = Load(sizes=(2,), workload="sql", rounds=2, max_tokens=6, own=own)
    found = [prompt for number in (-1, 0, 1) for prompt in load.prompts(number, 2)]
    assert found == (own * 2 if own else list(islice(generated("sql"), 6)))
