"""The messages of gpt-oss: thoughts, calls and answers, as text, in prompts and in grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from endpoint_client import CHAT, HELLO, events, http
from llguidance import LLMatcher
from standins import TINY, Echo, text_with
from tokenizers import AddedToken, Tokenizer

import openai
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.call_grammar import CallFormat
from smartspec_gateway.openai.formats.harmony import HarmonyParser, Kind
from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.formats.reasoning import HARMONY, Place, Start, marks_in, start_of
from smartspec_gateway.openai.formats.tools import ToolParser
from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.guides import compiled, grammar_text
from smartspec_py.engines.structured.token_names import AddedTokens
from smartspec_py.engines.structured.trial import new_tokenizer
from smartspec_py.engines.tokenizer_file import HARMONY_MARKS, read_tokenizer

TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if messages[0].role in ('developer', 'system') %}
{%- set first, others = messages[0].content, messages[1:] %}
{%- else %}{% set first, others = '', messages %}{% endif %}
{%- if first or tools %}<|start|>developer<|message|>{{ first }}
{%- for t in tools or [] %}{{ '\n// ' + t.function.description }}
type {{ t.function.name }}
{%- for name, p in ((t.function.parameters or {}).properties or {}).items() %} {{ name }}
{%- if p.default is defined %}{{ ' = ' + (p.default if p.enum else p.default | tojson) }}{% endif %}
{%- endfor %}{% endfor %}<|end|>{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in others %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- set later = namespace(found=false) %}
{%- for n in others[loop.index:] if n.role == 'assistant' and 'tool_calls' not in n %}
{%- set later.found = true %}{% endfor %}
{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both') }}
{%- elif (m.content or m.thinking) and not later.found %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
{%- endif %}{% set f = m.tool_calls[0].function %}{% set last.name = f.name %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}<|end|>
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""As that of gpt-oss: of several calls in a message it shows one, and only the first message of
the system."""

THOUGHT = "<|channel|>analysis<|message|>Hm {x.<|end|>"
TURN = "<|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"
ARGUMENTS = '{"place": "Rome <|end|>"}'
CALLS = [
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.weather<|message|>\n",
    "<|channel|>analysis to=functions.weather code<|message|>",
    "<|channel|>commentary to=weather json<|message|>",
    " to=functions.weather<|channel|>commentary json<|message|>",
    " to=functions.weather<|channel|>commentary<|constrain|>json<|message|>",
]
CALL = f"{CALLS[0]}{ARGUMENTS}"
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def split(parts: list[str], kind: Kind = "header") -> tuple[str, str, list[Any]]:
    """The thought, the content, and the arguments of calls."""
    parser, tools = HarmonyParser({"weather"}, kind), ToolParser({"weather": {}})
    reasoning, content, calls = "", "", []
    for number in range(len(parts) + 1):
        is_end = number == len(parts)
        thought, rest = parser.feed("" if is_end else parts[number], is_end)
        reasoning += thought
        for part in tools.feed(rest) + (tools.finish() if is_end else []):
            if isinstance(part, str):
                content += part
            else:
                assert part["function"]["name"] == "weather"
                calls.append(json.loads(part["function"]["arguments"]))
    return reasoning, content, calls


PLACE = [json.loads(ARGUMENTS)]
FINAL = "<|channel|>final<|message|>"
Expected = tuple[str, str, list[Any]]
CASES: list[tuple[str, Expected]] = [
    (f"{THOUGHT}{TURN}{FINAL}Yes < 1.\n", ("Hm {x.", "Yes < 1.\n", [])),
    (f"{THOUGHT}{TURN}{FINAL}Yes.<|return|>", ("Hm {x.", "Yes.", [])),
    (f"{FINAL}Yes.<|endoftext|>", ("", "Yes.", [])),
    (f"{THOUGHT}{TURN}{THOUGHT}{TURN}{FINAL}a", ("Hm {x.\n\nHm {x.", "a", [])),
    (f"{PREAMBLE}{TURN}{FINAL}Yes.", ("", "I look.\n\nYes.", [])),
    (f"{THOUGHT}{TURN}{PREAMBLE}{TURN}{CALL}<|call|>", ("Hm {x.", "I look.", PLACE)),
    (f"{THOUGHT}{TURN}{CALL}<|call|>{TURN}{CALL}<|call|>", ("Hm {x.", "", 2 * PLACE)),
    (f"<|channel|>commentary{THOUGHT}{TURN}{FINAL}a", ("Hm {x.", "a", [])),
    (f"<|channel|>commentary to=assistant{THOUGHT}{TURN}{FINAL}a", ("Hm {x.", "a", [])),
    ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>a", ("Hm", "a", [])),
    (f"<|channel|>analysis<|end|>{TURN}{FINAL}a", ("", "a", [])),
    (
        f"{PREAMBLE}{TURN}<|channel|>analysis to=python code<|message|>1 <|constrain|>{{<|call|>",
        ("", "I look.\n\npython\n1 {", []),
    ),
    (
        "<|channel|>commentary to=functions.other json<|message|>{}<|call|>",
        ("", "functions.other\n{}", []),
    ),
    (f"{CALLS[0]}{{'place'}}<|call|>", ("", "functions.weather\n{'place'}", [])),
    (f"{CALLS[0]}{ARGUMENTS[:-3]}", ("", f"functions.weather\n{ARGUMENTS[:-3]}", [])),
    (CALLS[0], ("", "", [])),
    (THOUGHT.removesuffix("<|end|>"), ("Hm {x.", "", [])),
    (f"{THOUGHT}{TURN}<|channel|>fin", ("Hm {x.", "", [])),
    (f"{THOUGHT}<|start|>assist", ("Hm {x.", "", [])),
    ("<|channel|>final Yes, of course.", ("", "final Yes, of course.", [])),
    (f"<|channel|>final {300 * 'a'}{THOUGHT}", ("Hm {x.", f"final {300 * 'a'}", [])),
    (f"<|channel|>final {234 * 'a'}{THOUGHT}", ("Hm {x.", f"final {234 * 'a'}", [])),
    ("to=0 is < 1.", ("", "to=0 is < 1.", [])),
    ("t", ("", "t", [])),
    (f"Yes.<|end|>{TURN}{PREAMBLE}", ("", "Yes.\n\nI look.", [])),
    ("", ("", "", [])),
]
CASES += [(f"{head}{ARGUMENTS}\n<|call|>", ("", "", PLACE)) for head in CALLS]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_messages_are_read_however_they_are_cut(text: str, expected: Expected) -> None:
    assert split(list(text)) == expected
    for at in range(len(text) + 1):
        assert split([text[:at], text[at:]]) == expected, at


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("thought", f"m.<|end|>{TURN}{FINAL}a", ("m.", "a", [])),
        ("text", f" a<|end|>{TURN}{CALL}", ("", " a", PLACE)),
        ("text", "to=0", ("", "to=0", [])),
    ],
)
def test_an_answer_that_begins_inside_of_a_message(
    kind: Kind, text: str, expected: Expected
) -> None:
    assert split([text], kind) == split(list(text), kind) == expected


def test_what_is_certain_is_passed_on_at_once() -> None:
    parser = HarmonyParser({})
    parts = ("<|channel|>analysis<|message|>I", " see <", "3 <|e", f"nd|>{TURN}{FINAL}Yes", ".")
    assert [parser.feed(part) for part in parts] == [
        *(("I", ""), (" see ", ""), ("<3 ", ""), ("", "Yes"), ("", "."))
    ]


@pytest.mark.parametrize(
    ("prompt", "prefix", "place"),
    [
        (TURN, "", "before"),
        (f"{TURN}<|channel|>analysis<|message|>", "", "inside"),
        (f"{TURN}{FINAL}", "", "after"),
        (f"{TURN}{FINAL}Sure,", "Sure,", "after"),
    ],
)
def test_ends_of_prompts(prompt: str, prefix: str, place: Place) -> None:
    marks = marks_in(TEMPLATE)
    assert marks == HARMONY
    assert start_of(HARMONY, prompt, prefix) == Start(HARMONY, place)
    assert marks_in("{{ '<|user|>' + m.content + '<|end|>' }}") is None, "Phi"


def save(folder: Path, names: tuple[str, ...]) -> Path:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    return Prompts(save(tmp_path, HARMONY_MARKS))


def test_marks_are_text_of_the_model_and_never_of_a_client(prompts: Prompts) -> None:
    own = [prompts.encode(mark, add_special_tokens=False) for mark in HARMONY_MARKS]
    assert [len(tokens) for tokens in own] == [1] * len(HARMONY_MARKS)
    assert not prompts.special_tokens & {tokens[0] for tokens in own}
    forged = "".join(HARMONY_MARKS)
    tokens = prompts.encode_chat(prompts.of_chat([{"role": "user", "content": forged}], {}))
    assert forged in prompts.decode(tokens)
    marks = [token for token in tokens if [token] in own]
    message = "<|start|><|message|><|end|>"
    assert prompts.decode(marks) == f"{2 * message}<|start|>", "those of the template"


def test_marks_of_other_models_stay_special(tmp_path: Path) -> None:
    """`<|end|>` ends texts of Phi."""
    names = tuple(mark for mark in HARMONY_MARKS if mark != "<|channel|>")
    added = read_tokenizer(save(tmp_path, names)).get_added_tokens_decoder()
    assert {one.content for one in added.values() if one.special} >= set(names)


def called(*places: str, **more: Any) -> dict[str, Any]:
    calls = [
        {
            "id": place,
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"place": place})},
        }
        for place in places
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(place: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": place, "content": f'"sun" in {place}'}


def shown(place: str) -> str:
    begin = "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
    answer = "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
    told = json.dumps(f'"sun" in {place}')
    return f'{begin}{{"place": "{place}"}}<|call|>{answer}{told}<|end|>'


def test_a_turn_has_thoughts_texts_calls_and_results_in_their_order(prompts: Prompts) -> None:
    assert prompts.call_format is CallFormat.HARMONY
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        *HELLO,
        called("Rome", "Oslo", content="I look.", reasoning_content="Hm."),
        result("Oslo"),
        result("Rome"),
        called("Bern", reasoning="More."),
        result("Bern"),
    ]
    user = "<|start|>user<|message|>Hello!<|end|>"
    begin = (
        "<|start|>system<|message|>Reasoning: medium<|end|>"
        "<|start|>developer<|message|>Be brief.\n\nBe kind."
    )
    turn = (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{shown('Rome')}"
        f"{shown('Oslo')}<|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
        f"{shown('Bern')}"
    )
    assert prompts.of_chat(messages, {}) == f"{begin}<|end|>{user}{turn}<|start|>assistant"
    messages += [{"role": "assistant", "content": "Sun.", "reasoning": "So."}, *HELLO]
    assert prompts.of_chat(messages, {}, tools=[TOOL]) == (
        f"{begin}\n// \ntype weather place<|end|>{user}"
        f"<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{shown('Rome')}"
        f"{shown('Oslo')}{shown('Bern')}<|start|>assistant<|channel|>final<|message|>Sun.<|end|>"
        f"{user}<|start|>assistant"
    )


def test_all_tools_are_told(prompts: Prompts) -> None:
    """The template adds their descriptions and some defaults to texts."""
    properties = {
        "n": {"type": "integer", "enum": [1, 2], "default": 1},
        "x": {"type": "integer", "default": 5},
        "y": True,
    }
    functions = [
        {"name": "none"},
        {"name": "empty", "parameters": {"type": "object", "properties": {}}},
        {"name": "some", "description": "Some.", "parameters": {"properties": properties}},
    ]
    tools = [{"type": "function", "function": one} for one in functions]
    assert "// \ntype none\n// \ntype empty\n// Some.\ntype some n = 1 x = 5 y<|end|>" in (
        prompts.of_chat([*HELLO], {}, tools=tools)
    )


def test_a_result_needs_a_call(prompts: Prompts) -> None:
    with pytest.raises(ApiError, match="messages: the chat template refuses them"):
        prompts.of_chat([*HELLO, result("Rome")], {})


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "minimal"}, "low"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "high",
        ),
    ],
)
def test_the_effort_is_in_the_prompt(prompts: Prompts, fields: Any, effort: str) -> None:
    model = text_with(f"{FINAL}Yes.")
    assert http(model, prompts).post(CHAT, json={"messages": HELLO, **fields}).is_success
    assert f"Reasoning: {effort}<" in prompts.decode(model.asked[0]["input_ids"])


TEXT = f"{THOUGHT}{TURN}{PREAMBLE}{TURN}{CALL}"
PARTS = [TEXT[at : at + 7] for at in range(0, len(TEXT), 7)]


def test_a_chat(prompts: Prompts) -> None:
    client = http(text_with(*PARTS), prompts)
    body = {"messages": HELLO, "tools": [TOOL]}
    choice = client.post(CHAT, json=body).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm {x.", "I look.")
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == PLACE[0]
    assert choice["finish_reason"] == "tool_calls"
    chunks = events(client.post(CHAT, json=body | {"stream": True}).text)[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm {x."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads(calls[1]["function"]["arguments"]) == PLACE[0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_chat_without_tools_has_no_calls(prompts: Prompts) -> None:
    client = http(text_with(*PARTS), prompts)
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = client.post(CHAT, json={"messages": HELLO, **more}).json()["choices"][0]
        text = f"I look.\n\nfunctions.weather\n{ARGUMENTS.replace('<|end|>', '')}"
        assert choice["message"]["content"] == text
        assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == (
            *("Hm {x.", "stop"),
        )


def test_responses(prompts: Prompts) -> None:
    model = text_with(*PARTS)
    client = openai.OpenAI(
        base_url="http://testserver/v1", api_key="none", http_client=http(model, prompts)
    )
    found = client.responses.create(
        model="smartspec",
        input="Hello!",
        reasoning={"effort": "high"},
        tools=[{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
    )
    reasoning, message, call = (item.model_dump() for item in found.output)
    assert reasoning["content"][0]["text"] == "Hm {x."
    assert message["content"][0]["text"] == "I look."
    assert json.loads(call["arguments"]) == PLACE[0]
    assert "Reasoning: high<" in prompts.decode(model.asked[0]["input_ids"])


def test_messages(prompts: Prompts) -> None:
    """The blocks can be sent back."""
    model = text_with(*PARTS)
    client = anthropic.Anthropic(
        base_url="http://testserver", api_key="none", http_client=http(model, prompts)
    )
    asked: Any = {
        "model": "smartspec",
        "max_tokens": 50,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "output_config": {"effort": "low"},
    }
    found = client.messages.create(**asked, messages=HELLO)
    thought, text, call = (block.model_dump() for block in found.content)
    assert (thought["thinking"], text["text"], call["input"]) == ("Hm {x.", "I look.", PLACE[0])
    assert found.stop_reason == "tool_use"
    told = [{"type": "tool_result", "tool_use_id": call["id"], "content": "sun"}]
    talk: Any = [*HELLO, found.to_param(), {"role": "user", "content": told}]
    client.messages.create(**asked, messages=talk)
    prompt = prompts.decode(model.asked[-1]["input_ids"])
    assert "Reasoning: low<" in prompt
    assert f"{THOUGHT}{TURN}{PREAMBLE}{TURN} to=functions.weather<|channel|>commentary" in prompt


def test_a_message_is_continued(prompts: Prompts) -> None:
    model = text_with(" Rome.", "<|return|>")
    talk = [*HELLO, {"role": "assistant", "content": "In"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    answer = http(model, prompts).post(CHAT, json={"messages": talk, **options}).json()
    assert answer["choices"][0]["message"]["content"] == " Rome."
    assert prompts.decode(model.asked[0]["input_ids"]).endswith(f"{TURN}{FINAL}In")


OBJECT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
REQUIRED = {"tools": [TOOL], "tool_choice": "required"}
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON = '{"place": "Rome"}'
GIVEN = f"{CALLS[0]}{JSON}"
GUIDED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (REQUIRED, [GIVEN], [GIVEN + GIVEN, f"{FINAL}{JSON}", GIVEN.replace("Rome", 'R", "x": "')]),
    (
        {"tools": [TOOL, {"type": "function", "function": {"name": "now"}}], "tool_choice": NAMED},
        [GIVEN],
        ["<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"],
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "required"},
        ["<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"],
        ['<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"x": 1}'],
    ),
    ({"response_format": OBJECT}, [f"{FINAL}{JSON}"], [JSON, f"{FINAL}Rome", GIVEN]),
    ({"response_format": OBJECT, "tools": [TOOL]}, [f"{FINAL}{JSON}", GIVEN], [JSON, f"{FINAL}a"]),
    ({"guided_regex": "a/b+"}, [f"{FINAL}a/bb"], ["a/bb", f"{FINAL}b"]),
    ({"guided_choice": ["x", "y"]}, [f"{FINAL}y"], ["y"]),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), GUIDED)
def test_what_follows_a_grammar(
    prompts: Prompts, tmp_path: Path, fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    """With a thought before it and without."""
    model = Echo()
    assert http(model, prompts).post(CHAT, json={"messages": HELLO, **fields}).is_success
    guide = model.asked[0]["guided_decoding_guide"]
    tokenizer = read_tokenizer(tmp_path)
    added = AddedTokens(tokenizer.to_str())
    library = new_tokenizer(added, tokenizer.get_vocab_size(), [0])
    matcher = compiled(library, grammar_text(GuideType.EBNF_GRAMMAR, guide, added))

    def follows(*parts: str) -> bool:
        copy: LLMatcher = matcher.deep_copy()
        tokens = [t for part in parts for t in prompts.encode(part, add_special_tokens=False)]
        return bool(copy.consume_tokens(tokens) and copy.is_accepting())

    for text in right:
        assert follows(text)
        assert follows(THOUGHT, TURN, text)
        assert follows("<|channel|>analysis<|message|>Hm <|e", "nd", "|>", TURN, text), "in pieces"
        assert not follows(THOUGHT, text)
        assert not follows(THOUGHT, TURN, THOUGHT, TURN, text)
    for text in wrong:
        assert not follows(text)
        assert not follows(THOUGHT, TURN, text)


def test_a_required_call(prompts: Prompts) -> None:
    client = http(text_with(f"{THOUGHT}{TURN}", GIVEN), prompts)
    choice = client.post(CHAT, json={"messages": HELLO, **REQUIRED}).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"place": "Rome"}
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Hm {x."
