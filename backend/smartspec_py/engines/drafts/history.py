"""What the requests of one scope have generated, indexed by its n-grams.

The texts are in a ring, which is overwritten from its beginning when it is full. The positions
after the n-grams with the same hash form a chain, the latest first, as in compressors of the LZ77
family. A search compares the text before the first positions of a chain with the tail of a request,
so collisions of hashes and overwritten texts only shorten the search. Nothing is moved or rebuilt.

It takes 12 bytes per token, at most 16. They become resident as the ring fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

END = -1
"""Stands after each text. No token equals it, so neither matches nor drafts cross it."""

MAX_MATCH = 16
"""A match is not followed further back."""

MAX_CANDIDATES = 8
"""Positions of a chain that a search compares."""

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
"""Of multiplicative hashing: 2^64 divided by the golden ratio."""


class Match(NamedTuple):
    """position: of the token after the match. length: tokens of the match, at most MAX_MATCH.
    is_agreed: whether the same token followed all matches of this length."""

    position: int
    length: int
    is_agreed: bool


class History:
    """Texts of one scope. `add` takes about 0.3 us per token, and `find` 30 us at most."""

    def __init__(self, num_tokens: int, ngram: int) -> None:
        """num_tokens: size of the ring; each text takes one more than its tokens. ngram: length of
        the indexed n-grams, and of the shortest match."""
        self._ngram = ngram
        self._shift = 64 - max(1, (num_tokens - 1).bit_length())
        self._factors = [pow(_FACTOR, power, 1 << 64) for power in range(ngram, 0, -1)]
        self._tokens = np.zeros(num_tokens + 2, np.int32)
        self._tokens[[0, -1]] = END  # position 0 means that there is none
        self._heads = np.zeros(1 << (64 - self._shift), np.int32)
        self._earlier = np.zeros(num_tokens + 2, np.int32)
        self._views: tuple[Any, ...] = self._tokens.data, self._heads.data, self._earlier.data
        """Single elements are read faster from these than from arrays."""
        self._next = 1

    def add(self, text: Sequence[int]) -> None:
        """Store a text; of a text longer than the ring, its end."""
        room = len(self._tokens) - 2
        text = text[max(0, len(text) - room + 1) :]
        if self._next + len(text) + 1 > room + 1:
            self._tokens[self._next] = END  # what is left of an overwritten text begins here
            self._next = 1
        start, end = self._next, self._next + len(text)
        self._tokens[start:end] = text
        self._tokens[end] = END
        self._next = end + 1
        if len(text) > self._ngram:
            self._link(start, end)

    def find(self, tail: Sequence[int]) -> Match | None:
        """The longest match of the last tokens of `tail`, the latest of several."""
        tokens, heads, earlier = self._views
        if len(tail) < self._ngram:
            return None
        pairs = zip(self._factors, tail[-self._ngram :], strict=True)
        position = heads[(sum(factor * token for factor, token in pairs) & _MASK) >> self._shift]
        best, following = Match(0, self._ngram - 1, False), set[int]()
        for _ in range(MAX_CANDIDATES):
            if not position:
                break
            length = self._length(position, tail)
            if length > best.length:
                best, following = Match(position, length, True), set()
            if length == best.length:
                following.add(tokens[position])
            position = earlier[position]
        return best._replace(is_agreed=len(following) == 1) if best.position else None

    def following(self, position: int, num: int) -> list[int]:
        """Up to `num` tokens from a position, of the same text."""
        tokens: list[int] = self._views[0][position : position + num].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def _length(self, position: int, tail: Sequence[int]) -> int:
        """How many tokens before a position are the last ones of the tail; 0 if none follows."""
        tokens, length = self._views[0], 0
        if tokens[position] == END:
            return 0
        most = min(MAX_MATCH, len(tail))
        while length < most and tokens[position - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    def _link(self, start: int, end: int) -> None:
        """Put the positions after the n-grams of a text at the heads of their chains."""
        num = end - start - self._ngram
        hashes = np.zeros(num, np.uint64)
        for offset, factor in enumerate(self._factors):
            part = self._tokens[start + offset : start + offset + num]
            hashes += part.astype(np.uint64) * np.uint64(factor)
        slots = (hashes >> np.uint64(self._shift)).astype(np.int64)
        positions = np.arange(start + self._ngram, end, dtype=np.int32)
        order = np.argsort(slots, kind="stable")
        slots, positions = slots[order], positions[order]
        is_same = slots[1:] == slots[:-1]
        before = self._heads[slots]
        before[1:][is_same] = positions[:-1][is_same]
        self._earlier[positions] = before
        self._heads[slots] = positions  # of equal slots the last one, which is the latest
