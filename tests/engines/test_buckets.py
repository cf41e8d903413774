"""Which bucket a pass is padded to, and where its tokens stand there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.engines.runtimes.pytorch.buckets import (
    MAX_TOKENS,
    MAX_WIDTH,
    WIDTHS,
    Bucket,
    bucket_of,
    lay_out,
    make_buckets,
)
from smartspec_py.engines.runtimes.runner import RowInput

MAX_LEN = 10
SCRATCH = 40
"""Four rows of ten slots, then scratch."""


@pytest.mark.parametrize(
    ("num_rows", "max_len", "rows", "context_lens"),
    [
        (1, 96, {1}, {96}),
        (5, 256, {1, 2, 4, 5}, {256}),
        (33, 1000, {1, 2, 4, 8, 16, 32, 33}, {256, 512, 1000}),
    ],
)
def test_rows_and_contexts_double_up_to_the_most(
    num_rows: int, max_len: int, rows: set[int], context_lens: set[int]
) -> None:
    found = make_buckets(num_rows, max_len)
    assert ({b.num_rows for b in found}, {b.context_len for b in found}) == (rows, context_lens)


def test_the_number_of_graphs() -> None:
    """32 rows: 6 sizes of 8 widths, 5 of width 24 and 4 of width 33, none above 512 tokens, by 5
    contexts up to 4096. With 128 rows, 64 times 12 or 16 and 128 times 6 to 16 are too many tokens.
    Decoding with up to 7 drafts leaves out the widths from 12 on."""
    assert len(make_buckets(32, 4096)) == (6 * 8 + 5 + 4) * 5
    assert len(make_buckets(128, 256)) == 6 * 8 + 5 + 4 + 6 + 4
    assert len(make_buckets(32, 4096, 8)) == 6 * 6 * 5


@given(
    st.tuples(st.integers(1, 1024), st.integers(2, 40_000)),
    st.tuples(st.integers(1, 1100), st.integers(1, MAX_WIDTH + 4), st.integers(1, 45_000)),
)
def test_a_bucket_is_the_least_that_holds_the_pass(
    sizes: tuple[int, int], need: tuple[int, int, int]
) -> None:
    """There is none exactly where no bucket could hold it, or where padding makes it too long."""
    buckets = make_buckets(*sizes)
    rows, width, context_len = need
    inputs = [RowInput(rows - 1, max(0, context_len - width), [0] * width, 0)]
    context_len = max(context_len, width)
    found = bucket_of(inputs, buckets)
    least = [
        min((size for size in made if size >= side), default=None)
        for made, side in (
            ({b.num_rows for b in buckets}, rows),
            (WIDTHS, width),
            ({b.context_len for b in buckets}, context_len),
        )
    ]
    if None in least or (least[0] * least[1] > MAX_TOKENS and least[1] > 1):
        assert found is None
    else:
        assert found == Bucket(*least)


def test_a_padded_pass_by_hand() -> None:
    """Rows 2 and 0, given in that order; row 1 has nothing, row 3 is beyond them. Width 3."""
    inputs = [RowInput(2, 5, [71, 72, 73], 2, first=1, adapter=4), RowInput(0, 0, [11], 1)]
    made, num_wanted = lay_out(inputs, Bucket(4, 3, 8), MAX_LEN, SCRATCH)
    token_ids, positions, slots, rows, firsts, adapters, wanted = made.tolist()
    assert token_ids == [11, 0, 0, 0, 0, 0, 71, 72, 73, 0, 0, 0]
    assert positions == [0, 0, 0, 0, 0, 0, 5, 6, 7, 0, 0, 0]
    assert slots == [0, 40, 40, 40, 40, 40, 25, 26, 27, 40, 40, 40]
    assert rows[:4] == [0, 1, 2, 3]
    assert firsts[:4] == [0, 0, 1, 0]
    assert adapters == [0, 0, 0, 0, 0, 0, 4, 4, 4, 0, 0, 0]
    assert wanted[:num_wanted] == [7, 8, 0], "the last two of row 2, then row 0"


def test_a_long_input_by_hand() -> None:
    """In row 3, from position 2: its tokens are the first of the bucket."""
    made, num_wanted = lay_out([RowInput(3, 2, [7] * 40, 1)], Bucket(1, 64, 64), 64, 256)
    token_ids, positions, slots, rows, *_, wanted = made.tolist()
    assert token_ids == [7] * 40 + [0] * 24
    assert positions == [*range(2, 42)] + [0] * 24
    assert slots == [*range(194, 234)] + [256] * 24
    assert (rows[0], wanted[:num_wanted]) == (3, [39])
