"""The sizes to which captured passes are padded, and the layout of a padded pass.

A captured pass has fixed shapes, so a pass is padded to a bucket: cache rows 0..R-1, T tokens per
row, and C keys per row. Token j of row r has index r * T + j. A row with fewer tokens is filled
with padding tokens. A padding token has position 0, writes its keys to the scratch slot after the
last row, and its logits are not used. So padding changes nothing that another pass can read.

A long bucket has one row, which can be any row of the cache. It reads prompts.

This file only computes layouts. It uses no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smartspec_py.engines.runtimes.pytorch.packed import MAX_SHORT
from smartspec_py.engines.runtimes.runner import RowInput

WIDTHS = (1, 2, 3, 4, 6, 8, 12, MAX_SHORT, 24, 33)
"""Tokens per row: up to 32 drafts after the last known token."""

MAX_WIDTH = WIDTHS[-1]

LONG_WIDTHS = (64, 128, 256, 512, 1024)
"""Tokens of a long bucket. On an H200, a pass of an 8 B model over one prompt of 100 tokens took
7 ms captured and 21 ms launched kernel by kernel."""

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

    @property
    def is_long(self) -> bool:
        return self.width > MAX_WIDTH


def make_buckets(num_rows: int, max_len: int, max_width: int = MAX_WIDTH) -> list[Bucket]:
    """The buckets of passes of up to max_width tokens per row, ascending. Row counts and context
    lengths double, up to num_rows and max_len."""
    most = next((width for width in WIDTHS if width >= max_width), MAX_WIDTH)
    buckets = [
        Bucket(rows, width, context_len)
        for rows in _doubling(1, num_rows)
        for width in WIDTHS
        for context_len in _doubling(MIN_CONTEXT_LEN, max_len)
        if width <= most and (width == 1 or rows * width <= MAX_TOKENS)
    ]
    return sorted(buckets, key=lambda bucket: (bucket.num_tokens, bucket.context_len))


def make_long_buckets(max_len: int) -> list[Bucket]:
    """The long buckets, ascending."""
    return [
        Bucket(1, width, context_len)
        for width in LONG_WIDTHS
        for context_len in _doubling(MIN_CONTEXT_LEN, max_len)
        if width <= context_len
    ]


def bucket_of(inputs: Sequence[RowInput], buckets: Sequence[Bucket]) -> Bucket | None:
    """The smallest of these buckets for a pass; None if it fits in none. buckets: ascending."""
    num_rows = 1 + max(item.row for item in inputs)
    width = max(len(item.tokens) for item in inputs)
    context_len = max(item.position + len(item.tokens) for item in inputs)
    for bucket in buckets:
        has_rows = bucket.num_rows >= num_rows or bucket.is_long
        if has_rows and bucket.width >= width and bucket.context_len >= context_len:
            return bucket
    return None


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 * first, 4 * first and so on while below last; then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


NUM_INPUTS = 7
"""Numbers per token of a padded pass, see `lay_out`."""


def lay_out(
    inputs: Sequence[RowInput], bucket: Bucket, max_len: int, scratch_slot: int
) -> tuple[NDArray[np.int64], int]:
    """Place the inputs in their bucket; without inputs, the pass has only padding.

    Returns [NUM_INPUTS, R * T] and the number n of wanted tokens. The lines are token ids;
    positions; slots, numbered row by row with max_len slots per row; the cache's rows and their
    first slots with a key, whose first R entries are used; the adapters of the tokens; and
    `wanted`, whose first n entries are the indices of the tokens whose logits are needed, in the
    order of the inputs.
    """
    made = np.zeros((NUM_INPUTS, bucket.num_tokens), np.int64)
    token_ids, positions, slots, rows, firsts, adapters, wanted = made
    slots[:], rows[: bucket.num_rows] = scratch_slot, range(bucket.num_rows)
    lists: tuple[list[int], ...] = ([], [], [], [], [])
    places, own_tokens, own_positions, own_slots, own_wanted = lists
    for item in inputs:
        num_tokens, row = len(item.tokens), 0 if bucket.is_long else item.row
        first, slot = row * bucket.width, item.row * max_len + item.position
        rows[row], firsts[row] = item.row, item.first
        adapters[first : first + num_tokens] = item.adapter
        places += range(first, first + num_tokens)
        own_tokens += item.tokens
        own_positions += item.positions
        own_slots += range(slot, slot + num_tokens)
        own_wanted += range(first + num_tokens - item.num_logits, first + num_tokens)
    token_ids[places], positions[places], slots[places] = own_tokens, own_positions, own_slots
    wanted[: len(own_wanted)] = own_wanted
    return made, len(own_wanted)
