"""Which sequence owns which cache row, and which tokens the free rows still hold.

A released row keeps its keys until another sequence needs the row. A new sequence that starts with
the same tokens reuses these keys, in place or by copy, and prefills only the rest. So prefix reuse
needs no extra memory. Old prefixes are lost when their rows are needed for new sequences.

Only what was read as a prompt is reused, and only for a prompt: generated tokens are attended
otherwise (`openvino.runner`), so their keys differ in the last bits from those of the same tokens
in the prompt of a next turn. The text must not depend on which of them are cached. For the same
reason, only keys of the same LoRA adapter are reused.

Rows in use should be adjacent, because a batch reads all rows between the lowest and the highest. A
new sequence therefore takes one of the lowest `num_used + 1` rows. When ended sequences leave gaps,
`moves` returns the rows to move down.

This file only does the bookkeeping. The caller copies the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smartspec_py.core.types import SequenceId

MIN_REUSED = 8
"""Shorter common prefixes are not reused. Prefilling them costs less than a copy."""

MAX_SPREAD = 2
"""Rows in use are moved together when they span more than this many times their number."""

MIN_SPREAD = 4
"""Rows in use are not moved while they span at most this many rows."""


@dataclass(slots=True)
class Row:
    """tokens: of the sequence, a list that only grows; the first num_prompt are its prompt.
    num_cached: how many of them the row holds. adapter: that they were read with.

    owner: None if the row is free and only keeps old keys. last_used: number of allocations at the
    last use; the smallest is the oldest.
    """

    index: int
    owner: SequenceId | None = None
    tokens: Sequence[int] = ()
    num_prompt: int = 0
    num_cached: int = 0
    last_used: int = 0
    adapter: str = ""


class Placement(NamedTuple):
    """row: the row that the sequence now owns. source: copy the first `row.num_cached` tokens from
    this row; None if nothing is reused or the keys are already in place."""

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

    def allocate(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        num_prompt: int,
        reuses_prefix: bool = True,
        adapter: str = "",
    ) -> Placement:
        """Assign a row to a sequence with these tokens, and reuse the longest prefix of its prompt
        that any row of this adapter holds, except for the last token."""
        assert sequence not in self._of, f"sequence {sequence} already has a row"
        assert len(self._of) < len(self._rows), "no row is free: admission must prevent this"
        most_reused = min(num_prompt, len(tokens) - 1) if reuses_prefix else 0
        source, num_reused = self._best_source(tokens[:most_reused], adapter)
        near = self._rows[: len(self._of) + 1]
        row = min((row for row in near if row.owner is None), key=_oldest_memory)
        if source is not None and source.owner is None and source.index < len(near):
            row = source
        self._num_allocations += 1
        row.owner, row.tokens, row.num_prompt = sequence, tokens, num_prompt
        row.num_cached, row.adapter = num_reused, adapter
        row.last_used = self._num_allocations
        self._of[sequence] = row
        copied = source is not None and source is not row
        return Placement(row, source.index if copied and source is not None else None)

    def release(self, sequence: SequenceId) -> None:
        """Free the row. It keeps its keys for reuse."""
        row = self._of.pop(sequence)
        row.owner = None
        row.last_used = self._num_allocations

    def forget(self, most_kept: float) -> list[int]:
        """Forget the keys of the free rows that were used longest ago, until all free rows together
        keep at most so many tokens. The result has the indices of these rows."""
        free = sorted((row for row in self._rows if row.owner is None), key=_oldest_memory)
        num_kept, forgotten = sum(row.num_cached for row in free), []
        for row in free:
            if num_kept <= most_kept:
                break
            if row.num_cached:
                num_kept -= row.num_cached
                row.tokens, row.num_cached = (), 0
                forgotten.append(row.index)
        return forgotten

    def moves(self) -> Iterator[Move]:
        """Moves that bring scattered rows in use together. Apply them in order."""
        while self._is_spread():
            high = max(self._of.values(), key=lambda row: row.index)
            gaps = (row for row in self._rows[: len(self._of)] if row.owner is None)
            low = min(gaps, key=_oldest_memory)
            # The rows swap places, so that a sequence keeps its `Row`. The upper row still holds
            # the moved keys, without those of drafts after the known tokens.
            low.tokens, low.num_prompt = high.tokens, high.num_prompt
            low.last_used, low.adapter = high.last_used, high.adapter
            low.num_cached = min(high.num_cached, len(high.tokens))
            self._rows[low.index], self._rows[high.index] = high, low
            low.index, high.index = high.index, low.index
            yield Move(low.index, high.index, high.num_cached)

    def _is_spread(self) -> bool:
        if not self._of:
            return False
        spread = 1 + max(row.index for row in self._of.values())
        return spread > max(MIN_SPREAD, MAX_SPREAD * len(self._of))

    def _best_source(self, tokens: Sequence[int], adapter: str) -> tuple[Row | None, int]:
        """The row of the adapter with the longest common prefix with `tokens`, and its length; else
        (None, 0)."""
        best, most = None, 0
        rows = self._rows if self._reuses_prefixes else ()
        for row in (row for row in rows if row.adapter == adapter):
            common = _num_common(row.tokens, tokens, min(row.num_cached, row.num_prompt))
            if common > most or (common == most and best is not None and row.owner is None):
                best, most = row, common
        return (best, most) if most >= MIN_REUSED else (None, 0)


def _oldest_memory(row: Row) -> tuple[bool, int, int]:
    """Sort key: empty rows first, then the row that was used longest ago."""
    return row.num_cached > 0, row.last_used, row.index


def _num_common(left: Sequence[int], right: Sequence[int], most: int) -> int:
    """Length of the common prefix, at most `most`. Prefixes shorter than MIN_REUSED return 0."""
    most = min(most, len(left), len(right))
    if list(left[:MIN_REUSED]) != list(right[:MIN_REUSED]):
        return 0
    return next((i for i in range(most) if left[i] != right[i]), most)
