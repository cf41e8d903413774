"""Which rows attention takes in one call, against every way to cut them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.engines.torch.packed import (
    CALL_BYTES,
    QUERIES_PER_READ,
    RowInput,
    attended_together,
    pack,
)

CPU = torch.device("cpu")
KEY_BYTES = 1024
"""Eight heads of 16 in float32: a call is then worth 488 keys."""


def inputs_of(*sizes: tuple[int, int]) -> list[RowInput]:
    """Rows 0, 1, .. from (tokens before, new tokens)."""
    return [RowInput(row, first, [1] * new, new) for row, (first, new) in enumerate(sizes)]


def group_sizes(inputs: Sequence[RowInput], key_bytes: int = KEY_BYTES) -> list[int]:
    return [len(group) for group in attended_together(inputs, key_bytes)]


def time_of(groups: Sequence[Sequence[RowInput]], key_bytes: int) -> float:
    """In keys read by QUERIES_PER_READ: every row from the first to the last is padded."""
    total = 0.0
    for group in groups:
        num_rows = group[-1].row - group[0].row + 1
        context_len = max(item.position + len(item.tokens) for item in group)
        width = max(len(item.tokens) for item in group)
        total += CALL_BYTES * QUERIES_PER_READ / key_bytes
        total += num_rows * context_len * (QUERIES_PER_READ + width)
    return total


def every_cut(inputs: Sequence[RowInput]) -> Iterator[list[Sequence[RowInput]]]:
    last = len(inputs)
    for num_cuts in range(last):
        for cuts in combinations(range(1, last), num_cuts):
            bounds = (0, *cuts, last)
            yield [inputs[a:b] for a, b in pairwise(bounds)]


@given(
    st.dictionaries(
        st.integers(0, 11),
        st.tuples(st.sampled_from((9, 100, 300, 2000)), st.sampled_from((1, 2, 9))),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from((256, 1024, 4096, 65536)),
)
def test_no_other_cut_takes_less(rows: dict[int, tuple[int, int]], key_bytes: int) -> None:
    inputs = [RowInput(row, rows[row][0], [1] * rows[row][1], 1) for row in sorted(rows)]
    found = attended_together(inputs, key_bytes)
    assert [item for group in found for item in group] == inputs
    least = min(time_of(groups, key_bytes) for groups in every_cut(inputs))
    assert time_of(found, key_bytes) <= least * (1 + 1e-9)


def test_rows_alike_are_attended_together() -> None:
    assert group_sizes(inputs_of(*[(300, 3)] * 8)) == [8]
    assert group_sizes([]) == []


def test_one_long_context_is_not_paid_for_by_all() -> None:
    """15 rows that each would look at 1,900 keys more; with one neighbour it is worth no call."""
    sizes = [(100, 1)] * 16
    sizes[5] = (2000, 1)
    assert group_sizes(inputs_of(*sizes)) == [5, 1, 10]
    assert group_sizes(inputs_of((100, 1), (500, 1))) == [2]


def test_many_drafts_of_one_row_are_not_paid_for_by_all() -> None:
    sizes = [(300, 1)] * 16
    sizes[0] = (300, 16)
    assert group_sizes(inputs_of(*sizes)) == [1, 15]


def test_the_bigger_a_key_the_sooner_a_call_is_worth_it() -> None:
    sizes = inputs_of((100, 1), (500, 1))
    assert group_sizes(sizes, key_bytes=8192) == [1, 1]


def test_a_prompt_chunk_does_not_decide_how_drafts_are_attended() -> None:
    """At 100 keys padding three rows to six tokens takes less than a call for one of them; at the
    4,000 that the chunk looks at it would not."""
    drafts = inputs_of((94, 1), (94, 1), (94, 6))
    chunk = RowInput(3, 3900, [1] * 100, 0)
    assert len(pack(drafts, 4096, CPU, KEY_BYTES).groups) == 1
    assert len(pack([*drafts, chunk], 4096, CPU, KEY_BYTES).groups) == 2


def test_batch_invariant_rows_share_a_call_whatever_their_contexts() -> None:
    inputs = inputs_of((100, 1), (2000, 1), (100, 1))
    assert len(pack(inputs, 4096, CPU, KEY_BYTES).groups) == 3
    assert len(pack(inputs, 4096, CPU, KEY_BYTES, batch_invariant=True).groups) == 1
