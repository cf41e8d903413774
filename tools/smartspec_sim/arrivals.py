"""When requests arrive: absolute times in seconds from the start of the load, ascending.

Pure and seeded, shared by the simulator and the open-loop runner. A process is made of two parts:
gaps of mean 1, which say how bursty arrivals are, and a rate over time, which stretches them. For
Poisson gaps that change of time is exact: the result is the Poisson process with that rate. For the
others it keeps the mean rate, and the burstiness in units of the rate at that time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile


@dataclass(frozen=True, slots=True)
class RatePhase:
    """A stretch of time with a rate, in requests a second.

    end_rate: None is a constant rate; else the rate moves there in a straight line.
    """

    duration_s: float
    rate: float
    end_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.duration_s > 0:
            raise ValueError(f"duration_s: got {self.duration_s}, must be above 0")
        for name, rate in (("rate", self.rate), ("end_rate", self.last_rate)):
            if not 0 <= rate < math.inf:
                raise ValueError(f"{name}: got {rate}, must be at least 0 and finite")
        if math.isinf(self.duration_s) and self.end_rate is not None:
            raise ValueError("end_rate: a phase without end can have no other rate at its end")

    @property
    def last_rate(self) -> float:
        return self.rate if self.end_rate is None else self.end_rate

    @property
    def num_expected(self) -> float:
        """Arrivals expected in it: the area under the rate."""
        if self.rate == self.last_rate:
            return self.rate * self.duration_s if self.rate else 0.0
        return (self.rate + self.last_rate) / 2 * self.duration_s

    def time_of(self, count: float) -> float:
        """Seconds into the phase at which `count` arrivals are expected.

        Solves rate t + slope t^2 / 2 = count in the form that stays exact for small slopes. With
        rate 1 at first and 3 after 4 s the slope is 1/2, and 2 arrivals are expected at
        t = 2 * 2 / (1 + sqrt(1 + 2)) = 1.464: 1.464 + 1.464^2 / 4 = 2.
        """
        slope = (self.last_rate - self.rate) / self.duration_s
        root = math.sqrt(max(0.0, self.rate * self.rate + 2 * slope * count))
        return 2 * count / (self.rate + root)


def constant_gaps() -> Iterator[float]:
    """Evenly spaced."""
    return repeat(1.0)


def gamma_gaps(burstiness: float, seed: int) -> Iterator[float]:
    """Gamma-distributed gaps of mean 1 with shape `burstiness`, the word and sense of vLLM's bench:
    1 is Poisson, less is burstier, more is more even; the gaps' variance is 1 / burstiness."""
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness: got {burstiness}, must be above 0 and finite")
    rng = random.Random(seed)
    while True:
        yield rng.gammavariate(burstiness, 1 / burstiness)


def poisson_gaps(seed: int) -> Iterator[float]:
    """Exponential gaps of mean 1."""
    rng = random.Random(seed)
    while True:
        yield rng.expovariate(1.0)


def steady(rate: float, duration_s: float = math.inf) -> tuple[RatePhase, ...]:
    """One rate for all the time."""
    return (RatePhase(duration_s, rate),)


def arrival_times(gaps: Iterable[float], phases: Sequence[RatePhase]) -> Iterator[float]:
    """Arrivals with these gaps under these rates, until the phases end.

    The n-th arrival is where the area under the rate reaches the sum of the first n gaps. Even gaps
    under (2 s at 1/s, then 2 s at 2/s) arrive at 1, 2, 2.5, 3, 3.5 and 4 s.
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


def trace_times(timestamps: Iterable[float]) -> Iterator[float]:
    """Recorded times, in any order and from any origin: sorted, the first at 0."""
    times = sorted(timestamps)
    return (time - times[0] for time in times)


def until(times: Iterable[float], end_s: float) -> Iterator[float]:
    """Those before end_s."""
    return takewhile(lambda time: time < end_s, times)


PATTERNS = ("poisson", "gamma", "constant")


def pattern_gaps(pattern: str, burstiness: float, seed: int) -> Iterator[float]:
    """Gaps by the name of a pattern; burstiness counts for gamma only. Raises ValueError."""
    if pattern == "poisson":
        return poisson_gaps(seed)
    if pattern == "gamma":
        return gamma_gaps(burstiness, seed)
    if pattern == "constant":
        return constant_gaps()
    raise ValueError(f"got {pattern!r}, must be one of {', '.join(PATTERNS)}")


def parse_phases(text: str) -> tuple[RatePhase, ...]:
    """`SECONDS:RATE` or `SECONDS:RATE-RATE`, separated by commas: `40:1,40:16,40:48`, or the ramp
    `60:1-16`. Raises ValueError, whose message names the part."""
    return tuple(_parse_phase(part.strip()) for part in text.split(","))


def _parse_phase(part: str) -> RatePhase:
    seconds, colon, rates = part.partition(":")
    first, dash, last = rates.partition("-")
    try:
        if not colon:
            raise ValueError("no colon")
        return RatePhase(float(seconds), float(first), float(last) if dash else None)
    except ValueError as error:
        message = f"{part!r} must be SECONDS:RATE or SECONDS:RATE-RATE ({error})"
        raise ValueError(message) from error
