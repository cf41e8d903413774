"""Arrivals: times by hand, rates by counting, and the same seed twice."""

from __future__ import annotations

import math
from itertools import islice

import pytest

from smartspec_sim.arrivals import (
    RatePhase,
    arrival_times,
    constant_gaps,
    gamma_gaps,
    parse_phases,
    pattern_gaps,
    poisson_gaps,
    steady,
    trace_times,
)


@pytest.mark.parametrize(
    ("phases", "times"),
    [
        # 2 s at 1/s, then 2 s at 2/s: 2 arrivals in the first, 4 in the second.
        ((RatePhase(2, 1), RatePhase(2, 2)), [1, 2, 2.5, 3, 3.5, 4]),
        # Nothing comes while the rate is 0: the third arrival is due half a second later.
        ((RatePhase(2, 1), RatePhase(3, 0), RatePhase(1, 2)), [1, 2, 5.5, 6]),
        ((RatePhase(3, 0),), []),
        # From 0 to 2 in 2 s: t^2 / 2 arrivals up to t, so sqrt(2) and 2.
        ((RatePhase(2, 0, 2),), [math.sqrt(2), 2]),
        # From 2 to 0 in 2 s: 2t - t^2 / 2 = n, so 2 - sqrt(2) and 2.
        ((RatePhase(2, 2, 0),), [2 - math.sqrt(2), 2]),
    ],
)
def test_even_gaps_by_hand(phases: tuple[RatePhase, ...], times: list[float]) -> None:
    assert list(arrival_times(constant_gaps(), phases)) == pytest.approx(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_mean_1_and_variance_1_over_burstiness(burstiness: float) -> None:
    """Of 40,000 gaps. The mean's deviation is 0.01 at burstiness 0.25 and less above: 4.5 of them
    are a false alarm in 7e-6. The variance of gaps of shape b is off by sqrt((2 + 6/b) / n) of
    itself at one deviation, 2.5 % at b = 0.25: 12 % are 4.7 of them, 3e-6."""
    gaps = list(islice(gamma_gaps(burstiness, seed=3), 40_000))
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1.0, abs=0.045)
    assert variance * burstiness == pytest.approx(1.0, abs=0.12)


def test_a_ramp_of_poisson_arrivals_has_the_area_under_its_rate() -> None:
    """0 to 100/s in 100 s: 1,250 expected in the first half, 3,750 in the second, with deviations
    35 and 61: 4.5 of them are 7e-6."""
    times = list(arrival_times(poisson_gaps(seed=9), [RatePhase(100, 0, 100)]))
    early = sum(time < 50 for time in times)
    assert early == pytest.approx(1250, abs=4.5 * 35.4)
    assert len(times) - early == pytest.approx(3750, abs=4.5 * 61.3)


@pytest.mark.parametrize("pattern", ["poisson", "gamma", "constant"])
def test_a_seed_says_all(pattern: str) -> None:
    def times(seed: int) -> list[float]:
        return list(islice(arrival_times(pattern_gaps(pattern, 0.5, seed), steady(3.0)), 50))

    assert times(1) == times(1)
    assert (times(1) == times(2)) == (pattern == "constant")
    assert times(1) == sorted(times(1))


def test_a_trace_is_sorted_and_begins_at_0() -> None:
    assert list(trace_times([107.0, 105.0, 105.5])) == [0.0, 0.5, 2.0]
    assert list(trace_times([])) == []


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("40:1", (RatePhase(40, 1),)),
        ("60:1-16, 5:0", (RatePhase(60, 1, 16), RatePhase(5, 0))),
    ],
)
def test_phases_are_read(text: str, phases: tuple[RatePhase, ...]) -> None:
    assert parse_phases(text) == phases


@pytest.mark.parametrize("text", ["", "40", "40:", "x:1", "40:1-", "0:1", "40:-1", "40:1,"])
def test_phases_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="must be SECONDS:RATE"):
        parse_phases(text)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.inf, math.nan])
def test_burstiness_has_a_range(burstiness: float) -> None:
    with pytest.raises(ValueError, match="burstiness"):
        next(gamma_gaps(burstiness, 1))
