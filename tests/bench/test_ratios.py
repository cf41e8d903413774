"""Intervals and cross-fitting by hand."""

from __future__ import annotations

import math
import random

import pytest

from smartspec_bench.comparison import cross_fit, interval, paired


def by_repeat(*values: float) -> dict[int, float]:
    """Logarithms of these values."""
    return dict(enumerate(map(math.log, values)))


def test_interval_by_hand() -> None:
    """The docstring's: logarithms 0 and 1."""
    ratio = interval([0.0, 1.0])
    assert ratio is not None
    assert ratio.value == pytest.approx(math.exp(0.5))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(0.5 - 6.353), math.exp(0.5 + 6.353)))


def test_one_pair_has_no_interval() -> None:
    assert interval([0.1]) is None
    assert paired({0: 0.0, 1: 2.0}, {1: 2.0, 2: 3.0}) is None


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


@pytest.mark.parametrize(
    ("policy", "fixed", "value"),
    [
        # Even repeats choose fixed:1 and odd ones fixed:2, and each is compared on the others.
        ((10, 10, 10, 10), {"fixed:1": (10, 20, 10, 20), "fixed:2": (20, 10, 20, 10)}, 0.5),
        # An interrupted run: repeat 2 has no fixed:2.
        ((1, 1, 99), {"fixed:1": (1, 1, 1), "fixed:2": (2, 2)}, 1.0),
        ((1, 1), {}, None),
        ((1,), {"fixed:1": (1,)}, None),
    ],
)
def test_cross_fitting_by_hand(
    policy: tuple[float, ...], fixed: dict[str, tuple[float, ...]], value: float | None
) -> None:
    lengths = {name: by_repeat(*values) for name, values in fixed.items()}
    found = cross_fit(by_repeat(*policy), lengths)
    assert (found and found.value) == (value and pytest.approx(value))
