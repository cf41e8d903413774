"""`/v1/responses`: a request becomes one for chats, and its pieces become a response and events.

A response has items: reasoning, a message, and function calls, in the order in which they were
generated. An item with text is open until another item begins or the text ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Literal

from smartspec_gateway.openai.chat_schema import ChatRequest, add_thought, check_calls
from smartspec_gateway.openai.choices import Choice
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.json_parts import Encoded
from smartspec_gateway.openai.media import with_markers
from smartspec_gateway.openai.model import Piece
from smartspec_gateway.openai.responses_schema import (
    NAMES,
    CallItem,
    CallOutputItem,
    MessageItem,
    NamedTool,
    OtherItem,
    ReasoningItem,
    ResponsesRequest,
    Text,
    ToolChoice,
)
from smartspec_gateway.openai.schema import Sampling
from smartspec_gateway.openai.validation import validated
from smartspec_gateway.openai.writer import DONE, Event, Writer, new_id

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

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""The kind of content of an item, by the type of the item."""


def chat_of(asked: ResponsesRequest) -> ChatRequest:
    """The same request to chats. Raises ApiError."""
    body = asked.model_dump(include=SAME, exclude_unset=True)
    body["messages"] = _messages(asked)
    check_calls(body["messages"], "input", "items function_call")
    if asked.input and not body["messages"]:
        raise ApiError(400, "input: must have a message", "input")
    body["max_completion_tokens"] = asked.max_output_tokens
    body["reasoning_effort"] = asked.reasoning and asked.reasoning.effort
    own = {"type", "defer_loading"}
    body["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude=own, exclude_none=True)}
        for tool in asked.functions
    ]
    body["tool_choice"] = choice = asked.tool_choice
    if isinstance(choice, ToolChoice):
        body["tool_choice"] = _tool_choice(choice)
    schema = format_of(asked)
    kind = schema.pop("type")
    if kind == "text" and schema:
        field = f"text.format.{next(iter(schema))}"
        raise ApiError(400, f"{field}: only with the type json_schema", field)
    if kind != "text":
        body["response_format"] = {"type": kind, **({"json_schema": schema} if schema else {})}
    return validated(ChatRequest, body)


def head_of(asked: ResponsesRequest, model: str) -> dict[str, Encoded]:
    """What the response has of its request, as JSON."""
    chosen = asked.tool_choice
    named = isinstance(chosen, ToolChoice) and chosen.model_dump(exclude_none=True)
    found = {
        "model": model,
        **{name: getattr(asked, name) for name in ECHOED},
        "reasoning": asked.reasoning and asked.reasoning.model_dump(),
        "text": {"format": format_of(asked)},
        "tools": [tool.model_dump() for tool in asked.functions],
        "tool_choice": named or asked.tool_choice or "auto",
        "metadata": asked.metadata or {},
    }
    return {name: Encoded(json.dumps(value, ensure_ascii=False)) for name, value in found.items()}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    """As chats have it."""
    if choice.type == "function":
        return {"type": choice.type, "function": {"name": choice.name}}
    names = [tool.name for tool in choice.tools or [] if isinstance(tool, NamedTool)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}


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
            found[-1]["content"] = _text(item.content)
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
        return {"tool_call_id": item.call_id, "content": _text(item.output)}
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
    function = {"name": name, "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(content: Text) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


@dataclass
class OpenCall:
    """A function call to which arguments are added. head: its fields without them."""

    head: dict[str, Any]
    index: int
    text: str = ""

    def item(self, status: str) -> dict[str, Any]:
        return {**self.head, "status": status, "arguments": self.text}

    def added(self) -> Iterator[Event]:
        yield _item_event("added", self.index, self.item("in_progress"))

    def delta(self, text: str) -> Event:
        return self._event("delta", delta=text)

    def done(self) -> Iterator[Event]:
        yield self._event("done", arguments=self.text)

    def _event(self, name: str, **fields: Any) -> Event:
        place = {"item_id": self.head["id"], "output_index": self.index}
        return {"type": f"response.function_call_arguments.{name}", **place, **fields}


@dataclass
class OpenItem:
    """An item to which text is added."""

    kind: Literal["message", "reasoning"]
    id: str
    index: int
    text: str = ""

    def item(self, status: str) -> dict[str, Any]:
        """An item in progress has no content yet."""
        content = [] if status == "in_progress" else [self.part(self.text)]
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self.id, "type": self.kind, "status": status, **own, "content": content}

    def part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": PARTS[self.kind], "text": text}
        return part | ({"annotations": [], "logprobs": []} if self.kind == "message" else {})

    def added(self) -> Iterator[Event]:
        yield _item_event("added", self.index, self.item("in_progress"))
        yield self.event("content_part.added", part=self.part(""))

    def delta(self, text: str) -> Event:
        return self.text_event("delta", delta=text)

    def done(self) -> Iterator[Event]:
        yield self.text_event("done", text=self.text)
        yield self.event("content_part.done", part=self.part(self.text))

    def event(self, name: str, **fields: Any) -> Event:
        place = {"item_id": self.id, "output_index": self.index, "content_index": 0}
        return {"type": f"response.{name}", **place, **fields}

    def text_event(self, name: str, **fields: Any) -> Event:
        event = self.event(f"{PARTS[self.kind]}.{name}", **fields)
        return event | ({"logprobs": []} if self.kind == "message" else {})


class ResponseWriter(Writer):
    """A response in progress."""

    names = NAMES
    after_last = after_error = DONE

    def __init__(
        self,
        head: Mapping[str, Any],
        num_prompt: int,
        choice: Choice,
        count: Callable[[str], Awaitable[int]],
    ) -> None:
        """head: see `head_of`. num_prompt: tokens. count: the tokens of reasoning."""
        super().__init__([choice], num_prompt)
        self._choice, self._count = choice, count
        self._output: list[dict[str, Any]] = []
        self._open: OpenItem | OpenCall | None = None
        self._reasoning = ""
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
            **head,
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

    def _of_piece(self, number: int, piece: Piece) -> Iterator[Event]:
        choice = self._add(number, piece)
        reasoning, text, calls = choice.take()
        self._reasoning += reasoning
        if reasoning:
            yield from self._add_text("reasoning", reasoning)
        if text or (choice.finish_reason and not (self._output or self._open or calls)):
            yield from self._add_text("message", text)
        for call in calls:
            if "id" in call:
                yield from self._close("completed")
                head = {"id": new_id("fc_"), "type": "function_call", "call_id": call["id"]}
                head["name"] = call["function"]["name"]
                yield from self._begin(OpenCall(head, len(self._output)))
            yield from self._extend(call["function"]["arguments"])
        if choice.finish_reason:
            is_cut = choice.finish_reason == "length"
            if isinstance(self._open, OpenCall):
                is_cut = choice.has_open_call
            yield from self._close("incomplete" if is_cut else "completed")

    def _add_text(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[Event]:
        """Text for the open item, or for a new one if that has another kind."""
        found = self._open
        if not isinstance(found, OpenItem) or found.kind != kind:
            yield from self._close("completed")
            prefix = "msg_" if kind == "message" else "rs_"
            yield from self._begin(OpenItem(kind, new_id(prefix), len(self._output)))
        yield from self._extend(text)

    def _begin(self, item: OpenItem | OpenCall) -> Iterator[Event]:
        self._open = item
        yield from item.added()

    def _extend(self, text: str) -> Iterator[Event]:
        """Text for the open item."""
        if text and self._open is not None:
            self._open.text += text
            yield self._open.delta(text)

    def _close(self, status: str) -> Iterator[Event]:
        found, self._open = self._open, None
        if found is not None:
            yield from found.done()
            self._output.append(found.item(status))
            yield _item_event("done", found.index, self._output[-1])

    async def _document(self) -> dict[str, Any]:
        (event,) = await self._last_events()
        return event["response"]  # type: ignore[no-any-return]

    async def _last_events(self) -> list[Event]:
        usage = self._usage("input", "output")
        num_reasoning = await self._count(self._reasoning)
        usage["output_tokens_details"] = {"reasoning_tokens": num_reasoning}
        is_cut = self._choice.finish_reason == "length"
        changed: dict[str, Any] = {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "usage": usage,
            **self._statistics(),
        }
        return [self._state("incomplete" if is_cut else "completed", **changed)]

    def _failed(self, error: ApiError) -> Iterator[Event]:
        """The error, also at the top as OpenAI has it, and the response."""
        found = error.body["error"]
        names = {name: found[name] for name in ("code", "message", "param")}
        yield from self._close("incomplete")
        yield {"type": "error", **names, "error": found}
        code = error.code or found["type"]
        yield self._state("failed", error={"code": code, "message": error.message})

    def _state(self, name: str, **changed: Any) -> Event:
        """The event of this name, with the response as it is now."""
        status = "in_progress" if name == "created" else name
        self._response |= {"status": status, "output": [*self._output], **changed}
        return {"type": f"response.{name}", "response": {**self._response}}


def _item_event(name: str, index: int, item: dict[str, Any]) -> Event:
    return {"type": f"response.output_item.{name}", "output_index": index, "item": item}
