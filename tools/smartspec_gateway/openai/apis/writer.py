"""Writes an answer, whole or as server-sent events: what all APIs share."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from itertools import chain
from typing import Any, ClassVar, Literal

from smartspec_gateway.openai.apis.choices import Choice, Prepared
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.json_parts import parts, sliced
from smartspec_gateway.openai.model import Arrival, Piece

Event = dict[str, Any]
Count = Callable[[str], Awaitable[int]]
Kind = Literal["reasoning", "text", "call"]

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters that JSON may contain, and at which some clients would split an event."""

DONE = "data: [DONE]\n\n"

IDLE = ": the request is open\n\n"
"""A comment, which clients skip. It is sent while nothing else comes, for example while a long
prompt is read. Without it, clients and proxies would take the connection for dead."""


class Writer(ABC):
    """An answer in progress. Streamed or not, the same pieces are added."""

    idle: ClassVar[str] = IDLE
    """What is sent while nothing else comes."""

    after_last = ""
    """What follows the last event of a stream."""

    after_error = ""

    def __init__(self, found: Prepared, choices: Sequence[Choice], count: Count) -> None:
        """choices: new ones, with n for each prompt. count: the tokens of generated text."""
        self._choices, self._num_per_prompt = choices, found.wanted.n
        self._num_prompt, self._count = sum(found.num_prompt), count
        self._num_tokens, self._num_cached = 0, 0
        self._metrics: str | None = None

    async def whole(self, pieces: AsyncIterator[Arrival]) -> dict[str, Any]:
        """The answer to a request that is not streamed. pieces: see `pieces_of`."""
        async with aclosing(pieces):  # type: ignore[type-var]
            async for found in pieces:
                if found:
                    self._hold(*found)
        return await self._document()

    async def events(self, pieces: AsyncIterator[Arrival]) -> AsyncIterator[str]:
        """The server-sent events. pieces: see `pieces_of`."""
        async with aclosing(pieces):  # type: ignore[type-var]
            try:
                async for part in self._sent(self._first_events()):
                    yield part
                async for found in pieces:
                    if found is None:
                        yield self.idle
                        continue
                    async for part in self._sent(self._of_piece(*found)):
                        yield part
                async for part in self._sent(await self._last_events()):
                    yield part
                yield self.after_last
            except ApiError as error:
                async for part in self._sent(self._failed(error)):
                    yield part
                yield self.after_error

    def _add(self, number: int, piece: Piece) -> Choice:
        """Add the piece to its choice."""
        self._choices[number].add(piece)
        self._num_tokens += piece.num_output_tokens
        if number % self._num_per_prompt == 0:  # the other choices have the same prompt
            self._num_cached += piece.num_cached_tokens
        if number == 0:
            self._metrics = piece.metrics or self._metrics
        return self._choices[number]

    async def _usage(self, given: str, generated: str) -> dict[str, Any]:
        """Token counts in OpenAI's format. given, generated: its words for the two sides."""
        details = {"reasoning_tokens": await self._num_reasoning()}
        return {**self._counts(given, generated), f"{generated}_tokens_details": details}

    async def _num_reasoning(self) -> int:
        """Tokens, counted again."""
        text = "".join(choice.reasoning for choice in self._choices)
        return await self._count(text) if text else 0

    def _counts(self, given: str, generated: str) -> dict[str, Any]:
        """So far, without those of reasoning."""
        return {
            f"{given}_tokens": self._num_prompt,
            f"{given}_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            f"{generated}_tokens": self._num_tokens,
            "total_tokens": self._num_prompt + self._num_tokens,
        }

    def _statistics(self) -> dict[str, Any]:
        """vLLM's document `metrics` of the first choice, if the model sent one."""
        return {"metrics": json.loads(self._metrics)} if self._metrics else {}

    def _sent(self, events: Iterable[Event]) -> AsyncIterator[str]:
        """The events as text, in parts."""
        return sliced(chain.from_iterable(map(self._as_text, events)))

    def _as_text(self, event: Event) -> Iterator[str]:
        shown = parts(event)
        next(shown)  # the brace, which is in the beginning
        yield self._beginning(event)
        yield from (part.translate(LINE_ENDS) for part in shown)
        yield "\n\n"

    def _beginning(self, event: Event) -> str:
        """Of the event as text, with the first brace of its JSON."""
        return f"event: {event['type']}\ndata: {{"

    def _hold(self, number: int, piece: Piece) -> None:
        """Add a piece of an answer that is not streamed. Its events are not used."""
        for _ in self._of_piece(number, piece):
            pass

    def _first_events(self) -> Iterable[Event]:
        return ()

    @abstractmethod
    def _of_piece(self, number: int, piece: Piece) -> Iterator[Event]: ...

    @abstractmethod
    async def _last_events(self) -> list[Event]: ...

    @abstractmethod
    async def _document(self) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def _failed(self, error: ApiError) -> Iterable[Event]:
        """The last events of an answer that failed."""


class Item(ABC):
    """A part of an answer to which text is added. call: its first part, if the item is a call."""

    def __init__(self, kind: Kind, index: int, call: dict[str, Any] | None) -> None:
        self.kind, self.index, self.call = kind, index, call
        self.text = ""

    @abstractmethod
    def document(self, is_cut: bool) -> dict[str, Any]:
        """The item as the whole answer has it."""

    @abstractmethod
    def added(self) -> Iterator[Event]: ...

    @abstractmethod
    def delta(self, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def done(self, is_cut: bool) -> Iterator[Event]: ...


class ItemWriter(Writer):
    """An answer of items in the order in which they were generated. One is open until another one
    begins or the text ends."""

    item_type: Callable[[Kind, int, dict[str, Any] | None], Item]
    has_empty_text: ClassVar[bool]
    """Whether an answer without text has an item."""

    def __init__(self, found: Prepared, count: Count) -> None:
        self._choice = Choice.of(found.wanted, found.start)
        super().__init__(found, [self._choice], count)
        self._items: list[dict[str, Any]] = []
        self._open: Item | None = None

    def _of_piece(self, number: int, piece: Piece) -> Iterator[Event]:
        choice = self._add(number, piece)
        reasoning, parts = choice.take()
        if reasoning:
            yield from self._extend("reasoning", reasoning)
        for part in parts:
            if isinstance(part, str):
                yield from self._extend("text", part)
            else:
                yield from self._extend("call", part["function"]["arguments"], part)
        if choice.finish_reason:
            if self.has_empty_text and not (self._items or self._open):
                yield from self._extend("text", "")
            is_call = self._open is not None and self._open.kind == "call"
            is_cut = choice.has_open_call if is_call else choice.finish_reason == "length"
            yield from self._close(is_cut)

    def _extend(self, kind: Kind, text: str, call: dict[str, Any] | None = None) -> Iterator[Event]:
        """Text for the open item, or for a new one. Each call is a new one."""
        if self._open is None or self._open.kind != kind or (call and "id" in call):
            yield from self._close(is_cut=False)
            self._open = self.item_type(kind, len(self._items), call)
            yield from self._open.added()
        self._open.text += text
        yield from self._open.delta(text)

    def _close(self, is_cut: bool) -> Iterator[Event]:
        found, self._open = self._open, None
        if found is not None:
            yield from found.done(is_cut)
            self._items.append(found.document(is_cut))


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"
