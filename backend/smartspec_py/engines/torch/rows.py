"""Which sequence owns which row of a cache, and what the unowned rows remember.

A row keeps the keys of its sequence when that is released, until somebody else needs the row: a new
sequence that begins with the same tokens takes them over, in place or by copy, and reads only the
rest. So prefix reuse needs no memory of its own, and ends where every row is in use.

Rows in use should lie close together, because a batch reads all rows between the lowest and the
highest. A new sequence therefore takes a row among the lowest `num_used + 1`; and where sequences
ended and left gaps, `moves` says which rows to bring down.

Pure bookkeeping: the caller copies what it is told to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smartspec_py.core.types import SequenceId

MIN_REUSED = 8
"""Shorter common beginnings are read again: it costs less than copying them."""

MAX_SPREAD = 2
"""Rows are brought together when they spread over more than so many times their number."""

MIN_SPREAD = 4
"""They are left where they are while they spread over no more rows than this."""


@dataclass(slots=True)
class Row:
    """tokens: of the sequence, a list that is only appended to. num_cached: how many the row holds.

    owner: None where the row only remembers. last_used: counts allocations, for the oldest memory.
    """

    index: int
    owner: SequenceId | None = None
    tokens: Sequence[int] = ()
    num_cached: int = 0
    last_used: int = 0


class Placement(NamedTuple):
    """row: now owned. source: the row whose first `row.num_cached` tokens must be copied to it;
    None where nothing is reused, or in place."""

    row: Row
    source: int | None = None


class Move(NamedTuple):
    """Copy the first num_tokens of a row."""

    source: int
    destination: int
    num_tokens: int


class RowTable:
    """Rows 0..num_rows-1 of one cache."""

    def __init__(self, num_rows: int, *, reuses_prefixes: bool = True) -> None:
        self._rows = [Row(index) for index in range(num_rows)]
        self._of: dict[SequenceId, Row] = {}
        self._reuses_prefixes = reuses_prefixes
        self._num_allocations = 0

    def __len__(self) -> int:
        return len(self._of)

    def row(self, sequence: SequenceId) -> Row:
        return self._of[sequence]

    def allocate(self, sequence: SequenceId, tokens: Sequence[int], most_reused: int) -> Placement:
        """Own a row for a sequence with these tokens; at most `most_reused` of them are reused."""
        assert sequence not in self._of, f"sequence {sequence} has a row already"
        assert len(self._of) < len(self._rows), "no row is free: admission must prevent this"
        source, num_reused = self._best_source(tokens[:most_reused])
        near = self._rows[: len(self._of) + 1]
        row = min((row for row in near if row.owner is None), key=_oldest_memory)
        if source is not None and source.owner is None and source.index < len(near):
            row = source
        self._num_allocations += 1
        row.owner, row.tokens, row.num_cached = sequence, tokens, num_reused
        row.last_used = self._num_allocations
        self._of[sequence] = row
        copied = source is not None and source is not row
        return Placement(row, source.index if copied and source is not None else None)

    def release(self, sequence: SequenceId) -> None:
        """The row is free, and remembers."""
        row = self._of.pop(sequence)
        row.owner = None
        row.last_used = self._num_allocations

    def moves(self) -> Iterator[Move]:
        """Bring rows in use together, where they have spread out; to be carried out in order."""
        while self._is_spread():
            high = max(self._of.values(), key=lambda row: row.index)
            gaps = (row for row in self._rows[: len(self._of)] if row.owner is None)
            low = min(gaps, key=_oldest_memory)
            # They change places, so that a sequence keeps its `Row`. What is left above remembers
            # what was moved, but for the drafts that may stand behind the known tokens.
            low.tokens, low.last_used = high.tokens, high.last_used
            low.num_cached = min(high.num_cached, len(high.tokens))
            self._rows[low.index], self._rows[high.index] = high, low
            low.index, high.index = high.index, low.index
            yield Move(low.index, high.index, high.num_cached)

    def _is_spread(self) -> bool:
        if not self._of:
            return False
        spread = 1 + max(row.index for row in self._of.values())
        return spread > max(MIN_SPREAD, MAX_SPREAD * len(self._of))

    def _best_source(self, tokens: Sequence[int]) -> tuple[Row | None, int]:
        """The row that holds most of the beginning of `tokens`, and how much; (None, 0) if none."""
        best, most = None, 0
        for row in self._rows if self._reuses_prefixes else ():
            common = _num_common(row.tokens, tokens, row.num_cached)
            if common > most or (common == most and best is not None and row.owner is None):
                best, most = row, common
        return (best, most) if most >= MIN_REUSED else (None, 0)


def _oldest_memory(row: Row) -> tuple[bool, int, int]:
    """Rows that remember nothing first, then the one that was used longest ago."""
    return row.num_cached > 0, row.last_used, row.index


def _num_common(left: Sequence[int], right: Sequence[int], most: int) -> int:
    """Leading tokens that both have in common, at most `most`."""
    most = min(most, len(left), len(right))
    if list(left[:MIN_REUSED]) != list(right[:MIN_REUSED]):
        return 0
    return next((i for i in range(most) if left[i] != right[i]), most)
