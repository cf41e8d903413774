"""Tool calls and grammars of chats, streamed and whole."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from endpoint_client import (
    CALLS,
    CHAT,
    CUSTOM,
    HELLO,
    PROMPTS,
    TOOL,
    WITH_TOOLS,
    allowed,
    events,
    http,
    tool_client,
)
from standins import Echo, text_with

from smartspec_gateway.openai.errors import ApiError


def test_tool_calls_are_parsed() -> None:
    """Streamed or not; a text that was cut keeps its finish_reason."""
    found = events(tool_client(text_with(*CALLS)).post(CHAT, json=WITH_TOOLS).text)
    deltas = [one["choices"][0]["delta"] for one in found[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    call, rest = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "weather")
    assert rest == {"index": 0, "function": {"arguments": '{"a": 1}'}}
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"

    body = WITH_TOOLS | {"stream": False}
    model = text_with(*CALLS, "\n<tool_call>" + CALLS[1].removeprefix("_call>") + CALLS[2])
    whole = tool_client(model).post(CHAT, json=body).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("I look.", "tool_calls")
    assert len(whole["message"]["tool_calls"]) == 2
    one = tool_client(model).post(CHAT, json=body | {"parallel_tool_calls": False})
    assert len(one.json()["choices"][0]["message"]["tool_calls"]) == 1

    cut = tool_client(text_with(*CALLS[:2], reason="length"))
    choice = cut.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "".join(CALLS[:2])


FIRST = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}'
TWO = f"I look.\n{FIRST}\n</tool_call>\n{FIRST}\n</tool_call>"


def test_a_call_that_is_cut_at_any_place() -> None:
    """It is a call as soon as its JSON is complete, and text before that. Whole and streamed."""
    ends = [found.end() for found in re.finditer(re.escape(FIRST), TWO)]
    with tool_client(model := text_with()) as asked:
        for num in range(1, len(TWO)):
            num_calls = sum(end <= num for end in ends)
            rest = TWO[ends[0] + len("\n</tool_call>\n") : num] if num_calls == 1 else ""
            content = "I look.\n" + rest if num_calls else TWO[:num]
            model.pieces = text_with(*TWO[:num], reason="length").pieces
            (whole,) = asked.post(CHAT, json=WITH_TOOLS | {"stream": False}).json()["choices"]
            assert len(whole["message"].get("tool_calls", [])) == num_calls
            assert (whole["message"]["content"], whole["finish_reason"]) == (content, "length")
            found = events(asked.post(CHAT, json=WITH_TOOLS).text)
            deltas = [one["choices"][0]["delta"] for one in found[:-1]]
            assert "".join(delta.get("content") or "" for delta in deltas) == content
            calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
            assert sum("id" in call for call in calls) == num_calls


LOOKING: Any = [{"properties": {"x": {"pattern": "^(?!a)"}}}, {"patternProperties": {"^(?!a)": {}}}]


@pytest.mark.parametrize("parameters", LOOKING)
def test_look_around_does_not_refuse_a_function(parameters: Any) -> None:
    """Libraries write it, and set `strict`."""
    function = {"name": "find", "parameters": parameters, "strict": True}
    tools = [{"type": "function", "function": function}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    answer = http().post(CHAT, json=body)
    assert answer.status_code == 200, answer.text


def test_custom_tools_are_skipped() -> None:
    model = text_with(*CALLS)
    body = WITH_TOOLS | {"stream": False, "tools": [CUSTOM, TOOL]}
    (choice,) = tool_client(model).post(CHAT, json=body).json()["choices"]
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["weather"]
    told = PROMPTS.decode(model.asked[0]["input_ids"])
    assert ("weather" in told, "patch" in told) == (True, False)


SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
STRICT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
NO_SPACE = {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": None}


@pytest.mark.parametrize(
    ("field", "given", "kind", "guide"),
    [
        ("response_format", STRICT, "json_schema", SCHEMA),
        ("response_format", {"type": "json_object"}, "json_schema", {"type": "object"}),
        ("guided_json", SCHEMA, "json_schema", SCHEMA),
        ("guided_json", json.dumps(SCHEMA), "json_schema", SCHEMA),
        ("guided_choice", ["a", "b"], "choice", ["a", "b"]),
        ("guided_regex", '"a"', "regex", "a"),
        ("guided_grammar", '"a"', "ebnf_grammar", "a"),
        ("structured_outputs", {"json": SCHEMA, "regex": None}, "json_schema", SCHEMA),
        ("structured_outputs", {"json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ("structured_outputs", {"json_object": True}, "json_schema", {"type": "object"}),
        ("structured_outputs", {"choice": ["a", "b"]}, "choice", ["a", "b"]),
        ("structured_outputs", {"regex": '"a"'}, "regex", "a"),
        ("structured_outputs", {"grammar": '"a"'}, "ebnf_grammar", "a"),
        ("structured_outputs", NO_SPACE, "json_schema", SCHEMA),
    ],
)
def test_a_response_format_becomes_a_grammar(field: str, given: Any, kind: str, guide: Any) -> None:
    model = Echo()
    answer = http(model).post(CHAT, json={"messages": HELLO, field: given})
    assert answer.status_code == 200, answer.text
    (asked,) = model.asked
    assert asked["guided_decoding_guide_type"] == kind
    assert json.loads(asked["guided_decoding_guide"]) == guide


def test_a_format_of_text_has_no_grammar() -> None:
    model = Echo()
    http(model).post(CHAT, json={"messages": HELLO, "response_format": {"type": "text"}})
    assert "guided_decoding_guide" not in model.asked[0]


def test_an_error_of_a_grammar_names_the_clients_field() -> None:
    message = "guided_decoding_guide: must be a grammar that works: no such rule"
    error = ApiError(400, message, "guided_decoding_guide")
    for body, field in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "x"}, "guided_regex"),
        ({"structured_outputs": {"regex": "x"}}, "structured_outputs.regex"),
        (WITH_TOOLS | {"tool_choice": "required"}, "tools"),
        (WITH_TOOLS | {"tool_choice": "required", "response_format": STRICT}, "tools"),
        (WITH_TOOLS | {"response_format": STRICT}, "response_format with tools"),
    ):
        answer = tool_client(Echo(error)).post(CHAT, json={"messages": HELLO, **body})
        found = answer.json()["error"]
        assert (found["param"], found["message"]) == (
            field,
            f"{field}: must be a grammar that works: no such rule",
        )


def test_an_error_of_the_size_of_a_grammar_names_the_clients_fields() -> None:
    long = {"type": "object", "description": "x" * 70_000}
    tool = {"type": "function", "function": {"name": "f", "parameters": long}}
    given = {"response_format": {"type": "json_object"}}
    chat, flat = {"messages": HELLO}, {"type": "function", "name": "f", "parameters": long}
    items = {"input": "a", "tools": [flat], "text": {"format": {"type": "json_object"}}}
    for path, body, field in (
        (CHAT, chat | {"tools": [tool], "tool_choice": "required"}, "tools"),
        (CHAT, chat | given | {"tools": [tool]}, "response_format with tools"),
        ("/v1/responses", items, "text.format with tools"),
    ):
        found = http(context_len=8192).post(path, json=body).json()["error"]
        assert found["param"] == field
        assert found["message"].startswith(f"{field}: got 7")


FORCED = ('<tool_call>\n{"name": "wea', 'ther", "arguments": {"a', '": "}"}}\n</tool_call>')


def test_required_calls_are_streamed_as_they_arrive() -> None:
    body = WITH_TOOLS | {"tool_choice": "required"}
    model = text_with(*FORCED)
    found = events(tool_client(model).post(CHAT, json=body).text)
    (asked,) = model.asked
    assert asked["guided_decoding_guide_type"] == "ebnf_grammar"
    assert '\\"weather\\"' in asked["guided_decoding_guide"]
    calls = [
        call for one in found[:-1] for call in one["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert {call["index"] for call in calls} == {0}
    assert ["id" in call for call in calls] == [True, False, False]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": "}"}'
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_required_call_that_is_cut_is_never_text() -> None:
    body = WITH_TOOLS | {"stream": False, "tool_choice": "required"}
    text = "".join(FORCED)
    with tool_client(model := text_with()) as asked:
        for num in range(1, len(text)):
            model.pieces = text_with(text[:num], reason="length").pieces
            (choice,) = asked.post(CHAT, json=body).json()["choices"]
            assert choice["finish_reason"] == "length"
            assert not choice["message"]["content"]
            calls = choice["message"].get("tool_calls", [])
            assert all('{"a": "}"}'.startswith(one["function"]["arguments"]) for one in calls)


def test_a_required_call_that_a_stop_word_cuts_is_not_complete() -> None:
    body = WITH_TOOLS | {"stream": False, "tool_choice": "required", "stop": "}"}
    cut = text_with(*FORCED[:2], "")
    (choice,) = tool_client(cut).post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a'


def test_an_answer_with_a_schema_may_be_a_call_first() -> None:
    """As agents ask that want an object at the end."""
    body = WITH_TOOLS | {"stream": False, "response_format": STRICT}
    model = text_with(*FORCED)
    (choice,) = tool_client(model).post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "}"}'
    (asked,) = model.asked
    assert asked["guided_decoding_guide_type"] == "ebnf_grammar"
    assert all(word in asked["guided_decoding_guide"] for word in ("weather", "integer", "calls"))
    (choice,) = tool_client(text_with('{"a": 1}')).post(CHAT, json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a": 1}', "stop")


def test_an_answer_that_another_grammar_guides_is_never_a_call() -> None:
    body = WITH_TOOLS | {"stream": False, "guided_json": {"type": "object"}}
    text = '{"name": "weather", "arguments": {}}'
    (choice,) = tool_client(text_with(text)).post(CHAT, json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_a_named_function_is_the_only_one() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "other"}}
    model = text_with(FORCED[0].replace("wea", "other"), '", "arguments": {}}\n</tool_call>')
    body = {**WITH_TOOLS, "stream": False, "tools": [TOOL, other], "tool_choice": named}
    (choice,) = tool_client(model).post(CHAT, json=body).json()["choices"]
    assert "weather" not in model.asked[0]["guided_decoding_guide"]
    assert "{0,15}" not in model.asked[0]["guided_decoding_guide"]
    assert choice["finish_reason"] == "tool_calls"


def test_allowed_tools_that_are_required() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    body = {**WITH_TOOLS, "stream": False, "tools": [TOOL, other]}
    model = text_with(*FORCED)
    body["tool_choice"] = allowed("required")
    (choice,) = tool_client(model).post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert "other" not in model.asked[0]["guided_decoding_guide"]
    assert "{0,15}" in model.asked[0]["guided_decoding_guide"], "several calls"


def test_tool_choice_none_leaves_text_as_it_is() -> None:
    body = WITH_TOOLS | {"stream": False, "tool_choice": "none"}
    model = text_with(*CALLS)
    choice = tool_client(model).post(CHAT, json=body).json()["choices"][0]
    message = {"role": "assistant", "content": "".join(CALLS), "refusal": None}
    assert choice["message"] == message
    assert "weather" not in PROMPTS.decode(model.asked[0]["input_ids"])
