"""The sizes to which short passes are padded, and what such a padded pass looks like.

A captured pass has fixed shapes, so passes are rounded up to a bucket: cache rows 0..R-1, T tokens
of each, C keys to look at. Token j of row r stands at r * T + j. Where a row has fewer tokens, or
none, a token of padding stands: it has position 0, writes its keys to the scratch slot behind the
rows, and nobody reads its logits. So padding changes nothing that another pass can see.

Pure layout: lists of numbers, no device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from smartspec_py.engines.torch.packed import MAX_SHORT, RowInput

WIDTHS = (1, 2, 3, 4, 6, 8, 12, MAX_SHORT)
"""Tokens a row: those at which passes are profiled."""

MIN_CONTEXT_LEN = 256
"""The shortest context; each longer one is twice as long. Less padding would mean more graphs."""

MAX_TOKENS = 512
"""Tokens of a padded pass beyond which it is better not captured: its kernels take longer than
their launches, and its logits are what a graph holds most memory for. A pass of one token a row is
captured however many rows there are."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """num_rows: R, from row 0 on. width: T, tokens a row. context_len: C, keys a row."""

    num_rows: int
    width: int
    context_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Ladder:
    """The sizes that there are buckets of, ascending; the last rows and context are the most."""

    rows: tuple[int, ...]
    context_lens: tuple[int, ...]
    widths: tuple[int, ...] = WIDTHS

    def bucket_for(self, num_rows: int, width: int, context_len: int) -> Bucket | None:
        """The least bucket that holds so much; None where there is none: the pass is not padded."""
        rows = _least(self.rows, num_rows)
        tokens = _least(self.widths, width)
        keys = _least(self.context_lens, context_len)
        if rows is None or tokens is None or keys is None or not _is_captured(rows, tokens):
            return None
        return Bucket(rows, tokens, keys)

    def bucket_of(self, inputs: Sequence[RowInput]) -> Bucket | None:
        """The same for a pass over these inputs, one at least."""
        return self.bucket_for(
            1 + max(item.row for item in inputs),
            max(len(item.tokens) for item in inputs),
            max(item.position + len(item.tokens) for item in inputs),
        )

    def decode_bucket(self, num_rows: int, context_len: int) -> Bucket:
        """The same for one token a row, of which there always is one."""
        bucket = self.bucket_for(num_rows, 1, context_len)
        assert bucket is not None, f"no cache has {num_rows} rows of {context_len} tokens"
        return bucket

    def buckets(self, max_width: int) -> list[Bucket]:
        """All of those that passes of up to so many tokens a row can need, the largest first."""
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
        return max(bucket.num_tokens for bucket in self.buckets(MAX_SHORT))


def make_ladder(num_rows: int, max_len: int) -> Ladder:
    """Rows and contexts double up to num_rows and max_len."""
    return Ladder(_doubling(1, num_rows), _doubling(MIN_CONTEXT_LEN, max_len))


def _is_captured(rows: int, width: int) -> bool:
    return width == 1 or rows * width <= MAX_TOKENS


def _least(sizes: Sequence[int], needed: int) -> int | None:
    place = bisect_left(sizes, needed)
    return sizes[place] if place < len(sizes) else None


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, twice that, and so on below last; then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


@dataclass(frozen=True, slots=True)
class PaddedPass:
    """token_ids, positions, slots: [R * T]. wanted: the tokens whose logits are asked for, in the
    order of the inputs."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    wanted: list[int]


def lay_out(
    inputs: Sequence[RowInput], bucket: Bucket, max_len: int, scratch_slot: int
) -> PaddedPass:
    """The inputs in their bucket; none at all is a pass of padding. Slots are counted through the
    rows, max_len of them a row."""
    token_ids = [0] * bucket.num_tokens
    positions = [0] * bucket.num_tokens
    slots = [scratch_slot] * bucket.num_tokens
    wanted: list[int] = []
    for item in inputs:
        num_tokens = len(item.tokens)
        first = item.row * bucket.width
        slot = item.row * max_len + item.position
        token_ids[first : first + num_tokens] = item.tokens
        positions[first : first + num_tokens] = range(item.position, item.position + num_tokens)
        slots[first : first + num_tokens] = range(slot, slot + num_tokens)
        wanted += range(first + num_tokens - item.num_logits, first + num_tokens)
    return PaddedPass(token_ids, positions, slots, wanted)


@dataclass(frozen=True, slots=True)
class DraftPass:
    """A pass over one token a row that is only known on the device. positions, slots: [R]."""

    bucket: Bucket
    positions: list[int]
    slots: list[int]


def lay_out_drafts(
    inputs: Sequence[RowInput],
    draft_lens: Sequence[int],
    ladder: Ladder,
    max_len: int,
    scratch_slot: int,
) -> list[DraftPass]:
    """The passes that read the drafts of each input, all but its last, one a pass. All of them have
    as many rows.

    An input that has its draft_len, or whose row is full, goes on as padding: what is drafted for
    it then means nothing, and is written nowhere.
    """
    passes = []
    num_rows = 1 + max(item.row for item in inputs)
    padded_rows = ladder.decode_bucket(num_rows, 1).num_rows
    for step in range(max(draft_lens) - 1):
        positions, slots, context_len = [0] * padded_rows, [scratch_slot] * padded_rows, 1
        for item, draft_len in zip(inputs, draft_lens, strict=True):
            position = item.position + len(item.tokens) + step
            if step + 1 < draft_len and position < max_len:
                positions[item.row] = position
                slots[item.row] = item.row * max_len + position
                context_len = max(context_len, position + 1)
        bucket = ladder.decode_bucket(num_rows, context_len)
        passes.append(DraftPass(bucket, positions, slots))
    return passes
