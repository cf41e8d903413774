"""`/v1/messages`: a request becomes one for chats, and its pieces become a message and events.

A message has blocks: thinking, text and tool use, in the order in which they were generated. A
block is open until another one begins or the text ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from smartspec_gateway.openai.apis.chat_schema import ChatRequest, add_thought, check_calls
from smartspec_gateway.openai.apis.choices import Choice, Prepared
from smartspec_gateway.openai.apis.messages_schema import (
    AnthropicMessage,
    BlockText,
    MessagesPrompt,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.apis.schema import Sampling
from smartspec_gateway.openai.apis.validation import validated
from smartspec_gateway.openai.apis.writer import Count, Event, Item, ItemWriter, new_id
from smartspec_gateway.openai.errors import KINDS, ApiError, PromptTooLong
from smartspec_gateway.openai.formats.calls import new_call
from smartspec_gateway.openai.logprobs import TokenBytes
from smartspec_gateway.openai.model import Piece
from smartspec_gateway.openai.surrogates import without_escaped_surrogates

SAME = Sampling.model_fields.keys() | {"max_tokens", "return_spec_metrics"}
"""Fields that chats have with the same meaning."""

BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""Types of blocks by the role of their message."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}

BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""A line that Claude Code puts before the system prompt. It differs in each request, so no prefix
could be reused behind it."""

ERROR_TYPES = {
    **KINDS,
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""By the kind of a block: the type and the field of its deltas."""


def chat_of(asked: MessagesPrompt) -> ChatRequest:
    """The same request to chats. Raises ApiError."""
    same = SAME & type(asked).model_fields.keys()
    body = asked.model_dump(include=same, exclude_unset=True)
    messages = _messages(asked)
    check_calls(messages, "messages", "blocks tool_use")
    body["messages"] = list(map(_joined, messages))
    if messages[-1]["role"] == "assistant" and messages[-1]["content"]:
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(asked, MessagesRequest):
        body["stop"] = asked.stop_sequences
    body["tools"] = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            },
        }
        for tool in asked.tools or []
    ]
    body |= _tool_choice(asked)
    thinks = asked.thinking is not None and asked.thinking.type != "disabled"
    thinking = {"enable_thinking": thinks}
    body["chat_template_kwargs"] = thinking | (asked.chat_template_kwargs or {})
    body["reasoning_effort"] = asked.output_config and asked.output_config.effort
    if asked.output_config and asked.output_config.format:
        schema = {"name": "output", "schema": asked.output_config.format.schema_}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return validated(ChatRequest, body)


def _prepared(requests: Requests, asked: MessagesRequest) -> Prepared:
    chat = chat_of(asked)
    found = requests.of_chat(chat, own=chat.stop_words, ignored=asked.ignored)
    if chat.stop_words:
        found.choices[0]["return_output_ids"] = True  # they tell which one ended the text
    return found


def _count_tokens(requests: Requests, asked: MessagesPrompt) -> dict[str, Any]:
    return {"input_tokens": requests.num_prompt_tokens(chat_of(asked))}


def error_document(error: ApiError) -> dict[str, Any]:
    """In Anthropic's format. At its words for a long prompt, Claude Code makes the conversation
    shorter."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else ERROR_TYPES[400])
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.most} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _tool_choice(asked: MessagesPrompt) -> dict[str, Any]:
    """As chats have it."""
    choice = asked.tool_choice
    if choice is None:
        return {}
    if choice.type == "any" and not asked.tools:
        field = "tool_choice.type"
        message = f"{field}: got 'any', must be 'auto' or 'none' without tools"
        raise ApiError(400, message, field)
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": CHOICES.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _messages(asked: MessagesPrompt) -> list[dict[str, Any]]:
    """Results of tools become messages of their own. Many chat templates want the user and the
    assistant to alternate, so that messages of one role that follow each other become one."""
    found: list[dict[str, Any]] = []
    system = [_part(_without_billing(part["text"])) for part in _parts(asked.system or "")]
    if system := [part for part in system if part["text"]]:
        found.append({"role": "system", "content": system})
    for number, message in enumerate(asked.messages):
        _check_blocks(number, message)
        if isinstance(message.content, str):
            _open(found, message.role)["content"] += _parts(message.content)
            continue
        if not any(isinstance(block, ToolResultBlock) for block in message.content):
            _open(found, message.role)
        for block in message.content:
            if isinstance(block, TextBlock):
                _open(found, message.role)["content"] += _parts([block])
            elif isinstance(block, ToolUseBlock):
                _open(found, message.role).setdefault("tool_calls", []).append(_call(block))
            elif isinstance(block, ToolResultBlock):
                found.append(_result(block))
            elif isinstance(block, ThinkingBlock) and block.thinking:
                add_thought(_open(found, message.role), block.thinking)
    return found


def _open(found: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message if it has this role, or a new one."""
    if not found or found[-1]["role"] != role:
        found.append({"role": role, "content": []})
    return found[-1]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """With its parts as one text, because several messages can have more than one may have."""
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def _check_blocks(number: int, message: AnthropicMessage) -> None:
    known = BLOCKS[message.role]
    blocks = [] if isinstance(message.content, str) else message.content
    for index, block in enumerate(blocks):
        if block.type not in known:
            field = f"messages.{number}.content.{index}.type"
            allowed = f"{' or '.join(map(repr, known))} in a message of the {message.role}"
            raise ApiError(400, f"{field}: got {block.type!r}, must be {allowed}", field)


def _parts(content: BlockText) -> list[dict[str, str]]:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return list(map(_part, texts))


def _without_billing(text: str) -> str:
    found = BILLING.match(text)
    return text[found.end() :] if found else text


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return new_call(block.name, json.dumps(block.input, ensure_ascii=False), block.id)


def _result(block: ToolResultBlock) -> dict[str, Any]:
    """Chats have no field for errors of tools, so that the text says it."""
    parts = _parts(block.content)
    if block.is_error:
        first = parts[0]["text"] if parts else ""
        parts = [_part(f"Error: {first}"), *parts[1:]]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts}


class StopFinder:
    """Finds the stop word that ended a text. The text ends before it, and its tokens have it. One
    that ends within the first `min_tokens` tokens ended nothing."""

    def __init__(self, words: Sequence[str], token_bytes: TokenBytes, min_tokens: int = 0) -> None:
        self._words = {word: word.encode() for word in words}
        self._token_bytes = token_bytes
        self._num_ignored = min_tokens
        self._longest = max(map(len, self._words.values()), default=0)
        self._tokens: list[bytes] = []

    def add(self, piece: Piece) -> None:
        if self._longest:
            self._num_ignored -= len(piece.output_ids)
            self._tokens += map(self._token_bytes, piece.output_ids)
            self._tokens = self._tokens[-self._longest - 1 :]

    def find(self) -> str | None:
        """The first word in the text that the last token completes."""
        if not self._tokens or self._num_ignored >= 0:
            return None
        text = b"".join(self._tokens)
        num_before = len(text) - len(self._tokens[-1])
        places = {
            word: text.find(shown, max(0, num_before - len(shown) + 1))
            for word, shown in self._words.items()
        }
        found = [word for word in places if places[word] >= 0]
        return min(found, key=lambda word: places[word], default=None)


class Block(Item):
    """A block of the message."""

    def document(self, is_cut: bool = False) -> dict[str, Any]:
        if self.call is not None:
            head = {"type": "tool_use", "id": self.call["id"]}
            return {**head, "name": self.call["function"]["name"], "input": _input(self.text)}
        if self.kind == "reasoning":
            return {"type": "thinking", "thinking": self.text, "signature": ""}
        return {"type": "text", "text": self.text}

    def added(self) -> Iterator[Event]:
        yield self._event("start", content_block=self.document())

    def delta(self, text: str) -> Iterator[Event]:
        kind, name = DELTAS[self.kind]
        yield self._event("delta", delta={"type": kind, name: text})

    def done(self, is_cut: bool) -> Iterator[Event]:
        if self.kind == "reasoning":
            yield self._event("delta", delta={"type": "signature_delta", "signature": ""})
        yield self._event("stop")

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"content_block_{name}", "index": self.index, **fields}


class MessageWriter(ItemWriter):
    """A message in progress."""

    item_type = Block
    has_empty_text = False
    idle = 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, found: Prepared, token_bytes: TokenBytes, count: Count) -> None:
        """token_bytes: of a token in the middle of a text."""
        super().__init__(found, count)
        self._model, self._id = found.model, new_id("msg_")
        num_ignored = found.choices[0].get("min_tokens", 0)
        self._stops = StopFinder(found.own, token_bytes, num_ignored)

    def _first_events(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message()}

    def _add(self, number: int, piece: Piece) -> Choice:
        self._stops.add(piece)
        return super()._add(number, piece)

    async def _last_events(self) -> list[Event]:
        last = {"type": "message_delta", "delta": self._stopped(), **await self._totals()}
        return [last, {"type": "message_stop"}]

    async def _document(self) -> dict[str, Any]:
        return {**self._message(), **self._stopped(), **await self._totals()}

    def _failed(self, error: ApiError) -> Iterator[Event]:
        yield error_document(error)

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [*self._items],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._tokens(),
        }

    def _stopped(self) -> dict[str, Any]:
        reason = self._choice.finish_reason or "stop"
        word = self._stops.find() if reason == "stop" else None
        return {
            "stop_reason": STOP_REASONS[reason] if word is None else "stop_sequence",
            "stop_sequence": word,
        }

    async def _totals(self) -> dict[str, Any]:
        details = {"thinking_tokens": await self._num_reasoning()}
        usage = {**self._tokens(), "output_tokens_details": details}
        return {"usage": usage, **self._statistics()}

    def _tokens(self) -> dict[str, Any]:
        """`input_tokens` are those that were not cached; until the end, all count as such."""
        return {
            "input_tokens": self._num_prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_tokens,
        }


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object. Those that were cut lose their unfinished end, as in the streams of
    Anthropic's clients."""
    text = without_escaped_surrogates(arguments)
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:  # nothing yet, or nested too deep
        found = {}
    return found if isinstance(found, dict) else {}


ROUTE = Route(
    MessagesRequest.route, MessagesRequest, _prepared, MessageWriter, error=error_document
)
COUNT_ROUTE = Route(
    f"{MessagesRequest.route}/count_tokens", MessagesPrompt, _count_tokens, error=error_document
)
