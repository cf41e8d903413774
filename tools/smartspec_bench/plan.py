"""The loads of a lockstep run and their requests. Pure: the same settings give the same requests.

A point is a shape of load, measured with every policy in every repeat, with the same arrivals and
prompts for all policies. The order of the points is random in each repeat.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from smartspec_bench.prompts import MIXED, PROMPT_SEED, Prompt, generated
from smartspec_sim.arrivals import RatePhase, arrival_times, poisson_gaps

CLOSED, STEADY, STEP, SHIFT, START = "closed", "steady", "step", "shift", "start"
SHAPES = (CLOSED, STEADY, STEP, SHIFT, START)

STEP_LOADS = (0.025, 0.4, 1.2, 0.025)
SHIFT_LOAD, SHIFT_WORKLOADS = 0.6, ("sql", "summarize")
START_LOAD = 0.5

MIN_REQUESTS = 4
SEEDS_PER_POINT = 1000


@dataclass(frozen=True)
class Settings:
    """loads: of steady phases, as shares of the saturation rate without speculation. seconds:
    duration of a steady phase; the other shapes last 4 times as long. num_closed: requests of a
    closed phase. saturation_s: duration of the measurement of the saturation rate."""

    policies: tuple[str, ...] = ("none", "fixed:1", "fixed:3", "fixed:5", "goodput")
    shapes: tuple[str, ...] = (CLOSED, STEADY, STEP)
    loads: tuple[float, ...] = (0.7, 1.1)
    workload: str = MIXED
    repeats: int = 4
    seconds: float = 12.0
    num_closed: int = 6
    saturation_s: float = 12.0
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 1

    @property
    def workloads(self) -> tuple[str, ...]:
        """Those whose saturation rate is needed."""
        shifted = SHIFT_WORKLOADS if SHIFT in self.shapes else ()
        return tuple(dict.fromkeys((self.workload, *shifted)))


@dataclass(frozen=True)
class Stretch:
    """A period with one rate, in requests per second, and one workload."""

    duration_s: float
    rate_rps: float
    workload: str


@dataclass(frozen=True)
class Point:
    """stretches: empty for closed, which has num_requests, one after the other."""

    shape: str
    workload: str
    load: float
    stretches: tuple[Stretch, ...] = ()
    num_requests: int = 0

    @property
    def place(self) -> tuple[str, str, float]:
        return self.shape, self.workload, self.load


@dataclass(frozen=True)
class Due:
    """A request. time_s: due time in seconds from the start of the phase; 0 for closed."""

    time_s: float
    prompt: Prompt


def points(settings: Settings, none_rps: Mapping[str, float]) -> list[Point]:
    """All points of a run. none_rps: saturation rate without speculation, by workload."""
    name, seconds = settings.workload, settings.seconds
    rate = none_rps[name]
    found = []
    if CLOSED in settings.shapes:
        found.append(Point(CLOSED, name, 0.0, num_requests=settings.num_closed))
    for load in settings.loads if STEADY in settings.shapes else ():
        least_s = MIN_REQUESTS / (load * rate)
        found.append(
            Point(STEADY, name, load, (Stretch(max(seconds, least_s), load * rate, name),))
        )
    if STEP in settings.shapes:
        stretches = tuple(Stretch(seconds, load * rate, name) for load in STEP_LOADS)
        found.append(Point(STEP, name, 0.0, stretches))
    if SHIFT in settings.shapes:
        stretches = tuple(
            Stretch(2 * seconds, SHIFT_LOAD * none_rps[one], one) for one in SHIFT_WORKLOADS
        )
        found.append(Point(SHIFT, " then ".join(SHIFT_WORKLOADS), SHIFT_LOAD, stretches))
    if START in settings.shapes:
        found.append(
            Point(START, name, START_LOAD, (Stretch(4 * seconds, START_LOAD * rate, name),))
        )
    return found


def rounds(found: list[Point], settings: Settings) -> Iterator[tuple[int, Point, list[Due]]]:
    """Repeat, point and its requests, for all repeats."""
    rng = random.Random(settings.seed)
    for repeat in range(settings.repeats):
        for index in rng.sample(range(len(found)), len(found)):
            seed = settings.seed * 1_000_000 + index * SEEDS_PER_POINT + repeat
            yield repeat, found[index], requests(found[index], seed)


def requests(point: Point, seed: int) -> list[Due]:
    """The requests of a point. Never empty."""
    prompts = {
        name: generated(name, PROMPT_SEED + seed)
        for name in (point.workload, *(stretch.workload for stretch in point.stretches))
    }
    if not point.stretches:
        return [Due(0.0, one) for one in islice(prompts[point.workload], point.num_requests)]
    phases = [RatePhase(stretch.duration_s, stretch.rate_rps) for stretch in point.stretches]
    times = [0.0, *arrival_times(poisson_gaps(seed), phases)]
    return [Due(time_s, next(prompts[_workload_at(point, time_s)])) for time_s in times]


def _workload_at(point: Point, time_s: float) -> str:
    end_s = 0.0
    for stretch in point.stretches:
        end_s += stretch.duration_s
        if time_s < end_s:
            return stretch.workload
    return point.stretches[-1].workload
