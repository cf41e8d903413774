"""What streams send, and in which chunk, against the types of the providers' packages and the order
of events in streams that were recorded from the providers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from endpoint_client import http
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from standins import TINY, Echo, scored, text_with

from smartspec_gateway.openai.apis.writer import DONE
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.prompts import Prompts
from smartspec_gateway.openai.model import Piece

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TYPES: dict[str, Any] = {
    CHAT: ChatCompletionChunk,
    RESPONSES: ResponseStreamEvent,
    MESSAGES: RawMessageStreamEvent,
}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
USER = [{"role": "user", "content": "Hello!"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": USER,
        "tools": [{"type": "function", "function": FUNCTION}],
        "stream_options": {"include_usage": True},
    },
    TEXTS: {"prompt": "a", "stream_options": {"include_usage": True}},
    RESPONSES: {"input": "Hello!", "tools": [{"type": "function", **FUNCTION}]},
    MESSAGES: {
        "messages": USER,
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "max_tokens": 9,
    },
}
FORCED: dict[str, Any] = {
    CHAT: "required",
    RESPONSES: "required",
    MESSAGES: {"type": "any"},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
LATE = Echo(ApiError(503, "the queue is full"), num_before=1)
MODELS: dict[str, Echo] = {
    "text": Echo(),
    "cut": text_with("one", " two\u2028", reason="length"),
    "thought": text_with("<think>I", " see.</think>", "one"),
    "calls": text_with("I look.", CALL, CALL),
    "forced": text_with(CALL[:30], CALL[30:47], CALL[47:]),
    "empty": text_with(""),
    "late": LATE,
}

EXTRA = {
    "choices.delta.reasoning_content": "OpenAI's chats never show reasoning; vLLM's field",
    "choices.speculation": "if asked for by return_spec_metrics",
    "metrics": "if asked for by return_spec_metrics",
    "response.metrics": "if asked for by return_spec_metrics",
    "response.store": "required by Open Responses",
    "response.presence_penalty": "required by Open Responses",
    "response.frequency_penalty": "required by Open Responses",
    "name": "of a call whose arguments are done; other versions of the package require it",
    "error": "the package `openai` raises only for errors in this field",
}
"""Fields that the package of the provider does not know, with the reason."""

NO_TYPE = {"error": "the package `anthropic` has no type for it: it raises"}
"""Types of events that the package has not."""


def recorded(*kinds: str) -> list[str]:
    return [one for kind in kinds for one in kind.split()]


RESPONSE_BEGIN = "created in_progress"
RESPONSE_TEXT = (
    "output_item.added content_part.added output_text.delta output_text.done content_part.done",
    "output_item.done",
)
RESPONSE_CALL = (
    "output_item.added function_call_arguments.delta function_call_arguments.done output_item.done"
)
RESPONSE_THOUGHT = (
    "output_item.added content_part.added reasoning_text.delta reasoning_text.done",
    "content_part.done output_item.done",
)
BLOCK_STOP = "content_block_stop"
MESSAGE_END = "message_delta message_stop"
TEXT_BLOCK = f"start:text text_delta {BLOCK_STOP}"
THINKING_BLOCK = f"start:thinking thinking_delta signature_delta {BLOCK_STOP}"
TOOL_BLOCK = f"start:tool_use input_json_delta {BLOCK_STOP}"

ORDERS: dict[tuple[str, str], list[str]] = {
    (CHAT, "text"): recorded("role content finish_reason usage"),
    (CHAT, "cut"): recorded("role content finish_reason usage"),
    (CHAT, "thought"): recorded("role reasoning_content content finish_reason usage"),
    (CHAT, "calls"): recorded(
        "role content name arguments name arguments finish_reason usage",
    ),
    (CHAT, "forced"): recorded("role name arguments finish_reason usage"),
    (CHAT, "late"): recorded("role content error"),
    (TEXTS, "text"): recorded("text text+finish_reason usage"),
    (TEXTS, "cut"): recorded("text text+finish_reason usage"),
    (RESPONSES, "text"): recorded(RESPONSE_BEGIN, *RESPONSE_TEXT, "completed"),
    (RESPONSES, "cut"): recorded(RESPONSE_BEGIN, *RESPONSE_TEXT, "incomplete"),
    (RESPONSES, "thought"): recorded(
        RESPONSE_BEGIN, *RESPONSE_THOUGHT, *RESPONSE_TEXT, "completed"
    ),
    (RESPONSES, "calls"): recorded(
        RESPONSE_BEGIN, *RESPONSE_TEXT, RESPONSE_CALL, RESPONSE_CALL, "completed"
    ),
    (RESPONSES, "forced"): recorded(RESPONSE_BEGIN, RESPONSE_CALL, "completed"),
    (RESPONSES, "late"): recorded(RESPONSE_BEGIN, *RESPONSE_TEXT, "error failed"),
    (MESSAGES, "text"): recorded("message_start", TEXT_BLOCK, MESSAGE_END),
    (MESSAGES, "cut"): recorded("message_start", TEXT_BLOCK, MESSAGE_END),
    (MESSAGES, "thought"): recorded("message_start", THINKING_BLOCK, TEXT_BLOCK, MESSAGE_END),
    (MESSAGES, "calls"): recorded("message_start", TEXT_BLOCK, TOOL_BLOCK, TOOL_BLOCK, MESSAGE_END),
    (MESSAGES, "forced"): recorded("message_start", TOOL_BLOCK, MESSAGE_END),
    (MESSAGES, "empty"): recorded("message_start", MESSAGE_END),
    (MESSAGES, "late"): recorded("message_start start:text text_delta error"),
}
"""The kinds of events in the order of recorded streams, by route and model. Those of a kind that
follow each other are one here. Recorded streams of Messages also have `ping` events anywhere."""


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{# </think> #}"
    (tmp_path / "chat.jinja").write_text(template)
    return Prompts(TINY, tmp_path / "chat.jinja")


def stream(prompts: Prompts, model: Echo, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events. Their names are their types."""
    client = http(model, prompts)
    answer = client.post(path, json=BODIES[path] | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    found = []
    is_done = answer.text.endswith(DONE)
    assert is_done == (path != MESSAGES and not (path == CHAT and '"error"' in answer.text))
    for event in answer.text.removesuffix(DONE).strip().split("\n\n"):
        *name, data = event.splitlines()
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == ([f"event: {found[-1]['type']}"] if "type" in found[-1] else [])
    return found


def case(prompts: Prompts, path: str, name: str) -> list[dict[str, Any]]:
    is_forced = name == "forced"
    fields = {"tool_choice": FORCED[path]} if is_forced else {}
    return stream(prompts, MODELS[name], path, return_spec_metrics="summary", **fields)


def kind(event: dict[str, Any]) -> str:
    """A word of ORDERS."""
    if "error" in event:
        return "error"
    if "choices" not in event:
        inner = event.get("delta") if event["type"] == "content_block_delta" else None
        if event["type"] == "content_block_start":
            return f"start:{event['content_block']['type']}"
        return str(inner["type"] if inner else event["type"].removeprefix("response."))
    if not event["choices"]:
        return "usage"
    (choice,) = event["choices"]
    if "text" in choice:
        return "text+finish_reason" if choice["finish_reason"] else "text"
    delta = choice["delta"]
    if "tool_calls" in delta:
        (call,) = delta["tool_calls"]
        return "name" if "id" in call else "arguments"
    return next(iter(delta), "finish_reason")


def unknown(model: Any, place: str = "") -> Iterator[str]:
    """Fields of a parsed event that its package does not know."""
    if isinstance(model, list):
        for one in model:
            yield from unknown(one, place)
    elif isinstance(model, BaseModel):
        yield from (f"{place}{name}" for name in model.model_extra or ())
        for name in type(model).model_fields:
            yield from unknown(getattr(model, name), f"{place}{name}.")


@pytest.mark.parametrize(("path", "name"), ORDERS)
def test_events_come_in_the_recorded_order(prompts: Prompts, path: str, name: str) -> None:
    found = [one for one, _ in groupby(map(kind, case(prompts, path, name)))]
    assert found == ORDERS[path, name]


TYPED = [(path, name) for path, name in ORDERS if path != TEXTS]
"""The package's type of a completion has no null in `finish_reason`, as recorded streams have."""


@pytest.mark.parametrize(("path", "name"), TYPED)
def test_events_have_the_types_of_the_packages(prompts: Prompts, path: str, name: str) -> None:
    """Strictly: no value is converted, no field is missing, and each other one has its reason."""
    checked: Any = TypeAdapter(TYPES[path])
    for event in case(prompts, path, name):
        if "error" in event and path != RESPONSES:
            assert event.get("type", "error") in NO_TYPE
            continue
        parsed = checked.validate_json(json.dumps(event), strict=True)
        assert set(unknown(parsed)) <= EXTRA.keys(), event


def test_each_reason_is_needed(prompts: Prompts) -> None:
    steps = stream(prompts, Echo(), CHAT, return_spec_metrics="detailed")
    used = set(unknown([ChatCompletionChunk.model_validate(event) for event in steps]))
    for path, name in TYPED:
        checked: Any = TypeAdapter(TYPES[path])
        events = case(prompts, path, name)
        events = [one for one in events if "error" not in one or path == RESPONSES]
        used |= {field for event in events for field in unknown(checked.validate_python(event))}
    assert used == EXTRA.keys()


def test_log_probs_come_with_their_text(prompts: Prompts) -> None:
    """The chunks of the role and of the finish_reason have none."""
    tokens = prompts.encode("one two", add_special_tokens=False)
    pieces = [Piece("one", 1, log_probs={"output": scored(tokens[0])}), Piece("", 1, "stop", 5)]
    model = Echo(pieces=[*pieces[:1], Piece("", 1, log_probs={"output": scored(5)}), pieces[1]])
    *found, _ = stream(prompts, model, CHAT, logprobs=True, top_logprobs=2)
    choices = [event["choices"][0] for event in found]
    sizes = [len(one["logprobs"]["content"]) if one["logprobs"] else 0 for one in choices]
    assert [kind(event) for event in found] == ["role", "content", "finish_reason", "finish_reason"]
    assert [one["finish_reason"] for one in choices] == [None, None, None, "stop"]
    assert sizes == [0, 1, 1, 0]


def test_only_the_last_chunk_of_a_chat_has_usage(prompts: Prompts) -> None:
    *others, last = stream(prompts, text_with("one"), CHAT)
    assert [event["usage"] for event in others] == [None] * 3
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)
    assert "usage" not in stream(prompts, text_with("one"), CHAT, stream_options=None)[0]


@pytest.mark.parametrize(
    ("parts", "content"), [(["Hi"], ""), ([CALL], None), (["<tool", "_cal"], None)]
)
def test_the_role_has_the_kind_of_the_answer(
    prompts: Prompts, parts: list[str], content: str | None
) -> None:
    """No content if a call follows, or if it can follow."""
    first, *_ = stream(prompts, text_with(*parts), CHAT)
    delta = {"role": "assistant", "content": content, "refusal": None}
    assert first["choices"][0]["delta"] == delta


def test_each_choice_has_its_own_role_and_end(prompts: Prompts) -> None:
    *found, _ = stream(prompts, text_with("one"), CHAT, n=2)
    kinds = [(event["choices"][0]["index"], kind(event)) for event in found]
    for index in range(2):
        own = [one for number, one in kinds if number == index]
        assert own == ["role", "content", "finish_reason"]


def test_a_call_begins_without_arguments(prompts: Prompts) -> None:
    calls = [
        call
        for event in case(prompts, CHAT, "calls")
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    functions = [call["function"] for call in calls]
    assert functions == [{"name": "weather", "arguments": ""}, {"arguments": '{"a": 1}'}] * 2
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    blocks = [
        event["delta"]["partial_json"]
        for event in case(prompts, MESSAGES, "calls")
        if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert blocks == ["", '{"a": 1}'] * 2


@pytest.mark.parametrize("name", ["text", "thought", "calls", "late"])
def test_numbers_and_ids_of_a_response(prompts: Prompts, name: str) -> None:
    """Events are numbered from 0. Each item keeps its id and its place, which is that in the
    response at the end."""
    events = case(prompts, RESPONSES, name)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    places = {(event["output_index"], event["item_id"]) for event in events if "item_id" in event}
    items = [event for event in events if "item" in event]
    places |= {(event["output_index"], event["item"]["id"]) for event in items}
    assert places == {(place, item["id"]) for place, item in enumerate(output)}
    assert [event["item"] for event in items if event["type"].endswith("done")] == output
    assert {event["content_index"] for event in events if "content_index" in event} <= {0}
    before = [event["response"] for event in events if "response" in event][:-1]
    assert [(one["status"], one["output"], one["usage"]) for one in before] == [
        ("in_progress", [], None)
    ] * 2


@pytest.mark.parametrize(
    ("path", "name", "detail"),
    [
        (CHAT, "completion_tokens_details", "reasoning_tokens"),
        (RESPONSES, "output_tokens_details", "reasoning_tokens"),
        (MESSAGES, "output_tokens_details", "thinking_tokens"),
    ],
)
def test_usage_counts_reasoning(prompts: Prompts, path: str, name: str, detail: str) -> None:
    counts = []
    for model in ("text", "thought"):
        found = [event.get("response", event).get("usage") for event in case(prompts, path, model)]
        counts += [usage[name][detail] for usage in found if usage and name in usage]
    assert counts == [0, len(prompts.encode("I see.", add_special_tokens=False))]


def test_usage_of_a_message(prompts: Prompts) -> None:
    """At the start all tokens of the prompt, at the end the counts of the whole message."""
    first, *_, last, _ = stream(prompts, Echo(), MESSAGES)
    begin, end = first["message"]["usage"], last["usage"]
    assert end.keys() - begin.keys() == {"output_tokens_details"}
    assert (end["cache_read_input_tokens"], end["output_tokens"]) == (5, 3)
    assert begin["input_tokens"] == end["input_tokens"] + 5


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_text_that_is_held_back_sends_nothing(prompts: Prompts, path: str) -> None:
    """A chat has no empty chunk for it, as the others have no event."""
    short, long = text_with("<tool_call>", CALL[11:]), text_with(*CALL)
    assert len(stream(prompts, short, path)) == len(stream(prompts, long, path))
