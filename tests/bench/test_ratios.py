"""Intervals and cross-fitting by hand."""

from __future__ import annotations

import math
import random

import pytest

from smartspec_bench.comparison import cross_fit, interval, paired


def by_repeat(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_interval_by_hand() -> None:
    """The docstring's: logarithms 0 and 1."""
    ratio = interval([0.0, 1.0])
    assert ratio is not None
    assert ratio.value == pytest.approx(math.exp(0.5))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(0.5 - 6.353), math.exp(0.5 + 6.353)))
    assert ratio.num_pairs == 2


def test_one_pair_has_no_interval() -> None:
    assert interval([0.1]) is None
    assert paired({0: 1.0, 1: 2.0}, {1: 2.0, 2: 3.0}) is None


def test_pairs_are_by_repeat() -> None:
    """A machine that gets ten times slower changes no ratio: 1/2 in every repeat, exactly."""
    ratio = paired(by_repeat(1.0, 10.0, 100.0), by_repeat(2.0, 20.0, 200.0))
    assert ratio is not None
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((0.5, 0.5, 0.5))


def test_the_interval_covers_as_often_as_it_says() -> None:
    """2,000 samples of 4 around 0: 95 % of the intervals hold 0. The standard error is 0.5 %, so
    a right one is outside of 93 to 97 % once in 15,000 seeds."""
    rng = random.Random(1)
    samples = [interval([rng.gauss(0, 0.1) for _ in range(4)]) for _ in range(2000)]
    covered = sum(one is not None and one.low <= 1 <= one.high for one in samples)
    assert 0.93 < covered / 2000 < 0.97


def test_each_half_is_scored_by_the_others_choice() -> None:
    """Even repeats prefer fixed:1, odd ones fixed:2; so fixed:2 is scored on the even repeats and
    fixed:1 on the odd ones: 10/20 in each, and not the 10/10 of a choice in hindsight."""
    fixed = {"fixed:1": by_repeat(10, 20, 10, 20), "fixed:2": by_repeat(20, 10, 20, 10)}
    found = cross_fit(by_repeat(10, 10, 10, 10), fixed)
    assert found is not None
    assert found.value == pytest.approx(0.5)
    assert found.num_pairs == 4


def test_only_whole_repeats_count() -> None:
    """An interrupted run: repeat 2 has no fixed:2."""
    fixed = {"fixed:1": by_repeat(1, 1, 1), "fixed:2": by_repeat(2, 2)}
    found = cross_fit(by_repeat(1, 1, 99), fixed)
    assert found is not None
    assert found.num_pairs == 2
    assert found.value == pytest.approx(1.0)


def test_nothing_to_compare() -> None:
    assert cross_fit(by_repeat(1, 1), {}) is None
    assert cross_fit(by_repeat(1), {"fixed:1": by_repeat(1)}) is None
