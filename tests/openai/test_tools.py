"""Tool calls in generated text: the same for any boundaries of its parts."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from smartspec_gateway.openai.apis.choices import text_of
from smartspec_gateway.openai.formats.calls import Tools
from smartspec_gateway.openai.formats.tools import END, Part, ToolParser

TOOLS: Tools = {
    "weather": {},
    "time": {},
    "find": {
        "q": ("string",),
        "n": ("integer",),
        "b": ("boolean",),
        "o": ("object",),
        "s": ("integer", "null"),
        "any": None,
        "free": (),
    },
}


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def hermes_json(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str, call_id: str = "") -> str:
    call_id = f"[CALL_ID]{call_id}" if call_id else ""
    return f"[TOOL_CALLS]{name}{call_id}[ARGS]{arguments}"


def cohere(name: str, arguments: str) -> str:
    call = f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}}'
    return f"<|START_ACTION|>[\n    {call}\n]<|END_ACTION|>"


def deepseek(name: str, arguments: str) -> str:
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}"
    return f"{head}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def fenced(text: str, language: str = "json") -> str:
    return f"```{language}\n{text}\n```"


def gemma(name: str, arguments: str = "") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


TAGGED = {"text": "end it with </tool_call> please"}
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
    # As Qwen2.5, Granite 4, Qwen2.5-Coder and Qwen3-Coder write calls.
    (hermes("weather", json.dumps(TAGGED)), "", [("weather", TAGGED)]),
    (
        "\n".join(hermes(name, json.dumps(TAGGED)) for name in ("weather", "time")),
        "",
        [("weather", TAGGED), ("time", TAGGED)],
    ),
    (hermes("time", json.dumps('{"key": "limit"}')), "", [("time", {"key": "limit"})]),
    (hermes("time", '{"body": "a\n\tb"}'), "", [("time", {"body": "a\n\tb"})]),
    (llama("time", '{"body": "a\n\tb"}'), "", [("time", {"body": "a\n\tb"})]),
    ('<tool_call>{"name": "time"}</tool_call>', "", [("time", {})]),
    (hermes("time", "null") + " x", "x", [("time", {})]),
    (hermes("time", '{"s": "x \\ud83d"}'), "", [("time", {"s": "x \ufffd"})]),
    ('{"name": "time"}', '{"name": "time"}', []),
    ("<tool_call>{bad}</tool_call>.", "<tool_call>{bad}</tool_call>.", []),
    (
        "Sure:\n" + fenced('{"name": "time", "arguments": {"a": 1}}'),
        "Sure:\n",
        [("time", {"a": 1})],
    ),
    (
        fenced('{\n  "name": "time",\n  "arguments": {"a": 1}\n}') + "\nDone",
        "Done",
        [("time", {"a": 1})],
    ),
    (fenced(llama("other", "{}")), fenced(llama("other", "{}")), []),
    (
        fenced('{"name": "time", "arguments": {}, "age": 1}'),
        fenced('{"name": "time", "arguments": {}, "age": 1}'),
        [],
    ),
    (fenced('{"a": 1}') + " and `code` ``` ", fenced('{"a": 1}') + " and `code` ``` ", []),
    (fenced("print(1)", "python"), fenced("print(1)", "python"), []),
    (
        "<tool_call>\n<function=find>\n<parameter=q>\nx\n</parameter>\n<parameter=n>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("find", {"q": "x", "n": 3})],
    ),
    (
        "<function=find>\n<parameter=q>\n3\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("find", {"q": "3", "b": True})],
    ),
    (
        "ok <function=find>\n<parameter=q>a </function> b\n</parameter> c</parameter>\n"
        '<parameter=o>\n{"a": [1]}\n</parameter><parameter=s>\nnull\n</parameter>'
        "<parameter=free>\n7\n</parameter><parameter=any>\n7\n</parameter>"
        "<parameter=n>\nmany\n</parameter>\n</function>",
        "ok ",
        [
            (
                "find",
                {
                    "q": "a </function> b\n</parameter> c",
                    "o": {"a": [1]},
                    "s": None,
                    "free": "7",
                    "any": 7,
                    "n": "many",
                },
            )
        ],
    ),
    ("<function=time></function> then", "then", [("time", {})]),
    (
        2 * "<tool_call>\n<function=time>\n</function>\n</tool_call>\n",
        "",
        [("time", {}), ("time", {})],
    ),
    # As Apertus.
    (
        f'I look.<|tools_prefix|>[{{"weather": {TEXT}}}, {{"time": {{}}}}]<|tools_suffix|> So.',
        "I look.So.",
        [("weather", ROME), ("time", {})],
    ),
    ('<|tools_prefix|>[{"time": {}}]', "", [("time", {})]),
    *(
        (text, text, [])
        for text in (
            '<|tools_prefix|>[{"other": {}}]<|tools_suffix|>',
            '<|tools_prefix|>[{"time": 5}]<|tools_suffix|>',
            '<|tools_prefix|>[{"time": {}, "weather": {}}]<|tools_suffix|>',
            '<|tools_prefix|>[{"time": {}}',
            '[{"time": {}}]',
        )
    ),
    # As Cohere's models.
    (
        f"I look.{cohere('weather', TEXT)} So.",
        "I look.So.",
        [("weather", ROME)],
    ),
    (
        f"{cohere('weather', TEXT)}{cohere('time', '{}')}".replace(
            "\n]<|END_ACTION|><|START_ACTION|>[", ","
        ),
        "",
        [("weather", ROME), ("time", {})],
    ),
    *(
        (text, text, [])
        for text in (
            cohere("other", "{}"),
            cohere("time", "5"),
            cohere("time", TEXT)[:-20],
            '{"tool_name": "time", "parameters": {}}',
        )
    ),
    # As DeepSeek V3.1.
    (
        f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{TEXT}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "I look.",
        [("weather", ROME), ("time", {})],
    ),
    # As DeepSeek's distilled models.
    (
        f"I look.<｜tool▁calls▁begin｜>{deepseek('weather', TEXT)}\n{deepseek('time', '{}')}"
        "<｜tool▁calls▁end｜> So.",
        "I look.So.",
        [("weather", ROME), ("time", {})],
    ),
    (f"\n{deepseek('time', TEXT)[:-3]}", "", [("time", ROME)]),
    (deepseek("time", TEXT).replace("\n", ""), "", [("time", ROME)]),
    *(
        (text, text, [])
        for text in (
            f"<｜tool▁calls▁begin｜>{deepseek('other', '{}')}<｜tool▁calls▁end｜>",
            deepseek("time", "5"),
            deepseek("time", TEXT)[:-30],
            "It begins with <｜tool▁calls▁begin｜> and",
            "<｜tool▁calls▁begin｜><｜tool▁call▁beg",
        )
    ),
    # As Seed-OSS.
    (
        "I look.\n<seed:tool_call>\n<function=find>\n<parameter=q>a\nb </parameter> c\n"
        "</parameter>\n<parameter=n>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        "<function=time>\n</function>\n</seed:tool_call>",
        "I look.\n",
        [("find", {"q": "a\nb </parameter> c\n", "n": 3}), ("time", {})],
    ),
    (
        "<seed:tool_call><function=time></function><function=time></function></seed:tool_call> x",
        "x",
        [("time", {}), ("time", {})],
    ),
    ("<seed:tool_call>\nfind", "<seed:tool_call>\nfind", []),
    ("<function=other>x</function>", "<function=other>x</function>", []),
    ("a <function b", "a <function b", []),
    # As Mistral, Phi-4-mini, Granite 3, Llama 3.1 and GLM-4 write calls.
    (f"[{hermes_json('weather', TEXT)}]", "", [("weather", ROME)]),
    (
        f"[TOOL_CALLS] [{hermes_json('weather', TEXT)}, {hermes_json('time', '{}')}]",
        "",
        [("weather", ROME), ("time", {})],
    ),
    (f"functools[{hermes_json('time', '{}')}]", "", [("time", {})]),
    (f"<|tool_call|>[{hermes_json('time', '{}')}]", "", [("time", {})]),
    (f"<tool_call>[{hermes_json('time', '{}')}]</tool_call>", "", [("time", {})]),
    (fenced(f"[{hermes_json('time', '{}')}]"), "", [("time", {})]),
    ("[1, 2] is a list.", "[1, 2] is a list.", []),
    ("[Note: none.]", "[Note: none.]", []),
    ("functools is a module.", "functools is a module.", []),
    (f"[{hermes_json('time', '{}')}, 5]", f"[{hermes_json('time', '{}')}, 5]", []),
    (
        "<tool_call>\n" + hermes_json("time", "{}") + "\n" + hermes_json("weather", TEXT) + END,
        "",
        [("time", {}), ("weather", ROME)],
    ),
    (f"<function=time>{TEXT}</function>", "", [("time", ROME)]),
    (f"<function=time>\n{TEXT}\n</function> x", "x", [("time", ROME)]),
    (f"weather\n{TEXT}", "", [("weather", ROME)]),
    (f"weather{TEXT}\ntime{{}}", "", [("weather", ROME), ("time", {})]),
    # As Mistral since 2025.
    (mistral("weather", TEXT), "", [("weather", ROME)]),
    (
        f"\n{mistral('weather', TEXT, 'aB3456789')}{mistral('time', '{}', '000000000')}",
        "",
        [("weather", ROME), ("time", {})],
    ),
    (
        f"I look.\n{mistral('time', '{}')}\n{mistral('weather', TEXT)} So.",
        "I look.\nSo.",
        [("time", {}), ("weather", ROME)],
    ),
    (
        f"I look. [TOOL_CALLS] [{hermes_json('time', '{}')}]",
        "I look. ",
        [("time", {})],
    ),
    (
        mistral("time", "{}") + mistral("other", "{}", "000000000"),
        mistral("other", "{}", "000000000"),
        [("time", {})],
    ),
    *(
        (text, text, [])
        for text in (
            mistral("time", TEXT)[:-1],
            mistral("time", "[1]"),
            mistral("time", "5"),
            "[TOOL_CALLS]time[CALL_ID]",
            "[TOOL_CALLS]time and more",
            "The mark [TOOL_CALLS] is",
            "[TOOL_CA",
            "a [TOOL_CA",
        )
    ),
    ("weather {is} fine", "weather {is} fine", []),
    ("weather is fine", "weather is fine", []),
    # Numbers that JSON does not have.
    (hermes("time", '{"n": 1e999}'), hermes("time", '{"n": 1e999}'), []),
    (
        "<function=find><parameter=n>NaN</parameter></function>",
        "",
        [("find", {"n": "NaN"})],
    ),
    ("<function=find>\n<parameter=q>\nx", "<function=find>\n<parameter=q>\nx", []),
    # As Gemma 4 writes calls.
    (gemma("time"), "", [("time", {})]),
    (gemma("time", '<|"|>a<|"|>:1,<|"|>b:c<|"|>:[]'), "", [("time", {"a": 1, "b:c": []})]),
    (
        "I look.\n" + gemma("time", 'zone:<|"|>é\n🌍<|"|>') + gemma("weather"),
        "I look.\n",
        [("time", {"zone": "é\n🌍"}), ("weather", {})],
    ),
    (
        gemma("find", 'o:{a:[{b:<|"|>},"x\\,c:{<|"|>},[]],d:{}},q:<|"|><|"|>,my key:1'),
        "",
        [("find", {"o": {"a": [{"b": '},"x\\,c:{'}, []], "d": {}}, "q": "", "my key": 1})],
    ),
    (
        gemma("find", "n:-7, b:true,s:null,any:[1.5e10,2.50,None,False]"),
        "",
        [("find", {"n": -7, "b": True, "s": None, "any": [1.5e10, 2.5, None, False]})],
    ),
    (
        gemma("time", 'a:<|"|><tool_call|><|tool_call>call:time{}<|"|>,b:"x\\"y,"'),
        "",
        [("time", {"a": "<tool_call|><|tool_call>call:time{}", "b": 'x"y,'})],
    ),
    (f"{gemma('time')}\n{gemma('time')} x", "x", [("time", {}), ("time", {})]),
    ("<|tool_call> call: time {}\n", "", [("time", {})]),
    (gemma("time")[:-3] + gemma("weather"), gemma("time")[:-3], [("weather", {})]),
    ("<|tool_call>call:time{}" + gemma("weather"), "", [("time", {}), ("weather", {})]),
    *(
        (text, text, [])
        for text in (
            gemma("other"),
            gemma("time", "zone:Rome"),
            gemma("time", "zone:1e999"),
            gemma("time", 'zone:<|"|>Rome'),
            gemma("time", "zone:[1"),
            gemma("time", "1,2"),
            gemma("time", "a:" * 3000),
            gemma("time", "a:[" * 3000),
            "<|tool_call>call:time<tool_call|> x",
            "<|tool_call>time{}<tool_call|>",
            "It begins with <|tool_call> and",
            '<|tool_call>call:find{q:<|"|>x',
            "<|tool_call>cal",
            "a <|tool_cal",
        )
    ),
]


def check(found: list[Part], content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    called = [part for part in found if not isinstance(part, str)]
    functions = [call["function"] for call in called]
    assert text_of(found) == content
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == calls
    assert len({call["id"] for call in called}) == len(calls)


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=lambda item: str(item)[:30])
def test_calls_for_any_parts(
    text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    source = random.Random(1)
    num_tries = 80 if len(text) < 1000 else 3
    for number in range(num_tries):
        size = 1 if number == 0 else source.randint(1, 40)
        parser, found, left = ToolParser(TOOLS), list[Part](), text
        while left:
            num = min(len(left), size if number == 0 else source.randint(1, size))
            found += parser.feed(left[:num])
            left = left[num:]
        found += parser.finish()
        check(found, content, calls)


def test_content_is_not_held_back_for_long() -> None:
    parser = ToolParser(TOOLS)
    assert parser.feed("The answer") == ["The answer"]
    assert parser.feed(" is <") == [" is "]
    assert parser.feed("b>.") == ["<b>."]


def test_what_begins_as_a_call_of_gemma_is_not_held_back_for_long() -> None:
    parser = ToolParser(TOOLS)
    assert parser.feed("The mark <|tool_call> is") == ["The mark ", "<|tool_call>", " is"]


def test_content_after_much_space_is_not_held_back() -> None:
    parser, spaces = ToolParser(TOOLS), "\n" * 1000
    assert parser.feed(spaces) == []
    assert parser.feed("The answer") == [f"{spaces}The answer"]
    assert parser.feed(" is") == [" is"]


def test_much_space_at_the_beginning_takes_little_time() -> None:
    """In quadratic time it would take minutes."""
    spaces, start = " " * 200_000, time.monotonic()
    for text, num_calls in ((f"{spaces}Yes.", 0), (f"{spaces}[TOOL_CALLS]{spaces}time{{}}", 1)):
        parser = ToolParser(TOOLS)
        found = parser.feed(text) + parser.finish()
        assert len(found) == 1
        assert isinstance(found[0], dict) if num_calls else found == [text]
    assert time.monotonic() - start < 5
