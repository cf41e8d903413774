"""Arrival times of requests, in seconds from the start of the load, in ascending order.

The functions are pure and seeded. The simulator and `bench lockstep` share them. An arrival process
has two parts. Gaps of mean 1 define the burstiness, and a rate over time scales the gaps. For
Poisson gaps the result is exactly the Poisson process with this rate. For other gaps, scaling keeps
the mean rate, and keeps the burstiness relative to the current rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat


@dataclass(frozen=True, slots=True)
class RatePhase:
    """A period of time with a request rate, in requests per second.

    end_rate: rate at the end of a linear ramp; None means a constant rate.
    """

    duration_s: float
    rate: float
    end_rate: float | None = None

    @property
    def last_rate(self) -> float:
        return self.rate if self.end_rate is None else self.end_rate

    @property
    def num_expected(self) -> float:
        """Expected number of arrivals in the phase: the integral of the rate."""
        return (self.rate + self.last_rate) / 2 * self.duration_s

    def time_of(self, count: float) -> float:
        """Seconds into the phase at which `count` arrivals are expected.

        Solves rate t + slope t^2 / 2 = count, in the form that stays accurate for small slopes.
        Example: the rate is 1 at the start and 3 after 4 s, so the slope is 1/2. 2 arrivals are
        expected at t = 2 * 2 / (1 + sqrt(1 + 2)) = 1.464, because 1.464 + 1.464^2 / 4 = 2.
        """
        slope = (self.last_rate - self.rate) / self.duration_s
        root = math.sqrt(max(0.0, self.rate * self.rate + 2 * slope * count))
        return 2 * count / (self.rate + root)


def gamma_gaps(burstiness: float, seed: int) -> Iterator[float]:
    """Gamma-distributed gaps of mean 1, with shape `burstiness` and variance 1 / burstiness.

    The term is that of vLLM's benchmark. 1 is a Poisson process, lower values are burstier, higher
    values are more even.
    """
    rng = random.Random(seed)
    while True:
        yield rng.gammavariate(burstiness, 1 / burstiness)


def poisson_gaps(seed: int) -> Iterator[float]:
    """Exponential gaps of mean 1."""
    return gamma_gaps(1.0, seed)


def constant_gaps() -> Iterator[float]:
    """Gaps that are all 1."""
    return repeat(1.0)


def arrival_times(gaps: Iterable[float], phases: Sequence[RatePhase]) -> Iterator[float]:
    """Arrival times with these gaps and rates, until the last phase ends.

    The n-th arrival is at the time when the integral of the rate equals the sum of the first n
    gaps. Constant gaps, 2 s at 1/s and then 2 s at 2/s, give 1, 2, 2.5, 3, 3.5 and 4 s.
    """
    position = 0.0
    area, start_s, index = 0.0, 0.0, 0
    for gap in gaps:
        position += gap
        while index < len(phases) and _is_past(phases[index], position - area):
            area += phases[index].num_expected
            start_s += phases[index].duration_s
            index += 1
        if index == len(phases):
            return
        yield start_s + phases[index].time_of(position - area)


def _is_past(phase: RatePhase, count: float) -> bool:
    return count > phase.num_expected or not phase.num_expected
