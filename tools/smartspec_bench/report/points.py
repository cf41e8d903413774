"""Groups the repeats of a phase, and lists the metrics that reports show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from smartspec_bench.document import Phase
from smartspec_bench.plan import GLOBAL, JUDGED, NONE, STEADY


@dataclass(frozen=True)
class Metric:
    """A number of a phase.

    path: of attributes of `Phase`. column: heading in tables. label: title of axes.
    """

    name: str
    path: str
    column: str
    label: str = ""

    def of(self, phase: Phase) -> float | None:
        """The value, or None if it is not known."""
        value: float | None = attrgetter(self.path)(phase)
        return value

    @property
    def is_time(self) -> bool:
        """Whether it is a time. Its axis is then logarithmic."""
        return self.label.endswith(", ms")


E2E_MEAN = Metric("e2e-mean", "e2e_ms.mean", "e2e mean, ms", "mean end-to-end latency, ms")
E2E_P99 = Metric("e2e-p99", "e2e_ms.p99", "e2e p99, ms", "99th percentile of latency, ms")
TTFT_MEAN = Metric("ttft-mean", "ttft_ms.mean", "TTFT mean, ms", "mean time to first token, ms")
TPOT_MEAN = Metric("tpot-mean", "tpot_ms.mean", "TPOT mean, ms", "mean time per token, ms")
TOKEN_GOODPUT = Metric(
    *("token-goodput", "token_goodput_tps", "token_goodput_tps"),
    "generated tokens per second (token_goodput_tps)",
)
SLO_GOODPUT = Metric("slo-goodput", "slo_goodput_rps", "slo_goodput_rps")
DRAFT_LEN = Metric("draft-len", "mean_draft_len", "draft length, mean", "mean draft length, tokens")
ACCEPTANCE = Metric("acceptance", "acceptance_rate", "accepted, share", "accepted drafts, share")
TABLE = (
    E2E_MEAN,
    Metric("e2e-p50", "e2e_ms.p50", "e2e p50, ms"),
    E2E_P99,
    TTFT_MEAN,
    Metric("ttft-p99", "ttft_ms.p99", "TTFT p99, ms"),
    TPOT_MEAN,
    Metric("itl-p99", "itl_ms.p99", "ITL p99, ms"),
    TOKEN_GOODPUT,
    SLO_GOODPUT,
    DRAFT_LEN,
    ACCEPTANCE,
    Metric("lag-p99", "send_lag_ms.p99", "send lag p99, ms"),
)
"""Columns of the tables of phases."""


@dataclass(frozen=True)
class Point:
    """All repeats of one policy under one load. rate_rps: mean over the repeats."""

    shape: str
    workload: str
    load: float
    rate_rps: float
    policy: str
    phases: tuple[Phase, ...]

    @property
    def level(self) -> float:
        """Identifies the load among loads of one shape; see `level_of`."""
        return level_of(self.phases[0])

    def values(self, metric: Metric) -> list[float]:
        """Values of the repeats that have the metric."""
        found = (metric.of(phase) for phase in self.phases)
        return [value for value in found if value is not None and math.isfinite(value)]

    def mean(self, metric: Metric) -> float | None:
        """Mean over the repeats with equal weights; None without values."""
        values = self.values(metric)
        return sum(values) / len(values) if values else None

    def total(self, count: Callable[[Phase], int]) -> int:
        return sum(count(phase) for phase in self.phases)


def level_of(phase: Phase) -> float:
    """The share of saturation of a steady load, or its rate if the share is 0.

    Other loads have level 0. Their shape identifies them, and their rate depends on the seed.
    """
    return (phase.load or phase.rate_rps) if phase.shape == STEADY else 0.0


def points_of(phases: Iterable[Phase]) -> list[Point]:
    """Points, sorted by first appearance of shape and workload, then by load and policy."""
    groups: dict[tuple[str, str, float, str], list[Phase]] = {}
    for phase in phases:
        key = (phase.shape, phase.workload, level_of(phase), phase.policy)
        groups.setdefault(key, []).append(phase)
    places = list(dict.fromkeys(key[:2] for key in groups))
    ranks = {name: rank for rank, name in enumerate(ordered(key[3] for key in groups))}
    keys = sorted(groups, key=lambda key: (places.index(key[:2]), key[2], ranks[key[3]]))
    return [_point(groups[key]) for key in keys]


def _point(phases: Sequence[Phase]) -> Point:
    first = phases[0]
    rate_rps = sum(phase.rate_rps for phase in phases) / len(phases)
    return Point(first.shape, first.workload, first.load, rate_rps, first.policy, tuple(phases))


def by_place(points: Sequence[Point]) -> list[list[Point]]:
    """Groups by shape and workload, in the order of `points`."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.shape, point.workload), []).append(point)
    return list(groups.values())


def has_line(points: Sequence[Point]) -> bool:
    """Whether the points have several rates of a steady load. points: of one group."""
    return len({point.level for point in points if point.shape == STEADY}) > 1


def ordered(policies: Iterable[str]) -> list[str]:
    """Unique policies: adaptive ones, none, fixed ones by length, then the others by name."""
    first = [JUDGED, GLOBAL, NONE]

    def key(policy: str) -> tuple[int, int, str]:
        if policy in first:
            return first.index(policy), 0, policy
        length = fixed_len(policy)
        return (len(first), length, policy) if length is not None else (len(first) + 1, 0, policy)

    return sorted(set(policies), key=key)


def fixed_len(policy: str) -> int | None:
    """K of `fixed:K`; None for other policies."""
    kind, _, number = policy.partition(":")
    return int(number) if kind == "fixed" and number.isdigit() else None
