"""The smallest number of replicas that meets latency targets.

A fleet of more than SAMPLE replicas is represented by SAMPLE replicas at the same request rate for
each. This is on the safe side on average: with more replicas, one is idle more often.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from smartspec_sim.latency import PERCENTILES, SLO_NAMES, RequestTiming

SAMPLE = 4
MAX_REPLICAS = 10_000
_TARGET = re.compile(
    r"(?P<statistic>mean|p\d+)\s+(?P<latency>[a-z0-9]+)\s*<\s*(?P<bound>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)"
)
_STATISTICS = ("mean", *(f"p{q}" for q in PERCENTILES))


@dataclass(frozen=True)
class Target:
    """A bound for a latency of all requests, in milliseconds, such as `p99 ttft < 500 ms`.

    A request that was refused or failed counts as infinitely late.
    """

    statistic: str
    latency: str
    bound_ms: float

    def __str__(self) -> str:
        return f"{self.statistic} {self.latency} < {self.bound_ms:g} ms"

    def value_ms(self, timings: Sequence[RequestTiming]) -> float:
        """The smallest value that this share of the requests does not exceed; 0.0 without
        requests."""
        values = [1e3 * value for one in timings if (value := self._seconds(one)) is not None]
        if not values:
            return 0.0
        if self.statistic == "mean":
            return float(np.mean(values))
        share = int(self.statistic.removeprefix("p"))
        return float(np.percentile(values, share, method="inverted_cdf"))

    def is_met(self, timings: Sequence[RequestTiming]) -> bool:
        return self.value_ms(timings) < self.bound_ms

    def is_late(self, timing: RequestTiming) -> bool:
        """Whether the request alone would miss the bound."""
        seconds = self._seconds(timing)
        return seconds is not None and 1e3 * seconds >= self.bound_ms

    def max_late(self, num_requests: int) -> float:
        """Number of late requests with which the target can still be met; infinite for a mean."""
        if self.statistic == "mean":
            return math.inf
        return num_requests * (100 - int(self.statistic.removeprefix("p"))) / 100

    def _seconds(self, timing: RequestTiming) -> float | None:
        if not timing.is_finished:
            return math.inf
        if self.latency == "tpot":
            return timing.tpot_s
        of = timing.ttft_s if self.latency == "ttft" else timing.e2e_s
        return of(timing.scheduled_s)


class Verdict:
    """Counts late requests while a simulation runs, to end it as soon as a target is missed."""

    def __init__(self, targets: Sequence[Target], num_requests: int) -> None:
        self._num_left = {target: target.max_late(num_requests) for target in targets}

    def is_missed(self, timing: RequestTiming) -> bool:
        """Count a request that has ended. True if a target cannot be met any more."""
        for target in self._num_left:
            self._num_left[target] -= target.is_late(timing)
        return any(left < 0 for left in self._num_left.values())


def parse_target(text: str) -> Target:
    """Parse a target such as `p99 ttft < 500 ms`. Raises ValueError."""
    found = _TARGET.fullmatch(text.strip())
    if (
        found is None
        or found["statistic"] not in _STATISTICS
        or found["latency"] not in SLO_NAMES
        or not float(found["bound"])
    ):
        raise ValueError(
            f"got {text!r}, must be like 'p99 ttft < 500 ms': one of {', '.join(_STATISTICS)}; one "
            f"of {', '.join(SLO_NAMES)}; a number above 0 in ms or s"
        )
    scale = 1e3 if found["unit"] == "s" else 1.0
    return Target(found["statistic"], found["latency"], scale * float(found["bound"]))


def smallest(is_enough: Callable[[int], bool], guess: int, most: int = MAX_REPLICAS) -> int | None:
    """The smallest number in 1..most that is enough; None if `most` is not.

    Assumes that more are never worse. Begins at `guess`, moves by half of it, then bisects.
    """
    enough, too_few = most + 1, 0
    number = max(1, min(guess, most))
    while too_few + 1 < enough:
        if is_enough(number):
            enough = number
        else:
            too_few = number
        if enough > most:
            number = min(most, math.ceil(1.5 * number))
        elif not too_few:
            number = max(1, enough * 2 // 3)
        else:
            number = (too_few + enough) // 2
    return enough if enough <= most else None
