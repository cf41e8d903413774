"""`/v1/responses`: a request becomes one for chats, and its pieces become a response and events.

A response has items: reasoning, a message, and function calls, in the order in which they were
generated. An item with text is open until another item begins or the text ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import (
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

from smartspec_gateway.openai.apis.chat_schema import (
    ChatRequest,
    add_thought,
    check_calls,
    text_parts,
)
from smartspec_gateway.openai.apis.choices import Prepared
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.responses_schema import (
    CallItem,
    CallOutputItem,
    MessageItem,
    OtherItem,
    ReasoningItem,
    ResponsesRequest,
)
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.apis.schema import Sampling, type_of
from smartspec_gateway.openai.apis.validation import validated
from smartspec_gateway.openai.apis.writer import DONE, Count, Event, Item, ItemWriter, Kind, new_id
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.formats.calls import new_call
from smartspec_gateway.openai.formats.media import with_markers
from smartspec_gateway.openai.json_parts import Encoded
from smartspec_gateway.openai.logprobs import TokenBytes

SAME = Sampling.model_fields.keys() | {"stop"}
SAME |= {"parallel_tool_calls", "chat_template_kwargs", "return_spec_metrics"}
"""Fields that chats have with the same meaning."""

ECHOED = (
    *("instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "top_p"),
    *("presence_penalty", "frequency_penalty", "safety_identifier", "prompt_cache_key"),
)
"""Fields of the request that the response has unchanged."""

CALLED = ("input", "action", "operation", "arguments")
"""Fields of calls of tools that are no functions."""

as_text = with_markers("input_text", "output_text")

KINDS = {
    "text": ("msg_", "message", "output_text"),
    "reasoning": ("rs_", "reasoning", "reasoning_text"),
    "call": ("fc_", "function_call", "function_call_arguments"),
}
"""By the kind of an item: how its id begins, its type, and the word for its text in events."""


def chat_of(asked: ResponsesRequest) -> ChatRequest:
    """The same request to chats. Raises ApiError."""
    body = asked.model_dump(include=SAME, exclude_unset=True)
    body["messages"] = _messages(asked)
    check_calls(body["messages"], "input", "items function_call")
    if asked.input and not body["messages"]:
        raise ApiError(400, "input: must have a message", "input")
    body["max_completion_tokens"] = asked.max_output_tokens
    body["reasoning_effort"] = asked.reasoning and asked.reasoning.effort
    body["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in asked.functions
    ]
    body["tool_choice"] = _nested(asked.tool_choice)
    schema = format_of(asked)
    kind = schema.pop("type")
    if kind == "text" and schema:
        field = f"text.format.{next(iter(schema))}"
        raise ApiError(400, f"{field}: only with the type json_schema", field)
    if kind != "text":
        body["response_format"] = {"type": kind, **({"json_schema": schema} if schema else {})}
    return validated(ChatRequest, body)


def _prepared(requests: Requests, asked: ResponsesRequest) -> Prepared:
    head = _head(asked, asked.model or requests.settings.name)
    return requests.of_chat(chat_of(asked), own=head, ignored=asked.ignored)


def _count_tokens(requests: Requests, asked: ResponsesRequest) -> dict[str, Any]:
    num_tokens = requests.num_prompt_tokens(chat_of(asked))
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _head(asked: ResponsesRequest, model: str) -> dict[str, Encoded]:
    """What the response has of its request, as JSON."""
    found = {
        "model": model,
        **{name: getattr(asked, name) for name in ECHOED},
        "reasoning": asked.reasoning and asked.reasoning.model_dump(),
        "text": {"format": format_of(asked)},
        "tools": [tool.model_dump() for tool in asked.functions],
        "tool_choice": asked.tool_choice or "auto",
        "metadata": asked.metadata or {},
    }
    return {name: Encoded(json.dumps(value, ensure_ascii=False)) for name, value in found.items()}


def _nested(choice: Any) -> Any:
    """A choice of tools as chats have it. Theirs are functions, or custom."""
    if not isinstance(choice, dict):
        return choice
    kind, inner = choice.get("type"), {name: choice[name] for name in choice if name != "type"}
    if isinstance(tools := inner.get("tools"), list):
        inner["tools"] = [
            {"type": "custom"} if type_of(one) not in (None, "function") else _nested(one)
            for one in tools
        ]
    return {"type": kind, str(kind): inner}


def format_of(asked: ResponsesRequest) -> dict[str, Any]:
    found = asked.text and asked.text.format
    return found.model_dump() if found else {"type": "text"}


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """Calls become part of the assistant's message before them, if there is one, and reasoning
    part of the text or the calls behind it."""
    found: list[dict[str, Any]] = []
    if asked.instructions is not None:
        found.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*found, {"role": "user", "content": asked.input}]
    for item in asked.input:
        if isinstance(item, MessageItem):
            if not (item.role == "assistant" and _is_thought(found)):
                found.append({"role": item.role})
            found[-1]["content"] = text_parts(item.content)
        elif isinstance(item, ReasoningItem):
            if item.text and not _is_thought(found):
                found.append({"role": "assistant"})
            if item.text:
                add_thought(found[-1], item.text)
        elif output := _output(item):
            found.append({"role": "tool", **output})
        elif call := _call(item):
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant"})
            found[-1].setdefault("tool_calls", []).append(call)
    return found


def _is_thought(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message has no text or call yet."""
    return bool(messages) and messages[-1].keys() == {"role", "reasoning_content"}


def _output(item: Any) -> dict[str, Any] | None:
    """Of a function, or of another tool that the client runs."""
    if isinstance(item, CallOutputItem):
        return {"tool_call_id": item.call_id, "content": text_parts(item.output)}
    if not (isinstance(item, OtherItem) and item.call_id and item.type.endswith("_output")):
        return None
    given = (item.model_extra or {}).get("output", "")
    parts = as_text(given if isinstance(given, list) else [given])
    return {"tool_call_id": item.call_id, "content": "\n".join(map(_part_text, parts))}


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else json.dumps(part, ensure_ascii=False)


def _call(item: Any) -> dict[str, Any] | None:
    """Of a function. Calls of other tools have their fields as arguments."""
    if isinstance(item, CallItem):
        name, arguments = item.name, item.arguments
    elif isinstance(item, OtherItem) and item.call_id:
        given = item.model_extra or {}
        name = str(given.get("name") or item.type.removesuffix("_call"))
        found = {field: given[field] for field in CALLED if field in given}
        arguments = json.dumps(found, ensure_ascii=False)
    else:
        return None
    return new_call(name, arguments, item.call_id)


class OutputItem(Item):
    """An item of the output."""

    def __init__(self, kind: Kind, index: int, call: dict[str, Any] | None) -> None:
        super().__init__(kind, index, call)
        prefix, self._type, self._stream = KINDS[kind]
        self._id = new_id(prefix)

    def document(self, is_cut: bool) -> dict[str, Any]:
        return self._with("incomplete" if is_cut else "completed")

    def added(self) -> Iterator[Event]:
        yield self._item_event("added", "in_progress")
        if self.call is None:
            yield self._event("content_part.added", part=self._part())

    def delta(self, text: str) -> Iterator[Event]:
        if text:
            yield self._text_event("delta", delta=text)

    def done(self, is_cut: bool) -> Iterator[Event]:
        if self.call is None:
            yield self._text_event("done", text=self.text)
            yield self._event("content_part.done", part=self._part())
        else:
            name = self.call["function"]["name"]
            yield self._text_event("done", name=name, arguments=self.text)
        yield self._item_event("done", "incomplete" if is_cut else "completed")

    def _with(self, status: str) -> dict[str, Any]:
        """An item in progress has no content yet."""
        head: dict[str, Any] = {"id": self._id, "type": self._type, "status": status}
        if self.call is not None:
            about = {"call_id": self.call["id"], "name": self.call["function"]["name"]}
            return {**head, **about, "arguments": self.text}
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "text" else {"summary": []}
        return {**head, **own, "content": [] if status == "in_progress" else [self._part()]}

    def _part(self) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind == "text" else {}
        return {"type": self._stream, "text": self.text, **more}

    def _item_event(self, name: str, status: str) -> Event:
        about = {"output_index": self.index, "item": self._with(status)}
        return {"type": f"response.output_item.{name}", **about}

    def _text_event(self, name: str, /, **fields: Any) -> Event:
        event = self._event(f"{self._stream}.{name}", **fields)
        return event | ({"logprobs": []} if self.kind == "text" else {})

    def _event(self, name: str, /, **fields: Any) -> Event:
        place: dict[str, Any] = {"item_id": self._id, "output_index": self.index}
        place |= {"content_index": 0} if self.call is None else {}
        return {"type": f"response.{name}", **place, **fields}


class ResponseWriter(ItemWriter):
    """A response in progress."""

    after_last = after_error = DONE
    item_type = OutputItem
    has_empty_text = True

    def __init__(self, found: Prepared, token_bytes: TokenBytes, count: Count) -> None:
        super().__init__(found, count)
        self._num_events = 0
        self._response: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **found.own,
            "top_logprobs": 0,
            "truncation": "disabled",
            "service_tier": "default",
            "max_tool_calls": None,
            "previous_response_id": None,
            "background": False,
            "store": False,
        }

    def _sent(self, events: Iterable[Event]) -> AsyncIterator[str]:
        """The events as text, with their numbers."""
        return super()._sent(map(self._numbered, events))

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _first_events(self) -> Iterator[Event]:
        yield self._state("created")
        yield self._state("in_progress")

    async def _document(self) -> dict[str, Any]:
        (event,) = await self._last_events()
        return event["response"]  # type: ignore[no-any-return]

    async def _last_events(self) -> list[Event]:
        is_cut = self._choice.finish_reason == "length"
        changed: dict[str, Any] = {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "usage": await self._usage("input", "output"),
            **self._statistics(),
        }
        return [self._state("incomplete" if is_cut else "completed", **changed)]

    def _failed(self, error: ApiError) -> Iterator[Event]:
        """The error, also at the top as OpenAI has it, and the response."""
        found = error.body["error"]
        names = {name: found[name] for name in ("code", "message", "param")}
        yield from self._close(is_cut=True)
        yield {"type": "error", **names, "error": found}
        code = error.code or found["type"]
        yield self._state("failed", error={"code": code, "message": error.message})

    def _state(self, name: str, **changed: Any) -> Event:
        """The event of this name, with the response as it is now."""
        status = "in_progress" if name == "created" else name
        self._response |= {"status": status, "output": [*self._items], **changed}
        return {"type": f"response.{name}", "response": {**self._response}}


ROUTE = Route(ResponsesRequest.route, ResponsesRequest, _prepared, ResponseWriter)
COUNT_ROUTE = Route(f"{ResponsesRequest.route}/input_tokens", ResponsesRequest, _count_tokens)
