"""Tool calls in generated text: the same for any boundaries of its parts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from smartspec_gateway.openai.tools import Found, ToolParser

NAMES = ("weather", "time")


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


ROME: dict[str, Any] = {"city": "Rome}", "days": [1, {"a": "</tool"}]}
TEXT = json.dumps(ROME)
HALF = '<tool_call>\n{"name": "weather", "argu'

CASES: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("Just text, a < b and {c}.", "Just text, a < b and {c}.", []),
    ("", "", []),
    (hermes("weather", TEXT), "", [("weather", ROME)]),
    ("Let me see.\n" + hermes("time", "{}"), "Let me see.\n", [("time", {})]),
    (
        hermes("weather", TEXT) + "\n" + hermes("time", '{"zone": "é"}'),
        "",
        [("weather", ROME), ("time", {"zone": "é"})],
    ),
    (llama("weather", TEXT), "", [("weather", ROME)]),
    (" \n<|python_tag|>" + llama("weather", TEXT), "", [("weather", ROME)]),
    (llama("weather", TEXT) + "; " + llama("time", "{}"), "", [("weather", ROME), ("time", {})]),
    (hermes("unknown", "{}"), hermes("unknown", "{}"), []),
    (llama("unknown", "{}") + " x", llama("unknown", "{}") + " x", []),
    (llama("weather", "[1]"), llama("weather", "[1]"), []),
    ('{"a": 1} and ' + hermes("time", "{}"), '{"a": 1} and ', [("time", {})]),
    ("Text {" + llama("time", "{}"), "Text {" + llama("time", "{}"), []),
    (HALF, HALF, []),
    (llama("weather", TEXT)[:-1], llama("weather", TEXT)[:-1], []),
    (hermes("time", "{}")[:-3], "", [("time", {})]),
    ('<tool_call>{"name": "time", "arguments": {}}<', "", [("time", {})]),
    ('<tool_call>{"a": 1}</tool', '<tool_call>{"a": 1}</tool', []),
    ('<tool_call>{"a": 1}<</tool_call>', '<tool_call>{"a": 1}<</tool_call>', []),
    ("<tool_call>not JSON</tool_call>.", "<tool_call>not JSON</tool_call>.", []),
    ("<tool_call> <tool_cal", "<tool_call> <tool_cal", []),
    ('{"name": ' * 3000, '{"name": ' * 3000, []),
]


def check(found: Found, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    functions = [call["function"] for call in found.calls]
    assert found.content == content
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == calls
    assert len({call["id"] for call in found.calls}) == len(calls)


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=lambda item: str(item)[:30])
def test_calls_for_any_parts(
    text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    source = random.Random(1)
    num_tries = 200 if len(text) < 1000 else 3
    for number in range(num_tries):
        size = 1 if number == 0 else source.randint(1, 40)
        parser, found, left = ToolParser(NAMES), Found(), text
        while left:
            num = min(len(left), size if number == 0 else source.randint(1, size))
            found.add(parser.feed(left[:num]))
            left = left[num:]
        found.add(parser.finish())
        check(found, content, calls)


def test_content_is_not_held_back_for_long() -> None:
    parser = ToolParser(NAMES)
    assert parser.feed("The answer").content == "The answer"
    assert parser.feed(" is <").content == " is "
    assert parser.feed("b>.").content == "<b>."
