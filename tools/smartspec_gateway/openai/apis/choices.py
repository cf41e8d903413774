"""What a request wants of its answer, and what was generated of a choice so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smartspec_gateway.openai.apis.schema import Generation
from smartspec_gateway.openai.formats.call_grammar import CallFormat
from smartspec_gateway.openai.formats.calls import Tools
from smartspec_gateway.openai.formats.harmony import HarmonyParser
from smartspec_gateway.openai.formats.reasoning import ReasoningParser, Start, parser_of
from smartspec_gateway.openai.formats.tools import ForcedCallParser, Part, ToolParser
from smartspec_gateway.openai.logprobs import LogProbs
from smartspec_gateway.openai.model import Fields, Piece

FINISH_REASONS = {"stop": "stop", "length": "length", "deadline": "length"}
"""OpenAI has no name for a deadline."""

MANY = 1 << 30


@dataclass(frozen=True)
class Wanted:
    """What of a request its answer depends on. Most fields have the names of the request's.
    forced_format: that of an answer that can be nothing but tool calls, else None."""

    n: int
    token_limit: int | None
    num_top_log_probs: int | None
    tools: Tools
    forced_format: CallFormat | None
    has_one_call: bool
    streams_usage: bool
    includes_usage: bool
    shows_steps: bool

    @classmethod
    def of(cls, asked: Generation, call_format: CallFormat) -> Wanted:
        """call_format: that of the model."""
        return cls(
            asked.n,
            asked.token_limit,
            asked.num_top_log_probs,
            asked.tool_types,
            call_format if asked.must_call else None,
            asked.has_one_call,
            asked.streams_usage,
            bool(asked.stream_options and asked.stream_options.include_usage),
            asked.return_spec_metrics == "detailed",
        )


@dataclass(frozen=True)
class Prepared:
    """A request to generate. model: the name in the answer. num_prompt: tokens, by prompt. start:
    where the answers begin; None if they have no reasoning blocks. own: what only the writer of its
    API reads. ignored: unknown fields. max_tokens: if it is less than was asked for, or without a
    limit less than the rest of the context."""

    choices: list[Fields]
    wanted: Wanted
    model: str
    num_prompt: list[int]
    grammar_field: str
    stream: bool
    start: Start | None = None
    own: Any = None
    ignored: Sequence[str] = ()
    max_tokens: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What of the request had no effect."""
        found = {"x-ignored-fields": ", ".join(self.ignored)} if self.ignored else {}
        limit = {} if self.max_tokens is None else {"x-max-tokens": str(self.max_tokens)}
        return found | limit


@dataclass
class Choice:
    """A choice so far, and what is new since the last `take`."""

    parser: ToolParser | ForcedCallParser | None
    max_calls: int
    reasoning_parser: ReasoningParser | HarmonyParser | None = None
    echo: str = ""
    log_probs: LogProbs | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    """All of it."""

    new_reasoning: str = ""
    new_parts: list[Part] = field(default_factory=list)
    num_calls: int = 0
    has_begun: bool = False

    @classmethod
    def of(
        cls,
        asked: Wanted,
        start: Start | None = None,
        echo: str = "",
        log_probs: LogProbs | None = None,
    ) -> Choice:
        """A choice of this request. start: None if it has no reasoning blocks."""
        parser: ToolParser | ForcedCallParser | None = None
        max_calls = MANY
        if asked.forced_format in (CallFormat.HERMES, CallFormat.LLAMA):
            parser = ForcedCallParser()
        elif asked.tools:
            parser = ToolParser(asked.tools)
            max_calls = 1 if asked.has_one_call else MANY
        return cls(
            parser,
            max_calls,
            None if start is None else parser_of(start, asked.tools),
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
            self.reasoning += reasoning
        found = [text] if self.parser is None else self.parser.feed(text)
        if piece.finish_reason:
            if self.parser is not None:
                found += self.parser.finish()
            self.finish_reason = FINISH_REASONS[piece.finish_reason]
        for part in found:
            self._add_part(part)
        if piece.log_probs is not None and self.log_probs is not None:
            self.log_probs.add_prompt(piece.log_probs.get("prompt", []))
            self.log_probs.add(piece.log_probs.get("output", []))
        if self.finish_reason == "stop" and not self.has_open_call and self.num_calls:
            self.finish_reason = "tool_calls"

    def take(self) -> tuple[str, list[Part]]:
        """The reasoning that is new, and the texts and the parts of calls after it, in their order.
        Each call begins with a part that has its id, its name and no arguments. All parts of calls
        have the number of their call."""
        reasoning, parts = self.new_reasoning, self.new_parts
        self.new_reasoning, self.new_parts = "", []
        return reasoning, parts

    def _add_part(self, part: Part) -> None:
        if isinstance(part, str):
            before = self.new_parts[-1] if self.new_parts else None
            if isinstance(before, str):
                self.new_parts[-1] = before + part
            elif part:
                self.new_parts.append(part)
            return
        function = part["function"]
        if "id" in part:
            if self.num_calls == self.max_calls:
                return
            self.num_calls += 1
            begin = {**part, "function": {**function, "arguments": ""}}
            self.new_parts.append({"index": self.num_calls - 1, **begin})
        if text := function["arguments"]:
            more = {"index": self.num_calls - 1, "function": {"arguments": text}}
            self.new_parts.append(more)


def text_of(parts: Iterable[Part]) -> str:
    """All that is no call."""
    return "".join(part for part in parts if isinstance(part, str))
