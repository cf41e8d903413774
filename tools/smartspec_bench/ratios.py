"""Paired ratios with intervals, and an unbiased comparison with the best fixed length. Pure.

Every repeat gives one ratio: the policy's mean over the other's, with the same arrivals and
prompts, minutes apart at most. Repeats are the unit, not requests, because requests of a phase
share its queue and are not independent. The interval is Student's t on the logarithms of the
ratios. With 3 to 10 repeats, a bootstrap covers too little. With logarithms, "a over b" and "b over
a" are the same statement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Means = Mapping[int, float]
"""A policy's figure by repeat, all above 0."""

# fmt: off
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
         2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
         2.052, 2.048, 2.045, 2.042)
# fmt: on
"""Student's t, two-sided 95 %, by degrees of freedom from 1."""

T_LARGE = 1.960


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over the pairs, and its 95 % interval."""

    value: float
    low: float
    high: float
    num_pairs: int


def interval(logs: Sequence[float]) -> Ratio | None:
    """From logarithms of ratios, one per repeat; None for fewer than two, which have no interval.

    Ratios 1 and e have the logarithms 0 and 1: mean 1/2, standard error 1/2, t 12.706, so the
    interval is e to 0.5 -+ 6.353.
    """
    if len(logs) < 2:
        return None
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    freedom = len(logs) - 1
    half = error * (T_975[freedom - 1] if freedom <= len(T_975) else T_LARGE)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def paired(policy: Means, against: Means) -> Ratio | None:
    """Over the repeats that both have."""
    return interval([_log(policy, against, repeat) for repeat in _common([policy, against])])


@dataclass(frozen=True)
class CrossFit:
    """chosen: the best lengths of both halves, without repetition."""

    ratio: Ratio
    chosen: tuple[str, ...]


def cross_fit(policy: Means, fixed: Mapping[str, Means]) -> CrossFit | None:
    """The policy over the best fixed length, which each half of the repeats chooses for the other.

    The best of seven noisy means looks better than it is, if it is compared on the same repeats. So
    the repeats are divided into even and odd. The length with the lowest mean in one half is
    compared on the other half, and the ratios of both halves are combined. None for fewer than two
    repeats, or without a fixed length.
    """
    if not fixed:
        return None
    repeats = _common([policy, *fixed.values()])
    halves = (repeats[0::2], repeats[1::2])
    logs, chosen = list[float](), list[str]()
    for picks, scores in (halves, halves[::-1]):
        if not picks:
            return None
        best = min(fixed, key=lambda name: _mean_log(fixed[name], picks))
        chosen.append(best)
        logs += [_log(policy, fixed[best], repeat) for repeat in scores]
    ratio = interval(logs)
    return None if ratio is None else CrossFit(ratio, tuple(dict.fromkeys(chosen)))


def _common(means: Sequence[Means]) -> list[int]:
    return sorted(set.intersection(*(set(mean) for mean in means)))


def _mean_log(means: Means, repeats: Sequence[int]) -> float:
    return statistics.fmean(math.log(means[repeat]) for repeat in repeats)


def _log(policy: Means, against: Means, repeat: int) -> float:
    return math.log(policy[repeat] / against[repeat])
