"""The published costs."""

from __future__ import annotations

import pytest

from smartspec_sim.hardware import published


def test_the_published_fit() -> None:
    """8 rows of 4 tokens, 1,000 of context: 32 x 18.44 us - 8 x 43.31 us + 6.939 ms = 7.1826 ms,
    and 8,000 x 48.59 ns = 0.3887 ms."""
    cost = published().cost
    assert cost.target_s(8, 32, 0) == pytest.approx(7.1826e-3, rel=1e-4)
    assert cost.target_s(8, 32, 1000) == pytest.approx(7.5713e-3, rel=1e-4)
