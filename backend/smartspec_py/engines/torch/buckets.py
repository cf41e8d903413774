"""The sizes to which short passes are padded, and the layout of a padded pass.

A captured pass has fixed shapes, so a pass is padded to a bucket: cache rows 0..R-1, T tokens per
row, and C keys per row. Token j of row r has index r * T + j. A row with fewer tokens is filled
with padding tokens. A padding token has position 0, writes its keys to the scratch slot after the
last row, and its logits are not used. So padding changes nothing that another pass can read.

This file only computes layouts. It uses no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smartspec_py.engines.torch.packed import MAX_SHORT, RowInput
from smartspec_py.engines.torch.tree import chain, visibility

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


def make_buckets(num_rows: int, max_len: int, max_width: int = MAX_WIDTH) -> list[Bucket]:
    """The buckets of passes of up to max_width tokens per row, ascending. Row counts and context
    lengths double, up to num_rows and max_len."""
    most = next((width for width in WIDTHS if width >= max_width), MAX_WIDTH)
    found = [
        Bucket(rows, width, context_len)
        for rows in _doubling(1, num_rows)
        for width in WIDTHS
        for context_len in _doubling(MIN_CONTEXT_LEN, max_len)
        if width <= most and (width == 1 or rows * width <= MAX_TOKENS)
    ]
    return sorted(found, key=lambda bucket: (bucket.num_tokens, bucket.context_len))


def bucket_of(inputs: Sequence[RowInput], buckets: Sequence[Bucket]) -> Bucket | None:
    """The smallest of these buckets for a pass; None if it fits in none. buckets: ascending."""
    num_rows = 1 + max(item.row for item in inputs)
    width = max(len(item.tokens) for item in inputs)
    context_len = max(item.position + len(item.tokens) for item in inputs)
    for one in buckets:
        if one.num_rows >= num_rows and one.width >= width and one.context_len >= context_len:
            return one
    return None


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 * first, 4 * first and so on while below last; then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


NUM_INPUTS = 5
"""Numbers per token of a padded pass, see `lay_out`."""


def lay_out(
    inputs: Sequence[RowInput], bucket: Bucket, max_len: int, scratch_slot: int
) -> tuple[NDArray[np.int64], int]:
    """Place the inputs in their bucket; without inputs, the pass has only padding.

    Returns [NUM_INPUTS, R * T] and the number n of wanted tokens. The lines are token ids;
    positions; slots, numbered row by row with max_len slots per row; `seen`, in which bit i of a
    token is set if it sees new token i of its row; and `wanted`, whose first n entries are the
    indices of the tokens whose logits are needed, in the order of the inputs.
    """
    made = np.zeros((NUM_INPUTS, bucket.num_tokens), np.int64)
    token_ids, positions, slots, seen, wanted = made
    slots[:], seen[:] = scratch_slot, 1
    num_wanted = 0
    for item in inputs:
        num_tokens = len(item.tokens)
        first, slot = item.row * bucket.width, item.row * max_len + item.position
        own = slice(first, first + num_tokens)
        token_ids[own], positions[own] = item.tokens, item.positions
        slots[own] = range(slot, slot + num_tokens)
        is_seen = visibility(item.parents or chain(num_tokens - 1))
        seen[own] = is_seen @ (1 << np.arange(num_tokens))
        last = num_wanted + item.num_logits
        wanted[num_wanted:last] = range(first + num_tokens - item.num_logits, first + num_tokens)
        num_wanted = last
    return made, num_wanted
