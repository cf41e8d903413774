"""The ablation: what its patches name exists, and cells of its table."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest

from smartspec_bench.ablation import BASE, MECHANISMS, conditions


def test_every_mechanism_can_be_left_out() -> None:
    for mechanism in MECHANISMS:
        with ExitStack() as stack:
            for change in mechanism.patches:
                stack.enter_context(patch.object(*change))


def test_requests_of_every_condition_are_the_same_for_a_seed() -> None:
    for condition in conditions():
        one, again, other = (
            [(r.arrival_s, r.prompt_len, r.output_len) for r in condition.requests(seed)]
            for seed in (1, 1, 2)
        )
        assert one == again != other


def test_a_cell() -> None:
    """With one request, speculation pays, and a run repeats exactly."""
    condition = conditions()[0]
    with_all = condition.tokens_per_s(BASE, 1)
    assert with_all == pytest.approx(condition.tokens_per_s(BASE, 1))
    assert with_all > 1.1 * condition.tokens_per_s(MECHANISMS[-1], 1)
