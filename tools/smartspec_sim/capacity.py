"""Latency targets, and the smallest number of replicas that meets them."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from smartspec_sim.latency import LATENCIES, PERCENTILES, RequestTiming

MAX_REPLICAS = 10_000
_STATISTICS = ("mean", *(f"p{q}" for q in PERCENTILES))
_TARGET = re.compile(
    rf"(?P<statistic>{'|'.join(_STATISTICS)})\s+(?P<latency>{'|'.join(LATENCIES)})"
    r"\s*<\s*(?P<bound>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)"
)


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
        seconds = [one.latency_s(self.latency) if one.is_finished else math.inf for one in timings]
        values = [1e3 * value for value in seconds if value is not None]
        if not values:
            return 0.0
        if self.statistic == "mean":
            return float(np.mean(values))
        share = int(self.statistic.removeprefix("p"))
        return float(np.percentile(values, share, method="inverted_cdf"))

    def is_met(self, timings: Sequence[RequestTiming]) -> bool:
        return self.value_ms(timings) < self.bound_ms


def parse_target(text: str) -> Target:
    """Parse a target such as `p99 ttft < 500 ms`. Raises ValueError."""
    found = _TARGET.fullmatch(text.strip())
    if found is None or not float(found["bound"]):
        raise ValueError(
            f"got {text!r}, must be like 'p99 ttft < 500 ms': one of {', '.join(_STATISTICS)}; one "
            f"of {', '.join(LATENCIES)}; a number above 0 in ms or s"
        )
    scale = 1e3 if found["unit"] == "s" else 1.0
    return Target(found["statistic"], found["latency"], scale * float(found["bound"]))


def smallest(is_enough: Callable[[int], bool], guess: int) -> int | None:
    """The smallest number in 1..MAX_REPLICAS that is enough; None if that is not.

    Assumes that more are never worse. Begins at `guess`, grows by half, then bisects.
    """
    too_few, number = 0, max(1, min(guess, MAX_REPLICAS))
    while not is_enough(number):
        if number == MAX_REPLICAS:
            return None
        too_few, number = number, min(MAX_REPLICAS, math.ceil(1.5 * number))
    return bisect_left(range(number), True, lo=too_few + 1, key=is_enough)
