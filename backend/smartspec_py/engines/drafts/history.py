"""What the sequences of one scope have generated, indexed by its n-grams, while it grows.

Each token has a cell in a ring, so the oldest tokens are overwritten first. Texts that grow at the
same time alternate in the ring, so each cell has links to the cells before and after it in its
text. Cells where n-grams with the same hash end form a chain, the latest first. A search compares
the texts before the first cells of a chain with the last tokens of a sequence. A link to a cell
that was overwritten leads into another text of the scope: that can make a draft wrong, but no
search longer.

A token takes 20 to 24 bytes, which become resident as the ring fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAX_MATCH = 16
"""A match is not followed further back."""

MAX_CANDIDATES = 8
"""Cells of a chain that a search compares."""

_NONE = 0
"""Stands for no cell."""


class Match(NamedTuple):
    """tokens: what followed the latest match. length: tokens of the match, at most MAX_MATCH. num:
    matches of this length, at most MAX_CANDIDATES. is_agreed: whether the same token followed all
    of them."""

    tokens: list[int]
    length: int
    num: int
    is_agreed: bool


class History:
    """The last `num_tokens` tokens of one scope. num_open: texts that still grow."""

    def __init__(self, num_tokens: int, ngram: int) -> None:
        """ngram: length of the indexed n-grams, and of the shortest match."""
        self._size, self._ngram = num_tokens, ngram
        self._tokens, self._before, self._after, self._chain = (
            _cells(num_tokens + 1) for _ in range(4)
        )
        self._heads = _cells(1 << (num_tokens - 1).bit_length())
        self._num_added = 0
        self.num_open = 0

    @property
    def num_bytes(self) -> int:
        arrays = self._tokens, self._before, self._after, self._chain, self._heads
        return sum(array.nbytes for array in arrays)

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Add what is new of a text. tokens: all of its sequence."""
        for end in range(text.num_known + 1, len(tokens) + 1):
            cell = self._num_added % self._size + 1
            self._num_added += 1
            self._tokens[cell] = tokens[end - 1]
            self._before[cell], self._after[cell] = text.last, _NONE
            if text.last:
                self._after[text.last] = cell
            if end - text.begin >= self._ngram:
                head = self._head(tokens[end - self._ngram : end])
                self._chain[cell], self._heads[head] = self._heads[head], cell
            text.last = cell
        text.num_known = len(tokens)

    def find(self, tail: Sequence[int], num: int) -> Match | None:
        """The longest match of the last tokens of `tail` that a token followed, the latest of
        several. num: most tokens of its continuation."""
        length, cells = self._ngram, list[int]()
        for cell in self._candidates(tail):
            of_cell = self._length(cell, tail)
            if of_cell > length:
                length, cells = of_cell, []
            if of_cell == length:
                cells.append(self._after[cell])
        if not cells:
            return None
        following = {self._tokens[cell] for cell in cells}
        return Match(self._following(cells[0], num), length, len(cells), len(following) == 1)

    def _candidates(self, tail: Sequence[int]) -> list[int]:
        """Cells of the chain of the tail's n-gram that a token follows."""
        if len(tail) < self._ngram:
            return []
        cell, cells = self._heads[self._head(tail[-self._ngram :])], list[int]()
        for _ in range(MAX_CANDIDATES):
            if not cell:
                break
            if self._after[cell]:
                cells.append(cell)
            cell = self._chain[cell]
        return cells

    def _length(self, cell: int, tail: Sequence[int]) -> int:
        """How many tokens up to a cell are the last ones of the tail."""
        length, most = 0, min(MAX_MATCH, len(tail))
        while length < most and cell and self._tokens[cell] == tail[-1 - length]:
            length, cell = length + 1, self._before[cell]
        return length

    def _following(self, cell: int, num: int) -> list[int]:
        """Up to `num` tokens from a cell on."""
        tokens = list[int]()
        while cell and len(tokens) < num:
            tokens.append(self._tokens[cell])
            cell = self._after[cell]
        return tokens

    def _head(self, ngram: Sequence[int]) -> int:
        """Where its chain begins in `_heads`."""
        return hash(tuple(ngram)) & (len(self._heads) - 1)


@dataclass(slots=True)
class Text:
    """What a sequence has generated, in a history. begin: position of its first token in the
    sequence. num_known: tokens of the sequence up to the last that was added. last: cell of that
    token."""

    history: History
    begin: int
    num_known: int
    last: int = _NONE


def _cells(num: int) -> Any:
    """Single elements are read faster from a memoryview than from an array."""
    return np.zeros(num, np.int32).data
