"""Calls of LFM2 in texts. Their grammar is in test_call_grammar, and histories in test_formats."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from smartspec_gateway.openai.formats.python_calls import BEGIN, END, python_calls, written
from smartspec_gateway.openai.formats.tools import ToolParser

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"first name": ()},
    "tool_0": {},
    "get-all": {},
    "get-all-now": {},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f()", [("f", {})]),
        ("f(a='it', b=-2.5, c=None)", [("f", {"a": "it", "b": -2.5, "c": None})]),
        ('f(a="it\'s", b=[true, {"k": null}])', [("f", {"a": "it's", "b": [True, {"k": None}]})]),
        ("f(a='two\nlines', b='f(1)')", [("f", {"a": "two\nlines", "b": "f(1)"})]),
        ("tool_0(a=1),\n f ( a=2 )", [("tool_0", {"a": 1}), ("f", {"a": 2})]),
        (
            "get-all-now(a=(1, 2)), get-all(b='')",
            [("get-all-now", {"a": [1, 2]}), ("get-all", {"b": ""})],
        ),
        (
            "f(class='a', x-y.z=1, first name=2, µ=3)",
            [("f", {"class": "a", "x-y.z": 1, "first name": 2, "µ": 3})],
        ),
        ("f(a='x\r\ny\0001')", [("f", {"a": "x\r\ny\0001"})]),
        (r"f(a='C:\Users\new \d\N\x41\'\/')", [("f", {"a": "C:\\Users\new \\d\\NA'/"})]),
        (r"f(a=r'\d\n')", [("f", {"a": r"\d\n"})]),
        ("f(a='ls \\\n -l')", [("f", {"a": "ls \\\n -l"})]),
        ('f(a="""say "f(1)"\nb=2""")', [("f", {"a": 'say "f(1)"\nb=2'})]),
    ],
)
def test_calls(text: str, expected: list[tuple[str, Any]]) -> None:
    found = [call["function"] for call in python_calls(f"[{text}]", TOOLS)]
    assert [(one["name"], json.loads(one["arguments"])) for one in found] == expected


@pytest.mark.parametrize(
    "text",
    [
        "f()",
        "[g()]",
        "[f(), g()]",
        "[tool_1()]",
        "[tool_9()]",
        "[f(1)]",
        "[f(**{'a': 1})]",
        "[f(a=b)]",
        "[f(a=1e999)]",
        "[f(a={1, 2})]",
        "[f(a=b'x')]",
        "[f(a=f())]",
        "[f.g()]",
        "[f(a='it's')]",
        f"[f(a={'(' * 10_000}",
        f"[f(a={'-' * 100_000}1)]",
    ],
)
def test_other_texts(text: str) -> None:
    assert python_calls(text, TOOLS) == []


@pytest.mark.parametrize("part", ['\\"', "\\", "f(", "a=", "a ", "' ", "\"'", '"""', "x"])
def test_long_texts_take_little_time(part: str) -> None:
    """Where each place has to be read to the end, minutes."""
    begin = time.process_time()
    assert python_calls(f"[f(a={part * 200_000}", TOOLS) == []
    assert time.process_time() - begin < 10.0


def test_written_calls_are_read() -> None:
    arguments = {"a": 'say "no"\n', "b": True, "c": None, "d": {"e": [False]}, "f": -1}
    [call] = python_calls(f"[{written('get-all', arguments)}]", TOOLS)
    assert json.loads(call["function"]["arguments"]) == arguments


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_text_as_it_arrives(step: int) -> None:
    """With text around calls, a list of JSON objects, one that is no call, and a last call that its
    end is missing of."""
    parts = [
        "I look. ",
        f"{BEGIN}[f(a=']', b=1), f(a='{BEGIN}')]{END}",
        "And: ",
        f'{BEGIN}[{{"name": "f", "arguments": {{"a": 2}}}}]{END}',
        f"{BEGIN}[g()]{END} ",
        f"{BEGIN}[f(a=3)]",
    ]
    text, parser = "".join(parts), ToolParser(TOOLS)
    found = [one for at in range(0, len(text), step) for one in parser.feed(text[at : at + step])]
    found += parser.finish()
    assert "".join(one for one in found if isinstance(one, str)) == f"I look. And: {parts[4]}"
    calls = [json.loads(one["function"]["arguments"]) for one in found if isinstance(one, dict)]
    assert calls == [{"a": "]", "b": 1}, {"a": BEGIN}, {"a": 2}, {"a": 3}]
