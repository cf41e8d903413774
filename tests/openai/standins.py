"""A model that answers from memory, for tests of the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.model import Piece

TINY = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
PIECES = (Piece("one", 1), Piece(" two", 2, "stop", 7, '{"speculative_decoding":{}}', 5))


class Echo:
    """Answers with these pieces. asked: the fields of each request, in order.

    error: raised after num_before pieces. num_cancelled: requests that were closed early.
    """

    def __init__(
        self,
        error: ApiError | None = None,
        num_before: int = 0,
        pieces: Sequence[Piece] = PIECES,
    ) -> None:
        self.pieces = pieces
        self.asked: list[dict[str, Any]] = []
        self.error, self.num_before = error, num_before
        self.num_cancelled = 0
        self.is_slow = False

    async def generate(self, fields: dict[str, Any]) -> AsyncIterator[Piece]:
        self.asked.append(fields)
        try:
            for number, piece in enumerate(self.pieces):
                if self.error is not None and number == self.num_before:
                    raise self.error
                yield piece
                if self.is_slow:
                    await asyncio.sleep(60)
        except (GeneratorExit, asyncio.CancelledError):
            self.num_cancelled += 1
            raise

    async def is_ready(self) -> bool:
        return self.error is None


def text_with(*texts: str, reason: str = "stop") -> Echo:
    """A model that generates these parts of a text."""
    parts = [Piece(text, 1) for text in texts]
    return Echo(pieces=[*parts, Piece("", 1, reason, 5)])


def scored(*tokens: int) -> list[Any]:
    """Log-probabilities of a piece with these tokens, with two for each position."""
    return [[token, -0.5, [[token, -0.5], [0, -1.5]]] for token in tokens]
