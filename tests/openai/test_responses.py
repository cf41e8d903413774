"""`/v1/responses`, asked by the `openai` package, with a model that answers from memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from endpoint_client import PROMPTS, http
from openai.types.responses.response_create_params import ResponseCreateParams
from standins import TINY, Echo, text_with

import openai
from smartspec_gateway.openai.apis.responses import chat_of
from smartspec_gateway.openai.apis.responses_schema import ResponsesRequest
from smartspec_gateway.openai.apis.schema import REFUSED
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.prompts import Prompts

URL = "/v1/responses"
CALL = '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
PARTS = ("<think>I need", " it.</think>\n", "I look.", CALL, CALL)
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
NAMED = {"type": "function", "name": "weather"}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    "{{ tools }}"
    "{# </think> #}"
)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return Prompts(TINY, tmp_path / "chat.jinja")


def sdk(model: Echo, prompts: Prompts = PROMPTS) -> openai.OpenAI:
    return openai.OpenAI(
        base_url="http://testserver/v1",
        api_key="none",
        max_retries=0,
        http_client=http(model, prompts),
    )


def kinds(events: Sequence[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


def test_a_text_becomes_a_response(prompts: Prompts) -> None:
    model = Echo()
    found = sdk(model, prompts).responses.create(
        model="smartspec",
        input="Hello!",
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        metadata={"a": "b"},
        extra_body={"speculation_policy": "fixed:2", "seed": 3, "return_spec_metrics": "summary"},
    )
    (asked,) = model.asked
    assert prompts.decode(asked["input_ids"]) == "[system]Be brief.[user]Hello!None"
    assert (asked["max_tokens"], asked["seed"], asked["temperature"]) == (9, 3, 0.5)
    assert asked["speculation_policy"] == "fixed:2"
    assert found.output_text == "one two"
    assert (found.status, found.store, found.metadata) == ("completed", False, {"a": "b"})
    assert (found.instructions, found.temperature) == ("Be brief.", 0.5)
    assert found.usage.to_dict() == {
        "input_tokens": len(asked["input_ids"]),
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(asked["input_ids"]) + 3,
    }
    assert found.metrics == {"speculative_decoding": {}}


REQUIRED = """id object created_at completed_at status incomplete_details model previous_response_id
instructions output error tools tool_choice truncation parallel_tool_calls text top_p temperature
presence_penalty frequency_penalty top_logprobs reasoning usage max_output_tokens max_tool_calls
store background service_tier metadata safety_identifier prompt_cache_key"""
"""Fields of a response that Open Responses requires."""


def test_a_response_has_the_required_fields() -> None:
    found = http(text_with("")).post(URL, json={"input": "Hello!", "tools": []}).json()
    assert set(REQUIRED.split()) == found.keys()
    assert (found["text"], found["tool_choice"]) == ({"format": {"type": "text"}}, "auto")
    (item,) = found["output"]
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert item["content"] == [part], "an empty text is an empty message"


def test_tokens_are_counted_without_generating(prompts: Prompts) -> None:
    model = Echo()
    client = sdk(model, prompts)
    asked: Any = {"model": "smartspec", "input": "Hello!", "instructions": "x", "tools": [TOOL]}
    client.responses.create(**asked)
    counted = client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == len(model.asked[0]["input_ids"])
    assert (counted.object, len(model.asked)) == ("response.input_tokens", 1)
    with pytest.raises(openai.NotFoundError, match="model: got 'gpt'"):
        client.responses.input_tokens.count(**asked | {"model": "gpt"})


def test_items_become_messages() -> None:
    """Calls belong to the assistant's message before them."""
    output: dict[str, Any] = {"id": "msg_1", "type": "message", "status": "completed"}
    output |= {"role": "assistant"}
    part = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {**output, "content": [part]},
        {**call, "id": "fc_1"},
        {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
        {**call, "call_id": "e"},
    ]
    chat = chat_of(ResponsesRequest.model_validate({"input": items}))
    found = [message.for_template() for message in chat.messages]
    assert [message["role"] for message in found] == [
        *("developer", "user", "assistant", "tool", "assistant")
    ]
    assert [message.get("content") for message in found] == ["x", "a\nb", "I look.", "sun", None]
    calls = [[call["id"] for call in message.get("tool_calls", [])] for message in found]
    assert calls == [[], [], ["c", "d"], [], ["e"]]
    assert found[3]["tool_call_id"] == "c"


def test_what_is_no_text_in_an_output_is_a_marker() -> None:
    output = [
        {"type": "input_text", "text": "Seen:"},
        {"type": "input_image", "image_url": "data:,"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "x"},
    ]
    item = {"type": "function_call_output", "call_id": "c", "output": output}
    chat = chat_of(ResponsesRequest.model_validate({"input": [item]}))
    assert chat.messages[0].text == "Seen:\n[image]\n[document: a.pdf]"


def test_events_of_a_text() -> None:
    client = sdk(Echo())
    events = list(client.responses.create(model="smartspec", input="Hello!", stream=True))
    assert kinds(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert events[2].item.content == []
    assert [event.delta for event in events[4:6]] == ["one", " two"]
    assert events[-1].response.output_text == events[6].text == "one two"
    assert events[-1].response.id == events[0].response.id
    assert events[-1].response.usage.output_tokens == 3


def test_function_calls_and_reasoning(prompts: Prompts) -> None:
    """Streamed or not; the items can be sent back."""
    client = sdk(text_with(*PARTS), prompts)
    asked: Any = {"model": "smartspec", "input": "Hello!", "tools": [TOOL]}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    last = events[-1].response
    reasoning, message, call, other = whole.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "I need it.")
    assert (message.content[0].text, call.name) == ("I look.", "weather")
    assert call.arguments == '{"a": 1}'
    assert {call.call_id, other.call_id}.isdisjoint({call.id, other.id})
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert [kind for kind in kinds(events) if "done" in kind or "delta" in kind] == [
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done") * 2,
    ]
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]
    assert (added[2].item.status, added[2].item.arguments) == ("in_progress", "")
    back = [*whole.output, {"type": "function_call_output", "call_id": "c", "output": "sun"}]
    assert client.responses.create(**asked | {"input": back}).status == "completed"
    one = client.responses.create(**asked, parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]


def test_forced_calls_are_streamed_and_texts_follow_schemas(prompts: Prompts) -> None:
    parts = ('<tool_call>\n{"name": "wea', 'ther", "arguments": {"a": [', "1]}", "}\n</tool_call>")
    for num_parts, reason, status in (
        (4, "stop", "completed"),
        (4, "length", "completed"),
        (2, "length", "incomplete"),
    ):
        model = text_with(*parts[:num_parts], reason=reason)
        stream = sdk(model, prompts).responses.create(
            model="smartspec", input="Rome?", tools=[TOOL], tool_choice="required", stream=True
        )
        events = list(stream)
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert deltas == ['{"a": [', "1]}"][: num_parts - 1]
        (item,) = events[-1].response.output
        assert (item.name, item.arguments, item.status) == ("weather", "".join(deltas), status)
        assert events[-1].response.status == ("completed" if reason == "stop" else "incomplete")
        assert model.asked[0]["guided_decoding_guide_type"] == "ebnf_grammar"
    schema = {"type": "object", "properties": {"b": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "b", "schema": schema, "strict": True}}
    model = Echo()
    sdk(model).responses.create(model="smartspec", input="x", text=form)
    assert json.loads(model.asked[0]["guided_decoding_guide"]) == schema
    error = ApiError(400, "guided_decoding_guide: got 'x', must be y", "guided_decoding_guide")
    answer = http(Echo(error)).post(URL, json={"input": "x", "text": form})
    assert answer.json()["error"]["param"] == "text.format"
    del form["format"]["name"]
    answer = http(Echo()).post(URL, json={"input": "x", "text": form})
    assert answer.json()["error"]["param"] == "text.format.name"
    form["format"]["type"] = "text"
    answer = http(Echo()).post(URL, json={"input": "x", "text": form})
    assert answer.json()["error"]["param"] == "text.format.schema"


def test_a_cut_text_is_incomplete() -> None:
    client = sdk(text_with("one", reason="length"))
    found = client.responses.create(model="smartspec", input="Hello!")
    assert (found.status, found.output[-1].status) == ("incomplete", "incomplete")
    assert found.incomplete_details.reason == "max_output_tokens"
    events = client.responses.create(model="smartspec", input="Hello!", stream=True)
    assert kinds(list(events))[-1] == "incomplete"


def test_errors_of_the_model() -> None:
    long = ApiError(400, "max_tokens: got 9, must be at most 8", "max_tokens")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens: got 9, must") as raised:
        sdk(Echo(long)).responses.create(model="smartspec", input="Hello!")
    assert raised.value.param == "max_output_tokens"
    late = Echo(ApiError(503, "the queue is full"), num_before=1)
    with pytest.raises(openai.APIError, match="the queue is full"):
        list(sdk(late).responses.create(model="smartspec", input="Hello!", stream=True))
    sent = http(late).post(URL, json={"input": "Hello!", "stream": True}).text
    *_, error, last = (line[6:] for line in sent.splitlines() if line.startswith("data: {"))
    assert json.loads(error)["message"] == json.loads(error)["error"]["message"]
    failed = json.loads(last)["response"]
    assert (failed["status"], failed["error"]["message"]) == ("failed", "the queue is full")
    assert failed["output"][0]["content"][0]["text"] == "one"


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}, NAMED]}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
SENTENCES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": [CALL_ITEM] * 129}, "input", "got 129 items function_call in one turn, must be at"),
    ({"store": True}, "store", "must be false: the server keeps no responses"),
    ({"background": True}, "background", "must be false: the server keeps no responses"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "must be left out: the server"),
    ({"conversation": "conv_1"}, "conversation", "must be left out: the server keeps no"),
    ({"top_logprobs": 2}, "top_logprobs", "must be 0"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "must be given"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name", "must be given"),
    ({"tool_choice": {"type": 5}}, "tool_choice.type", "got 5, must be 'function' or"),
    ({"tool_choice": {"name": "weather"}}, "tool_choice.type", "must be given"),
    ({"tool_choice": NAMED | {"x": 1}}, "tool_choice.x", "not supported; leave it out"),
    ({"tool_choice": ALLOWED | {"tools": [5]}}, "tool_choice.tools.0", "got 5, must be an object"),
    ({"tool_choice": ALLOWED | {"tools": 5}}, "tool_choice.tools", "got 5, must be a list"),
    ({"tool_choice": ALLOWED | {"mode": "x"}}, "tool_choice.mode", "'auto' or 'required'"),
    ({"tool_choice": ALLOWED}, "tool_choice", "got 'weather', must be a function of tools"),
    ({"tool_choice": "x"}, "tool_choice", "got 'x', must be 'auto', 'none' or 'required'"),
    ({"include": ["message.output_text.logprobs"]}, "include.0", "'reasoning.encrypted_content'"),
    ({"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
    ({"input": []}, "input", "got [], must be"),
    ({"input": "a " * 600}, "input", "must be at most 511 tokens"),
    ({"input": [{"type": 5}]}, "input.0.type", "got 5, must be 'message'"),
    ({"input": [{"type": ["message"]}]}, "input.0.type", "got ['message'], must be 'message'"),
    ({"input": [{"type": "additional_tools"}]}, "input.0.tools", "must be given"),
    ({"input": [{"type": "web_search_call"}]}, "input", "must have a message"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type", "got 'item_reference'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input.0.content.0.type",
        "'input_text' or 'output_text'",
    ),
    ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools.1.name", "must be given"),
    ({"tools": [{"type": 5}]}, "tools.0.type", "'function'"),
    ({"tools": [{"name": "f"}]}, "tools.0.type", "must be given"),
    (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
        "got 'required' without a function of tools",
    ),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "got 'web_search', must be"),
]


@pytest.mark.parametrize(("changed", "param", "part"), SENTENCES, ids=lambda item: str(item)[:40])
def test_wrong_fields_are_named(changed: dict[str, Any], param: str, part: str) -> None:
    model = Echo()
    answer = http(model).post(URL, json={"input": "Hello!", **changed})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert part in error["message"]
    assert error["message"].startswith(f"{param}: ")
    assert not model.asked


def test_items_of_an_agent() -> None:
    """Calls that the client ran stay in the conversation. What ran on OpenAI's servers does not."""
    shell = {"type": "exec", "command": ["ls"]}
    image = {"type": "input_image", "image_url": "data:,"}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "internal_note": 1},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "local_shell_call", "call_id": "d", "status": "completed", "action": shell},
        {
            "type": "local_shell_call_output",
            "call_id": "d",
            "output": [{"type": "input_text", "text": "b"}, image, {"stdout": "c"}],
        },
        {"type": "compaction_trigger"},
    ]
    chat = chat_of(ResponsesRequest.model_validate({"input": items}))
    roles = [(message.role, message.text) for message in chat.messages]
    assert roles == [
        *(("user", "a"), ("assistant", ""), ("tool", "done"), ("assistant", "")),
        ("tool", 'b\n[image]\n{"stdout": "c"}'),
    ]
    calls = [call for message in chat.messages for call in message.tool_calls or []]
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("c", "apply_patch", '{"input": "*** x"}'),
        ("d", "local_shell", json.dumps({"action": shell})),
    ]


def test_tools_in_the_input_are_tools(prompts: Prompts) -> None:
    added = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "x", "tools": []}, TOOL],
    }
    body = {"input": [added, {"role": "user", "content": "Rome?"}]}
    found = http(text_with(CALL), prompts).post(URL, json=body).json()
    assert [tool["name"] for tool in found["tools"]] == ["weather"]
    assert [item["type"] for item in found["output"]] == ["function_call"]


def test_an_empty_input_behind_instructions(prompts: Prompts) -> None:
    model = Echo()
    assert http(model, prompts).post(URL, json={"input": [], "instructions": "x"}).is_success
    assert prompts.decode(model.asked[0]["input_ids"]) == "[system]xNone"


def test_tools_that_the_server_cannot_run_are_skipped(prompts: Prompts) -> None:
    """The request of an agent: Codex sends such tools, and metadata."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools = [
        {"type": "web_search", "external_web_access": False},
        TOOL | {"strict": False, "defer_loading": True},
        {"type": "custom", "name": "apply_patch", "description": "x", "format": grammar},
        {"type": "local_shell"},
        {"type": "mcp", "server_label": "docs", "server_url": "http://x"},
    ]
    body = {"input": "Rome?", "tools": tools, "client_metadata": {"x": "y"}, "tool_choice": "auto"}
    model = text_with(CALL)
    found = http(model, prompts).post(URL, json=body).json()
    assert [tool["name"] for tool in found["tools"]] == ["weather"]
    assert [item["type"] for item in found["output"]] == ["function_call"]
    told = prompts.decode(model.asked[0]["input_ids"])
    assert "weather" in told
    assert not any(word in told for word in ("apply_patch", "shell", "defer", "mcp"))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(prompts: Prompts, mode: str) -> None:
    other = TOOL | {"name": "time"}
    choice = ALLOWED | {"mode": mode}
    body = {"input": "Rome?", "tools": [TOOL, other], "tool_choice": choice}
    model = text_with('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    found = http(model, prompts).post(URL, json=body).json()
    assert [item["type"] for item in found["output"]] == ["function_call"]
    assert found["tool_choice"] == choice
    (asked,) = model.asked
    assert "time" in prompts.decode(asked["input_ids"]), "the model is told of all"
    guide = asked.get("guided_decoding_guide", "")
    assert ("weather" in guide, "time" in guide) == (mode == "required", False)
    model = text_with('<tool_call>{"name": "time", "arguments": {}}</tool_call>')
    body["tool_choice"] = ALLOWED
    found = http(model, prompts).post(URL, json=body).json()
    assert [item["type"] for item in found["output"]] == ["message"], "a call of another is text"


@pytest.mark.parametrize(
    ("changed", "guide"),
    [
        ({"tools": [TOOL, TOOL | {"name": "time"}], "tool_choice": NAMED}, '"weather'),
        ({"text": {"format": {"type": "json_object"}}}, '{"type": "object"}'),
        ({"text": {"format": {"type": "text"}}}, ""),
    ],
)
def test_a_named_tool_and_formats_of_texts(changed: dict[str, Any], guide: str) -> None:
    model = Echo()
    http(model).post(URL, json={"input": "Rome?", **changed})
    found = model.asked[0].get("guided_decoding_guide", "")
    assert guide in found
    assert "time" not in found
    assert bool(guide) == bool(found)


def test_each_field_of_the_openai_package_has_its_place() -> None:
    """The page of the fields names all that are refused."""
    names = {name for one in get_args(ResponseCreateParams) for name in one.__annotations__}
    assert len(names) > 25
    assert names - ResponsesRequest.model_fields.keys() <= {*REFUSED, "prompt"}
