"""The layout of captured passes: sizes, places of tokens, and tiles of attention."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.engines.draft import Tree
from smartspec_py.engines.runtimes.pytorch.layout import (
    SHORT,
    SIZES,
    Line,
    Tiling,
    lay_out,
    size_of,
)
from smartspec_py.engines.runtimes.runner import RowInput

MAX_LEN, NUM_ROWS = 200, 8
SCRATCH = MAX_LEN * NUM_ROWS


def test_a_pass_by_hand() -> None:
    """Row 2 verifies two drafts from slot 5, and its keys begin at slot 1. Row 0 decodes. Three
    tokens of padding. A tile has two tokens."""
    inputs = [RowInput(2, 5, [71, 72, 73], 2, first=1, adapter=4), RowInput(0, 0, [11], 1)]
    made, firsts = lay_out(inputs, 8, Tiling(4, 2, 8), 10, 40)
    assert firsts == [0, 3]
    assert made[Line.TOKEN_ID].tolist() == [71, 72, 73, 11, 0, 0, 0, 0]
    assert made[Line.POSITION].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert made[Line.SLOT].tolist() == [25, 26, 27, 0, 40, 40, 40, 40]
    assert made[Line.FIRST_SLOT][:4].tolist() == [21, 21, 21, 0]
    assert made[Line.INPUT_SLOT][:4].tolist() == [25, 25, 25, 0]
    assert made[Line.ADAPTER].tolist() == [4, 4, 4, 0, 0, 0, 0, 0]
    assert set(made[Line.SEEN].tolist()) == {-1}
    assert made[Line.SHORT_TILE][:3].tolist() == [0, 2, 3]
    assert made[Line.SHORT_COUNT].tolist() == [2, 1, 1, 0, 0, 0, 0, 0]
    assert not made[Line.LONG_COUNT].any()


def test_what_tokens_of_a_tree_see() -> None:
    """1 and 2 follow 0; 3 follows 1; 4 follows what 0 follows, which is in the row. Of a chain, all
    that is not later."""
    tree = RowInput(1, 5, [7, 8, 9, 10, 11], 5, tree=Tree((0, 1, 1, 2, 0)))
    made, _ = lay_out([tree, RowInput(0, 2, [1, 1], 1)], 8, Tiling(2, 2, 8), 20, 40)
    assert made[Line.SEEN][:7].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10000, -1, -1]
    assert made[Line.POSITION][:5].tolist() == [5, 6, 6, 7, 5]
    assert made[Line.SLOT][:5].tolist() == [25, 26, 27, 28, 29]
    widest = RowInput(1, 5, [7] * 64, 64, tree=Tree((0,) * 64))
    assert widest.seen.tolist()[-1] == -(1 << 63), "the last bit is the sign"


@pytest.mark.parametrize(
    ("num_shared", "short", "long"),
    [(1, 16, 64), (3, 4, 16), (4, 4, 16), (8, 2, 8), (16, 1, 4), (71, 1, 1)],
)
def test_tokens_of_a_tile(num_shared: int, short: int, long: int) -> None:
    """All heads that share a key head fill 16 or 64 lines."""
    assert Tiling.of(4, num_shared) == Tiling(4, short, long)


def test_sizes() -> None:
    for num_tokens, expected in ((1, 1), (3, 4), (17, 24), (1024, 1024), (1025, None)):
        inputs = [RowInput(0, 0, [1] * (num_tokens - num_tokens // 2), 1)]
        if num_tokens // 2:
            inputs.append(RowInput(1, 0, [1] * (num_tokens // 2), 0))
        assert size_of(inputs) == expected


@given(
    st.lists(st.one_of(st.integers(1, 4), st.integers(1, 150)), min_size=1, max_size=NUM_ROWS),
    st.sampled_from([1, 3, 4, 8, 40]),
)
def test_each_token_is_in_one_tile_of_its_input(lengths: list[int], num_shared: int) -> None:
    """Tiles are contiguous, of the kind of their input, and no more than a graph launches."""
    inputs = [RowInput(row, 3, [row] * length, 1) for row, length in enumerate(lengths)]
    size = size_of(inputs)
    if size is None:
        assert sum(lengths) > SIZES[-1]
        return
    tiling = Tiling.of(NUM_ROWS, num_shared)
    made, firsts = lay_out(inputs, size, tiling, MAX_LEN, SCRATCH)
    owner = np.repeat(np.arange(len(inputs)), lengths)
    num_tiles = np.zeros(size, int)
    kinds = (
        (Line.SHORT_TILE, Line.SHORT_COUNT, tiling.num_short(size), tiling.short, True),
        (Line.LONG_TILE, Line.LONG_COUNT, tiling.num_long(size), tiling.long, False),
    )
    for tile, count, most, longest, is_short in kinds:
        assert not made[count][most:].any(), "launched programs cover all tiles"
        for first, num in zip(made[tile][:most], made[count][:most], strict=True):
            assert num <= longest
            num_tiles[first : first + num] += 1
            owners = set(owner[first : first + num])
            assert len(owners) <= 1
            assert all((lengths[i] <= SHORT) is is_short for i in owners)
    assert num_tiles.tolist() == [1] * sum(lengths) + [0] * (size - sum(lengths))
    for first, item in zip(firsts, inputs, strict=True):
        slots = made[Line.SLOT][first : first + len(item.tokens)].tolist()
        assert slots == [item.row * MAX_LEN + position for position in item.positions]
    assert set(made[Line.SLOT][sum(lengths) :].tolist()) <= {SCRATCH}
