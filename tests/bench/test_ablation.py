"""The ablation: what its patches name exists, and one cell of its table."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

from smartspec_bench.ablation import PARTS, conditions


def test_every_part_can_be_left_out() -> None:
    for change in PARTS.values():
        with ExitStack() as stack:
            for one in change.get("patches", ()):
                stack.enter_context(patch.object(*one))


def test_a_cell() -> None:
    """With one request, speculation pays, and a run repeats exactly."""
    condition = conditions()[0]
    with_all = condition.tokens_per_s(1)
    assert with_all == condition.tokens_per_s(1)
    assert with_all > 1.1 * condition.tokens_per_s(1, **PARTS["speculation"])
