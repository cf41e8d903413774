"""The published costs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from smartspec_sim.hardware import published


def test_the_published_fit() -> None:
    """8 rows of 4 tokens, 1,000 of context: 32 x 18.44 us - 8 x 43.31 us + 6.939 ms = 7.1826 ms,
    and 8,000 x 48.59 ns = 0.3887 ms."""
    cost = published().cost
    assert cost.target_s(8, 32, 0) == pytest.approx(7.1826e-3, rel=1e-4)
    assert cost.target_s(8, 32, 1000) == pytest.approx(7.5713e-3, rel=1e-4)


def test_larger_passes_do_not_take_less_time() -> None:
    """In rows at each number of tokens per row, also above the 32 rows of the fit, and in tokens
    at each number of rows."""
    cost = published().cost
    for tokens in (1, 2, 5, 8):
        by_rows = [cost.target_s(rows, rows * tokens, 500) for rows in range(1, 129)]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(by_rows))
    for rows in (1, 8, 33, 100):
        by_tokens = [cost.target_s(rows, tokens, 500) for tokens in range(rows, 16 * rows)]
        assert all(a <= b for a, b in pairwise(by_tokens))
    assert all(cost.draft_s(rows) <= cost.draft_s(rows + 1) for rows in range(1, 128))
