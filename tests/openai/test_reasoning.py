"""Reasoning blocks at the beginning of generated text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from endpoint_client import HELLO, http
from httpx2 import Client
from standins import TINY, Echo, text_with
from tokenizers import Tokenizer

from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.formats.reasoning import (
    ALL_MARKS,
    CHANNEL,
    THINK,
    Marks,
    Place,
    ReasoningParser,
    Start,
    marks_in,
    start_of,
)
from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.compiler import GrammarCompiler

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}{{ tools }}"
    "{% if is_inside %}<think>\n{% endif %}"
)
"""Drops the reasoning of earlier messages, as templates of reasoning models do."""


@pytest.mark.parametrize(
    ("text", "is_inside", "expected"),
    [
        ("a </think> b", True, ("a ", "b")),
        ("\na</think>\n\nb\n", True, ("a", "b\n")),
        ("<think>a</think>b", False, ("a", "b")),
        ("\n <think> a</think> b", False, ("a", "b")),
        (" a <think>b</think>", False, ("", " a <think>b</think>")),
        ("a</think>b", False, ("", "a</think>b")),
        ("<thin", False, ("", "<thin")),
        (" ", False, ("", " ")),
        ("a</thin", True, ("a</thin", "")),
        ("a</th</think>b</think>", True, ("a</th", "b</think>")),
        ("<think></think>", False, ("", "")),
        ("", True, ("", "")),
    ],
)
def test_the_split_is_the_same_for_all_parts(
    text: str, is_inside: bool, expected: tuple[str, str]
) -> None:
    for size in (1, 2, 3, 100):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert split(parts, Start(THINK, "inside" if is_inside else "before")) == expected, size


CALL = '<|tool_call>call:f{x:<|"|><|channel>thought<channel|> <|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("<|channel>thought\na\n<channel|>b", "before", ("a\n", "b")),
        ("\n<|channel>thought\n<channel|>\nb\n", "before", ("", "b\n")),
        ("<|channel>thought<channel|>b", "before", ("", "b")),
        ("b < c", "before", ("", "b < c")),
        (" b", "after", ("", " b")),
        ("a<channel|>b", "inside", ("a", "b")),
        ("<|channel><|channel>thought\na<channel|>b", "before", ("a", "b")),
        ("b<channel|>", "after", ("", "b")),
        ("b<|channel>thought\n<channel|><channel|>", "after", ("", "b")),
        ("b<|channel>thought\na<channel|>c<|channel>", "before", ("a", "bc")),
        ("<|channel>thought\na", "before", ("a", "")),
        ("<|channel>though", "before", ("", "though")),
        (f"<|channel>thought\na<channel|>{CALL}<channel|>", "before", ("a", CALL)),
        (CALL[:40], "after", ("", CALL[:40])),
        ("<|tool_cal", "after", ("", "<|tool_cal")),
    ],
)
def test_blocks_of_gemma_are_anywhere_outside_of_calls(
    text: str, place: Place, expected: tuple[str, str]
) -> None:
    for size in (1, 2, 3, 100):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert split(parts, Start(CHANNEL, place)) == expected, size


@pytest.mark.parametrize("marks", ALL_MARKS, ids=lambda marks: marks.begin)
def test_blocks_of_all_models_are_split(marks: Marks) -> None:
    assert marks_in(f"{{{{ '{marks.begin}' + thought + '{marks.end}' }}}}") is marks
    begin, end = marks[:2]
    for prompt, text, expected in (
        ("[model]", f"{begin}a < b{end}\nc [", ("a < b", "c [")),
        (f"[model]{begin}\n", f"a < b{end}\nc [", ("a < b", "c [")),
        ("[model]", f"{begin}a{end[:-1]}", (f"a{end[:-1]}", "")),
        ("[model]", "c [", ("", "c [")),
    ):
        start = start_of(marks, prompt)
        assert start is not None
        for size in (1, 3, 100):
            parts = [text[at : at + size] for at in range(0, len(text), size)]
            assert split(parts, start) == expected, (text, size)


def test_marks_around_an_answer_are_dropped() -> None:
    marks = marks_in("<|END_THINKING|>")
    assert marks is not None
    text = "<|START_RESPONSE|>Yes <|.<|END_RESPONSE|><|START_TEXT|>"
    call = "<|START_ACTION|>[<|START_RESPONSE|>]<|END_ACTION|>"
    for size in (1, 3, 100):
        for thought in ("", "<|START_THINKING|>Hm.<|END_THINKING|>"):
            whole = f"{thought}{text}{call}"
            parts = [whole[at : at + size] for at in range(0, len(whole), size)]
            found = split(parts, Start(marks, "before"))
            assert found == ("Hm." if thought else "", f"Yes <|.{call}")


def test_a_call_of_apertus_ends_a_block() -> None:
    marks = marks_in("<|inner_suffix|>")
    assert marks is not None
    call = "<|tools_prefix|>[]<|tools_suffix|>"
    text = f"<|inner_prefix|>Hm <|.{call} so"
    for size in (1, 3, 100):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert split(parts, Start(marks, "before")) == ("Hm <|.", f"{call} so")


def split(parts: Sequence[str], start: Start) -> tuple[str, str]:
    parser = ReasoningParser(start)
    found = [*map(parser.feed, parts), parser.feed("", is_end=True)]
    return "".join(one for one, _ in found), "".join(one for _, one in found)


def test_what_is_certain_is_passed_on_at_once() -> None:
    parser = ReasoningParser(Start(THINK, "before"))
    found = [parser.feed(part) for part in ("<think>a", " b<", "c </th", "ink> d")]
    assert found == [("a", ""), (" b", ""), ("<c ", ""), ("", "d")]


@pytest.mark.parametrize(
    ("marks", "prompt", "prefix", "place"),
    [
        (THINK, "<|assistant|>", "", "before"),
        (THINK, "<|assistant|><think>\n", "", "inside"),
        (THINK, "<think>\n\n</think>\n\n", "", None),
        (THINK, "<think>a", "<think>a", "inside"),
        (THINK, "<think>a</think>b", "<think>a</think>b", None),
        (CHANNEL, "<|turn>model\n", "", "before"),
        (CHANNEL, "<|channel>thought\n", "", "inside"),
        (CHANNEL, "<|channel>thought\n<channel|>", "", "after"),
        (CHANNEL, "Sure,", "Sure,", "after"),
    ],
)
def test_ends_of_prompts(marks: Marks, prompt: str, prefix: str, place: Place | None) -> None:
    assert start_of(marks, prompt, prefix) == (place and Start(marks, place))


def client(folder: Path, model: Echo) -> Client:
    template = folder / "reasoning.jinja"
    template.write_text(TEMPLATE)
    return http(model, Prompts(TINY, template))


def test_chats_have_their_reasoning_apart(tmp_path: Path) -> None:
    body: dict[str, Any] = {"messages": HELLO, "chat_template_kwargs": {"is_inside": True}}
    asked = client(tmp_path, text_with("I wonder", ".</think>\n", "Hi"))
    choice = asked.post(CHAT, json=body).json()["choices"][0]
    message = {"role": "assistant", "reasoning_content": "I wonder.", "content": "Hi"}
    assert choice["message"] == message | {"refusal": None}
    lines = asked.post(CHAT, json=body | {"stream": True}).text.split("data: ")[1:-1]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"reasoning_content": "I wonder"},
        {"reasoning_content": "."},
        {"content": "Hi"},
        {},
    ]


@pytest.mark.parametrize(
    ("prefix", "reasoning", "content"),
    [
        ("Sure,", None, "<think>a</think>b"),
        ("<think>I", "<think>a", "b"),
        ("", "a", "b"),
    ],
)
def test_an_answer_that_continues_a_message(
    tmp_path: Path, prefix: str, reasoning: str | None, content: str
) -> None:
    """It can only begin with reasoning if the message is empty or ends inside of a block."""
    talk = [*HELLO, {"role": "assistant", "content": prefix}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    asked = client(tmp_path, text_with("<think>a", "</think>b"))
    answer = asked.post(CHAT, json={"messages": talk, **options}).json()
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_call_after_reasoning_is_found(tmp_path: Path) -> None:
    """A call inside of the block is reasoning."""
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    tool = {"type": "function", "function": {"name": "weather"}}
    model = text_with("<think>a ", f"{call}</think>\n", call)
    choice = client(tmp_path, model).post(CHAT, json={"messages": HELLO, "tools": [tool]}).json()
    message = choice["choices"][0]["message"]
    assert message["reasoning_content"] == f"a {call}"
    assert (message["content"], len(message["tool_calls"])) == (None, 1)


def test_models_without_reasoning_keep_their_text() -> None:
    model = text_with("<think>a</think>b")
    asked = http(model)
    message = asked.post(CHAT, json={"messages": HELLO}).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"
    assert "reasoning_content" not in message


SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
GUIDED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA | {"additionalProperties": False}}, '{"a": 1}'),
    ({"guided_regex": "a/b+"}, "a/bb"),
    ({"guided_regex": "a\\/b+"}, "a/bb"),
    ({"guided_choice": ["x", 'y"']}, 'y"'),
    ({"structured_outputs": {"choice": ["x", "y"]}}, "y"),
]


@pytest.mark.parametrize(("fields", "answer"), GUIDED, ids=lambda item: str(item)[:20])
def test_a_grammar_begins_behind_the_reasoning(
    tmp_path: Path, fields: dict[str, Any], answer: str
) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    compiler = GrammarCompiler(tokenizer, 2048, (0,))
    for is_inside, text, is_allowed in (
        (True, f"I {{think}}\n so.</think>\n\n{answer}", True),
        (True, answer, False),
        (False, f"<think>hm</think>{answer}", True),
        (False, answer, True),
        (False, f"hm</think>{answer}", False),
    ):
        model = Echo()
        body = {"messages": HELLO, "chat_template_kwargs": {"is_inside": is_inside}, **fields}
        assert client(tmp_path, model).post(CHAT, json=body).status_code == 200
        (asked,) = model.asked
        kind = GuideType(asked["guided_decoding_guide_type"])
        state = compiler.compile(kind, asked["guided_decoding_guide"]).start(0)
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
        assert (state.num_allowed((), tokens) == len(tokens)) == is_allowed, text
    compiler.close()


def test_an_object_or_a_call_begins_behind_the_reasoning(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    kinds = {"response_format": {"type": "json_object"}, "tools": [tool]}
    model = Echo()
    assert client(tmp_path, model).post(CHAT, json={"messages": HELLO, **kinds}).is_success
    guide = model.asked[0]["guided_decoding_guide"]
    assert guide.startswith('start: ("<think>" reasoning)? answer\n')
    assert "\nanswer: json | calls\n" in guide


def test_a_grammar_of_the_client_cannot_begin_behind_reasoning(tmp_path: Path) -> None:
    body = {"messages": HELLO, "guided_grammar": 'start: "a"'}
    error = client(tmp_path, Echo()).post(CHAT, json=body).json()["error"]
    assert (error["param"], "reasoning first" in error["message"]) == ("guided_grammar", True)
