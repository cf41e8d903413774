"""Writes an answer as typed events: what the APIs that have them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from itertools import chain
from typing import Any, ClassVar

from smartspec_gateway.openai.answers import LINE_ENDS, Choice
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.json_parts import parts, sliced
from smartspec_gateway.openai.model import Piece

Event = dict[str, Any]


class EventWriter(ABC):
    """An answer in progress. Streamed or not, the same events are made; without a stream only the
    document is sent."""

    names: ClassVar[Mapping[str, str]]
    """Fields of chats that have another name in the API, for errors."""

    after_last = ""
    """What follows the last event of a stream."""

    def __init__(self, choice: Choice) -> None:
        """choice: a new one."""
        self._choice = choice
        self._num_tokens, self._num_cached = 0, 0
        self._metrics = ""

    async def whole(self, pieces: AsyncIterator[tuple[int, Piece]]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        async with aclosing(pieces):  # type: ignore[type-var]
            async for _, piece in pieces:
                for _ in self._of_piece(piece):
                    pass
        return await self._document()

    async def events(
        self, pieces: AsyncIterator[tuple[int, Piece]], first: tuple[int, Piece]
    ) -> AsyncIterator[str]:
        """The server-sent events. first: a piece that was already read."""
        async with aclosing(pieces):  # type: ignore[type-var]
            try:
                async for part in self._sent(self._first_events()):
                    yield part
                async for part in self._sent(self._of_piece(first[1])):
                    yield part
                async for _, piece in pieces:
                    async for part in self._sent(self._of_piece(piece)):
                        yield part
                async for part in self._sent(await self._last_events()):
                    yield part
            except ApiError as error:
                async for part in self._sent(self._failed(error.renamed(self.names))):
                    yield part
        yield self.after_last

    def _take(self, piece: Piece) -> tuple[str, str, list[dict[str, Any]]]:
        """Add the piece, and return the reasoning, the text and the calls that are new."""
        self._choice.add(piece)
        self._num_tokens += piece.num_output_tokens
        self._num_cached += piece.num_cached_tokens
        self._metrics = piece.metrics or self._metrics
        return self._choice.take()

    def _sent(self, events: Iterable[Event]) -> AsyncIterator[str]:
        """The events as text, in parts."""
        return sliced(chain.from_iterable(map(_as_text, events)))

    @abstractmethod
    def _first_events(self) -> Iterator[Event]: ...

    @abstractmethod
    def _of_piece(self, piece: Piece) -> Iterator[Event]: ...

    @abstractmethod
    async def _last_events(self) -> list[Event]: ...

    @abstractmethod
    async def _document(self) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def _failed(self, error: ApiError) -> Iterator[Event]:
        """The last events of an answer that failed."""


def _as_text(event: Event) -> Iterator[str]:
    yield f"event: {event['type']}\ndata: "
    yield from (part.translate(LINE_ENDS) for part in parts(event))
    yield "\n\n"
