"""Which bucket a pass is padded to, and where its tokens stand there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.core.types import ROOT
from smartspec_py.engines.torch.buckets import (
    MAX_TOKENS,
    MAX_WIDTH,
    Bucket,
    Ladder,
    lay_out,
    make_ladder,
)
from smartspec_py.engines.torch.packed import RowInput

SMALL = Ladder(rows=(1, 2, 4), context_lens=(8, 10))
MAX_LEN = 10
SCRATCH = 40
"""Four rows of ten slots, then scratch."""

ladders = st.builds(make_ladder, st.integers(1, 1024), st.integers(2, 40_000))
needs = st.tuples(st.integers(1, 1100), st.integers(1, MAX_WIDTH + 4), st.integers(1, 45_000))


def covers(bucket: Bucket, num_rows: int, width: int, context_len: int) -> bool:
    return (
        bucket.num_rows >= num_rows and bucket.width >= width and bucket.context_len >= context_len
    )


@pytest.mark.parametrize(
    ("num_rows", "max_len", "rows", "context_lens"),
    [
        (1, 96, (1,), (96,)),
        (5, 256, (1, 2, 4, 5), (256,)),
        (32, 1000, (1, 2, 4, 8, 16, 32), (256, 512, 1000)),
        (33, 1024, (1, 2, 4, 8, 16, 32, 33), (256, 512, 1024)),
    ],
)
def test_rows_and_contexts_double_up_to_the_most(
    num_rows: int, max_len: int, rows: tuple[int, ...], context_lens: tuple[int, ...]
) -> None:
    ladder = make_ladder(num_rows, max_len)
    assert (ladder.rows, ladder.context_lens) == (rows, context_lens)


def test_the_number_of_graphs() -> None:
    """32 rows: 6 sizes of 8 widths, 5 of width 24 and 4 of width 33, none above 512 tokens, by 5
    contexts up to 4096. With 128 rows, 64 times 12 or 16 and 128 times 6 to 16 are too many tokens.
    Decoding with up to 7 drafts leaves out the widths from 12 on."""
    assert len(make_ladder(32, 4096).buckets(MAX_WIDTH)) == (6 * 8 + 5 + 4) * 5
    assert len(make_ladder(128, 256).buckets(MAX_WIDTH)) == 6 * 8 + 5 + 4 + 6 + 4
    assert len(make_ladder(32, 4096).buckets(8)) == 6 * 6 * 5


@given(ladders, needs)
def test_a_bucket_is_the_least_that_holds_the_pass(
    ladder: Ladder, need: tuple[int, int, int]
) -> None:
    """There is none exactly where no bucket could hold it, or where padding makes it too long."""
    bucket = ladder.bucket_for(*need)
    holding = [b for b in ladder.buckets(MAX_WIDTH) if covers(b, *need)]
    if bucket is None:
        rows, width = (
            next((size for size in sizes if size >= side), None)
            for sizes, side in zip((ladder.rows, ladder.widths), need[:2], strict=True)
        )
        is_beyond = need[2] > ladder.context_lens[-1]
        assert is_beyond or rows is None or width is None or rows * width > MAX_TOKENS
        return
    assert bucket in holding
    for other in holding:
        assert covers(other, bucket.num_rows, bucket.width, bucket.context_len)


@given(ladders)
def test_buckets_come_largest_first_and_fit_the_static_buffers(ladder: Ladder) -> None:
    buckets = ladder.buckets(MAX_WIDTH)
    sizes = [bucket.num_tokens for bucket in buckets]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(buckets)) == len(buckets)
    assert sizes[0] == ladder.max_tokens <= max(MAX_TOKENS, ladder.rows[-1])


def test_a_padded_pass_by_hand() -> None:
    """Rows 2 and 0, given in that order; row 1 has nothing, row 3 is beyond them. Width 3."""
    inputs = [RowInput(2, 5, [71, 72, 73], 2), RowInput(0, 0, [11], 1)]
    bucket = SMALL.bucket_of(inputs)
    assert bucket == Bucket(num_rows=4, width=3, context_len=8)
    found = lay_out(inputs, bucket, MAX_LEN, SCRATCH)
    assert found.token_ids == [11, 0, 0, 0, 0, 0, 71, 72, 73, 0, 0, 0]
    assert found.positions == [0, 0, 0, 0, 0, 0, 5, 6, 7, 0, 0, 0]
    assert found.slots == [0, 40, 40, 40, 40, 40, 25, 26, 27, 40, 40, 40]
    assert found.seen == [1, 1, 1, 1, 1, 1, 0b1, 0b11, 0b111, 1, 1, 1]
    assert found.wanted == [7, 8, 0], "the last two of row 2, then row 0"


def test_a_padded_tree_by_hand() -> None:
    """Two drafts after the root, and one after the second of them."""
    inputs = [RowInput(1, 5, [71, 72, 73, 74], 4, (ROOT, ROOT, 1))]
    found = lay_out(inputs, Bucket(2, 4, 10), MAX_LEN, SCRATCH)
    assert found.positions[4:] == [5, 6, 6, 7]
    assert found.slots[4:] == [15, 16, 17, 18]
    assert found.seen == [1, 1, 1, 1, 0b1, 0b11, 0b101, 0b1101]


def test_a_pass_of_padding_touches_the_scratch_slot_alone() -> None:
    found = lay_out([], Bucket(2, 4, 8), MAX_LEN, SCRATCH)
    assert found.slots == [SCRATCH] * 8
    assert found.wanted == []


@st.composite
def passes(draw: st.DrawFn) -> list[RowInput]:
    """Some of 8 rows of 64 slots, each with up to 16 tokens."""
    rows = draw(st.lists(st.integers(0, 7), min_size=1, unique=True))
    inputs = []
    for row in rows:
        tokens = draw(st.lists(st.integers(0, 999), min_size=1, max_size=16))
        position = draw(st.integers(0, 64 - len(tokens)))
        inputs.append(RowInput(row, position, tokens, draw(st.integers(0, len(tokens)))))
    return inputs


@given(passes())
def test_every_token_stands_once_and_everything_else_is_scratch(inputs: list[RowInput]) -> None:
    bucket = make_ladder(8, 64).bucket_of(inputs)
    assert bucket is not None
    found = lay_out(inputs, bucket, 64, 8 * 64)
    expected = {
        item.row * 64 + item.position + j: token
        for item in inputs
        for j, token in enumerate(item.tokens)
    }
    real = [i for i, slot in enumerate(found.slots) if slot != 8 * 64]
    assert len(real) == len(expected), "no slot is written twice"
    for i in real:
        slot = found.slots[i]
        assert slot // 64 == i // bucket.width, "a token stands in its row"
        assert slot % 64 == found.positions[i]
        assert expected[slot] == found.token_ids[i]
    asked = [t for item in inputs for t in item.tokens[len(item.tokens) - item.num_logits :]]
    assert [found.token_ids[i] for i in found.wanted] == asked
