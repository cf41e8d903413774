"""Arrival times worked by hand, and rates by counting."""

from __future__ import annotations

import math
from itertools import islice

import pytest

from smartspec_sim.arrivals import (
    RatePhase,
    arrival_times,
    constant_gaps,
    gamma_gaps,
)


@pytest.mark.parametrize(
    ("phases", "times"),
    [
        # 2 s at 1/s, then 2 s at 2/s: 2 arrivals in the first, 4 in the second.
        ([(2, 1), (2, 2)], [1, 2, 2.5, 3, 3.5, 4]),
        # Nothing arrives while the rate is 0: the third arrival is due half a second later.
        ([(2, 1), (3, 0), (1, 2)], [1, 2, 5.5, 6]),
        ([(3, 0)], []),
        # From 0 to 2 in 2 s: t^2 / 2 arrivals up to t, so sqrt(2) and 2.
        ([(2, 0, 2)], [math.sqrt(2), 2]),
        # From 2 to 0 in 2 s: 2t - t^2 / 2 = n, so 2 - sqrt(2) and 2.
        ([(2, 2, 0)], [2 - math.sqrt(2), 2]),
    ],
)
def test_constant_gaps(phases: list[tuple[float, ...]], times: list[float]) -> None:
    found = arrival_times(constant_gaps(), [RatePhase(*phase) for phase in phases])
    assert list(found) == pytest.approx(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_mean_1_and_variance_1_over_burstiness(burstiness: float) -> None:
    """40,000 gaps. The standard deviation of the mean is at most 0.01: 4.5 of them fail in 7e-6 of
    cases. The relative one of the variance is sqrt((2 + 6/b) / n), at most 2.5 %: 12 % is 3e-6."""
    gaps = list(islice(gamma_gaps(burstiness, seed=3), 40_000))
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1.0, abs=0.045)
    assert variance * burstiness == pytest.approx(1.0, abs=0.12)
