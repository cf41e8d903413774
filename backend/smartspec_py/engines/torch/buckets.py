"""The sizes to which short passes are padded, and the layout of a padded pass.

A captured pass has fixed shapes, so a pass is padded to a bucket: cache rows 0..R-1, T tokens per
row, and C keys per row. Token j of row r has index r * T + j. A row with fewer tokens is filled
with padding tokens. A padding token has position 0, writes its keys to the scratch slot after the
last row, and its logits are not used. So padding changes nothing that another pass can read.

This file only computes layouts as lists of numbers. It uses no device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smartspec_py.core.types import ROOT
from smartspec_py.engines.torch.packed import MAX_SHORT, RowInput
from smartspec_py.engines.torch.tree import visible_bits

WIDTHS = (1, 2, 3, 4, 6, 8, 12, MAX_SHORT, 24, 33)
"""Tokens per row. The last ones are for trees of up to 32 drafts."""

MAX_WIDTH = WIDTHS[-1]
"""Longer inputs are not captured."""

MIN_CONTEXT_LEN = 256
"""The shortest context; each next one is twice as long. Smaller ratios would need more graphs."""

MAX_TOKENS = 512
"""Larger passes are not captured. Their kernels take longer than the launches, and their logits
would use most of the memory of a graph. Passes with one token per row are always captured."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """num_rows: R, counted from row 0. width: T, tokens per row. context_len: C, keys per row."""

    num_rows: int
    width: int
    context_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Ladder:
    """The sizes of all buckets, ascending. Rows and contexts end with the maximum."""

    rows: tuple[int, ...]
    context_lens: tuple[int, ...]
    widths: tuple[int, ...] = WIDTHS

    def bucket_for(self, num_rows: int, width: int, context_len: int) -> Bucket | None:
        """The smallest bucket that fits; None if there is none, and then the pass is not padded."""
        rows = _least(self.rows, num_rows)
        tokens = _least(self.widths, width)
        keys = _least(self.context_lens, context_len)
        if rows is None or tokens is None or keys is None or not _is_captured(rows, tokens):
            return None
        return Bucket(rows, tokens, keys)

    def bucket_of(self, inputs: Sequence[RowInput]) -> Bucket | None:
        """The bucket of a pass over these inputs; at least one input is required."""
        return self.bucket_for(
            1 + max(item.row for item in inputs),
            max(len(item.tokens) for item in inputs),
            max(item.position + len(item.tokens) for item in inputs),
        )

    def buckets(self, max_width: int) -> list[Bucket]:
        """All buckets that passes of up to max_width tokens per row can need, largest first."""
        widest = _least(self.widths, max_width) or self.widths[-1]
        found = [
            Bucket(rows, width, context_len)
            for rows in self.rows
            for width in self.widths
            for context_len in self.context_lens
            if width <= widest and _is_captured(rows, width)
        ]
        return sorted(found, key=lambda b: (b.num_tokens, b.context_len), reverse=True)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest bucket."""
        return max(bucket.num_tokens for bucket in self.buckets(MAX_WIDTH))


def make_ladder(num_rows: int, max_len: int) -> Ladder:
    """Row counts and context lengths double, up to num_rows and max_len."""
    return Ladder(_doubling(1, num_rows), _doubling(MIN_CONTEXT_LEN, max_len))


def _is_captured(rows: int, width: int) -> bool:
    return width == 1 or rows * width <= MAX_TOKENS


def _least(sizes: Sequence[int], needed: int) -> int | None:
    place = bisect_left(sizes, needed)
    return sizes[place] if place < len(sizes) else None


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 * first, 4 * first and so on while below last; then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


class PaddedPass(NamedTuple):
    """token_ids, positions, slots: [R * T]. seen: [R * T], see `packed.tree_mask`. wanted: indices
    of the tokens whose logits are needed, in the order of the inputs."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    seen: list[int]
    wanted: list[int]


def lay_out(
    inputs: Sequence[RowInput], bucket: Bucket, max_len: int, scratch_slot: int
) -> PaddedPass:
    """Place the inputs in their bucket; without inputs, the pass has only padding.

    Slots are numbered row by row, with max_len slots per row.
    """
    token_ids = [0] * bucket.num_tokens
    positions = [0] * bucket.num_tokens
    slots = [scratch_slot] * bucket.num_tokens
    seen = [1] * bucket.num_tokens
    wanted: list[int] = []
    for item in inputs:
        num_tokens = len(item.tokens)
        first = item.row * bucket.width
        slot = item.row * max_len + item.position
        token_ids[first : first + num_tokens] = item.tokens
        positions[first : first + num_tokens] = item.positions
        slots[first : first + num_tokens] = range(slot, slot + num_tokens)
        seen[first : first + num_tokens] = visible_bits(item.parents or range(ROOT, num_tokens - 2))
        wanted += range(first + num_tokens - item.num_logits, first + num_tokens)
    return PaddedPass(token_ids, positions, slots, seen, wanted)
