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
