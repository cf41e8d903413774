"""Phases that repeat one another, put together: a point of a line, a line of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from smartspec_bench.document import Phase
from smartspec_bench.page_colours import ordered
from smartspec_bench.plan import STEADY


@dataclass(frozen=True)
class Metric:
    """A number of a phase. unit: empty for counts and shares. of: None where it is not known."""

    name: str
    label: str
    unit: str
    of: Callable[[Phase], float | None]

    @property
    def axis(self) -> str:
        return f"{self.label}, {self.unit}" if self.unit else self.label


@dataclass(frozen=True)
class Point:
    """Repeats of one policy under one load. rate_rps: the mean over them."""

    shape: str
    workload: str
    load: float
    rate_rps: float
    policy: str
    phases: tuple[Phase, ...]

    @property
    def level(self) -> float:
        """What tells loads of one shape apart; see `points_of`."""
        return level_of(self.phases[0])

    def values(self, metric: Metric) -> list[float]:
        """Of the repeats that have it."""
        found = (metric.of(phase) for phase in self.phases)
        return [value for value in found if value is not None and math.isfinite(value)]

    def mean(self, metric: Metric) -> float | None:
        """Over repeats, each counted once."""
        values = self.values(metric)
        return sum(values) / len(values) if values else None

    def total(self, count: Callable[[Phase], int]) -> int:
        return sum(count(phase) for phase in self.phases)


def level_of(phase: Phase) -> float:
    """A steady load is known by its share of saturation, or else its rate; one that changes by
    its shape alone, as its rate is what happened to come due."""
    return (phase.load or phase.rate_rps) if phase.shape == STEADY else 0.0


def points_of(phases: Iterable[Phase]) -> list[Point]:
    """In the order of shapes and workloads as run, then by load, then by policy."""
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


def workloads_of(points: Sequence[Point], shape: str) -> list[str]:
    """That were run in this shape."""
    return list(dict.fromkeys(point.workload for point in points if point.shape == shape))
