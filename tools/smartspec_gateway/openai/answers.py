"""Writes answers and chunks in OpenAI's formats."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from smartspec_gateway.openai.call_grammar import CallFormat
from smartspec_gateway.openai.calls import Tools
from smartspec_gateway.openai.chat_schema import ChatRequest
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.json_parts import parts, sliced
from smartspec_gateway.openai.logprobs import LogProbs, OfChat, OfText, TokenBytes
from smartspec_gateway.openai.model import Piece
from smartspec_gateway.openai.reasoning import ReasoningParser
from smartspec_gateway.openai.schema import Generation
from smartspec_gateway.openai.tools import ForcedCallParser, Found, ToolParser

FINISH_REASONS = {"stop": "stop", "length": "length", "deadline": "length"}
"""OpenAI has no name for a deadline."""

MANY = 1 << 30

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters that JSON may contain, and at which some clients would split an event."""


@dataclass(frozen=True)
class Wanted:
    """What of a request its answer depends on. Most fields have the names of the request's.
    forced_format: that of an answer that can be nothing but tool calls, else None."""

    is_chat: bool
    n: int
    token_limit: int | None
    num_top_log_probs: int | None
    tools: Tools
    forced_format: CallFormat | None
    parallel_tool_calls: bool
    streams_usage: bool
    shows_steps: bool

    @classmethod
    def of(cls, asked: Generation, call_format: CallFormat) -> Wanted:
        """call_format: that of the model."""
        is_chat = isinstance(asked, ChatRequest)
        return cls(
            is_chat,
            asked.n,
            asked.token_limit,
            asked.num_top_log_probs,
            asked.tool_types,
            call_format if isinstance(asked, ChatRequest) and asked.must_call else None,
            not isinstance(asked, ChatRequest) or asked.parallel_tool_calls,
            asked.streams_usage,
            asked.return_spec_metrics == "detailed",
        )


@dataclass
class Choice:
    """A choice so far, and what is new since the last `take`."""

    parser: ToolParser | ForcedCallParser | None
    max_calls: int
    reasoning_parser: ReasoningParser | None = None
    echo: str = ""
    log_probs: LogProbs | None = None
    finish_reason: str | None = None
    new_text: str = ""
    new_reasoning: str = ""
    new_calls: list[dict[str, Any]] = field(default_factory=list)
    num_calls: int = 0
    has_begun: bool = False

    @classmethod
    def of(
        cls,
        asked: Wanted,
        is_in_reasoning: bool | None = None,
        echo: str = "",
        log_probs: LogProbs | None = None,
    ) -> Choice:
        """A choice of this request. is_in_reasoning: None if the model has no reasoning blocks."""
        parser: ToolParser | ForcedCallParser | None = None
        max_calls = MANY
        if asked.forced_format in (CallFormat.HERMES, CallFormat.LLAMA):
            parser = ForcedCallParser()
        elif asked.tools:
            parser = ToolParser(asked.tools)
            max_calls = MANY if asked.parallel_tool_calls else 1
        return cls(
            parser,
            max_calls,
            None if is_in_reasoning is None else ReasoningParser(is_in_reasoning),
            echo,
            log_probs,
        )

    @property
    def has_open_call(self) -> bool:
        """Whether the arguments of the last call are not complete."""
        return isinstance(self.parser, ForcedCallParser) and self.parser.is_open

    def add(self, piece: Piece) -> None:
        text = piece.text_output
        if self.reasoning_parser is not None:
            reasoning, text = self.reasoning_parser.feed(text, bool(piece.finish_reason))
            self.new_reasoning += reasoning
        found = Found(text) if self.parser is None else self.parser.feed(text)
        if piece.finish_reason:
            if self.parser is not None:
                found.add(self.parser.finish())
            self.finish_reason = FINISH_REASONS[piece.finish_reason]
        self.new_text += found.content
        self.new_calls += found.calls[: self.max_calls - self.num_calls - len(self.new_calls)]
        if piece.log_probs is not None and self.log_probs is not None:
            self.log_probs.add(piece.log_probs.get("prompt", []))
            self.log_probs.add(piece.log_probs.get("output", []))
        if (
            self.finish_reason == "stop"
            and not self.has_open_call
            and (self.num_calls + len(self.new_calls))
        ):
            self.finish_reason = "tool_calls"

    def take(self) -> tuple[str, str, list[dict[str, Any]]]:
        """The reasoning, the text and the calls that are new."""
        found = self.new_reasoning, self.new_text, self.new_calls
        self.new_reasoning, self.new_text, self.new_calls = "", "", []
        self.num_calls += sum("id" in call for call in found[2])
        return found


class Answer:
    """An answer in progress."""

    def __init__(
        self,
        asked: Wanted,
        model: str,
        num_tokens: Sequence[int],
        echoes: Sequence[tuple[str, int | None]],
        token_bytes: TokenBytes,
        is_in_reasoning: bool | None = None,
    ) -> None:
        """num_tokens: by prompt. echoes: by prompt, its text and its first token if it has
        log-probabilities; or empty. is_in_reasoning: None if the model has no reasoning blocks.
        Choice i belongs to prompt i // asked.n."""
        self._asked, self._token_bytes = asked, token_bytes
        self._is_chat = asked.is_chat
        self._has_tools = bool(asked.tools)
        self._choices = [
            Choice.of(asked, is_in_reasoning, echo, self._log_probs(first))
            for echo, first in (echoes or [("", None)] * len(num_tokens))
            for _ in range(asked.n)
        ]
        self._num_prompt, self._num_tokens = sum(num_tokens), 0
        self._num_cached = 0
        self._metrics: str | None = None
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._document = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        chunk = {**self._document, "object": f"{kind}.chunk" if self._is_chat else kind}
        self._chunk_head = f"data: {json.dumps(chunk)[:-1]}, "

    def add(self, number: int, piece: Piece) -> None:
        if self._asked.token_limit == 0:  # the model has generated one token
            logs = piece.log_probs and {"prompt": piece.log_probs.get("prompt", [])}
            reason = piece.finish_reason and "length"
            piece = replace(
                piece, text_output="", num_output_tokens=0, log_probs=logs, finish_reason=reason
            )
        self._choices[number].add(piece)
        self._num_tokens += piece.num_output_tokens
        if number % self._asked.n == 0:  # the other choices have the same prompt
            self._num_cached += piece.num_cached_tokens
        if piece.finish_reason and number == 0:
            self._metrics = piece.metrics

    def whole(self) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choices = [self._take(number, "message") for number in range(len(self._choices))]
        return {**self._document, "choices": choices, **self._totals()}

    def event(self, number: int, piece: Piece) -> Iterator[str]:
        """Add the piece, and return its event in parts."""
        self.add(number, piece)
        choice = self._take(number, "delta")
        if self._asked.shows_steps:
            choice["speculation"] = self._step(piece)
        usage = f', "usage": {json.dumps(self._usage())}' if self._asked.streams_usage else ""
        yield f'{self._chunk_head}"choices": ['
        yield from (part.translate(LINE_ENDS) for part in parts(choice))
        yield f"]{usage}}}\n\n"

    def last_event(self, with_usage: bool) -> str:
        """The event with the token counts and statistics; empty if neither is wanted."""
        if not with_usage and self._metrics is None:
            return ""
        return f'{self._chunk_head}"choices": [], {json.dumps(self._totals())[1:]}\n\n'

    def _totals(self) -> dict[str, Any]:
        """Token counts, and vLLM's document `metrics` if the model sent one."""
        metrics = {"metrics": json.loads(self._metrics)} if self._metrics else {}
        return {"usage": self._usage(), **metrics}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    def _take(self, number: int, key: str) -> dict[str, Any]:
        """The choice with what is new in it."""
        choice = self._choices[number]
        is_first, choice.has_begun = not choice.has_begun, True
        text, choice.new_text = choice.new_text, ""
        content: dict[str, Any] = {"text": choice.echo + text if is_first else text}
        if self._is_chat:
            content = {key: self._message(choice, text, is_first, key == "delta")}
        return {
            "index": number,
            **content,
            "logprobs": choice.log_probs and choice.log_probs.take(),
            "finish_reason": choice.finish_reason,
        }

    def _message(self, choice: Choice, text: str, is_first: bool, is_delta: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant"} if is_first else {}
        reasoning, choice.new_reasoning = choice.new_reasoning, ""
        if reasoning:
            found["reasoning_content"] = reasoning
        calls: list[dict[str, Any]] = []
        for call in choice.new_calls:
            choice.num_calls += "id" in call
            if is_delta:
                calls.append({"index": choice.num_calls - 1, **call})
            elif "id" in call:
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        choice.new_calls = []
        if text or not (reasoning or self._has_tools):
            found["content"] = text
        elif not is_delta:
            found["content"] = None if calls else ""
        return found | ({"tool_calls": calls} if calls else {})

    def _log_probs(self, first: int | None) -> LogProbs | None:
        if self._asked.num_top_log_probs is None:
            return None
        return OfChat(self._token_bytes) if self._is_chat else OfText(self._token_bytes, first)

    def _step(self, piece: Piece) -> dict[str, Any]:
        texts = [self._token_bytes(token).decode(errors="replace") for token in piece.output_ids]
        return {
            "num_tokens": piece.num_output_tokens,
            "num_steps": piece.num_steps,
            "num_drafted": piece.total_draft_tokens,
            "num_accepted": piece.total_accepted_draft_tokens,
            "proposer": piece.proposer or None,
            "tokens": texts,
        }


async def events(
    answer: Answer, pieces: AsyncIterator[tuple[int, Piece]], first: tuple[int, Piece], usage: bool
) -> AsyncIterator[str]:
    """The server-sent events of a streamed answer. first: a piece that was already read."""
    async with aclosing(pieces):  # type: ignore[type-var]
        try:
            async for part in sliced(answer.event(*first)):
                yield part
            async for found in pieces:
                async for part in sliced(answer.event(*found)):
                    yield part
            yield answer.last_event(usage) + "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"
