"""Which rows attention takes in one call."""

from __future__ import annotations

import pytest
import torch

from smartspec_py.engines.torch.packed import MAX_SHORT, RowInput, pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_short_inputs_share_a_call_and_chunks_of_prompts_have_their_own(
    batch_invariant: bool,
) -> None:
    short = [RowInput(row, before, [1] * new, new) for row, before, new in ((3, 9, 1), (1, 70, 4))]
    chunks = [RowInput(row, 2000, [1] * (MAX_SHORT + 1), 0) for row in (0, 2)]
    packed = pack([chunks[0], *short, chunks[1]], 4096, CPU, batch_invariant)
    rows = [(group.row_lo, group.row_hi) for group in packed.groups]
    assert rows == [(1, 4), (0, 1), (2, 3)]
    assert packed.groups[0].context_len == (512 if batch_invariant else 74)
    assert [group.last - group.first for group in packed.groups] == [5, 17, 17]


def test_one_long_context_is_not_paid_for_by_all() -> None:
    """With the rows before it 6 x 2,001 keys would be read for 2,506: more than twice as many and
    512. With the next one 2 x 2,001 for 2,102 are not, with two more 3 x 2,001 for 2,203 are."""
    inputs = [RowInput(row, 2000 if row == 5 else 100, [1], 1) for row in range(16)]
    rows = [(group.row_lo, group.row_hi) for group in pack(inputs, 4096, CPU).groups]
    assert rows == [(0, 5), (5, 7), (7, 16)]
    assert len(pack(inputs, 4096, CPU, batch_invariant=True).groups) == 1
