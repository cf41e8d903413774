"""The loads of a lockstep run and their requests. Pure: the same settings give the same requests.

A point is a shape of load, measured with every policy in every repeat, with the same arrivals and
prompts for all policies. The order of the points is random in each repeat.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from smartspec_bench.prompts import MIXED, PROMPT_SEED, Prompt, Template, generated, plain
from smartspec_sim.arrivals import RatePhase, arrival_times, poisson_gaps

CLOSED, STEADY, STEP, START = "closed", "steady", "step", "start"
SHAPES = (CLOSED, STEADY, STEP, START)

STEP_LOADS = (0.025, 0.4, 1.2, 0.025)
START_LOAD = 0.5

MIN_REQUESTS = 4
SEEDS_PER_POINT = 1000


@dataclass(frozen=True)
class Settings:
    """loads: of steady phases, as shares of the saturation rate without speculation. seconds:
    duration of a steady phase; the other shapes last 4 times as long. num_closed: requests of a
    closed phase. saturation_s: duration of the measurement of the saturation rate. max_tokens: most
    answers to real texts are shorter. template: see `prompts.generated`."""

    policies: tuple[str, ...] = ("none", "fixed:1", "fixed:3", "fixed:5", "goodput")
    shapes: tuple[str, ...] = (CLOSED, STEADY, STEP)
    loads: tuple[float, ...] = (0.7, 1.1)
    workload: str = MIXED
    repeats: int = 4
    seconds: float = 12.0
    num_closed: int = 6
    saturation_s: float = 12.0
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 1
    template: Template = plain


@dataclass(frozen=True)
class Point:
    """load: share of the saturation rate; 0 if it has none or several. phases: the rates over time;
    empty for closed, whose requests come one after the other."""

    shape: str
    load: float
    phases: tuple[RatePhase, ...] = ()


@dataclass(frozen=True)
class Due:
    """A request. time_s: due time in seconds from the start of the phase; 0 for closed."""

    time_s: float
    prompt: Prompt


def points(settings: Settings, none_rps: float) -> list[Point]:
    """All points of a run. none_rps: saturation rate without speculation."""
    seconds = settings.seconds

    def at(load: float, duration_s: float) -> RatePhase:
        return RatePhase(duration_s, load * none_rps)

    found = {
        CLOSED: [Point(CLOSED, 0.0)],
        STEADY: [
            Point(STEADY, load, (at(load, max(seconds, MIN_REQUESTS / (load * none_rps))),))
            for load in settings.loads
        ],
        STEP: [Point(STEP, 0.0, tuple(at(load, seconds) for load in STEP_LOADS))],
        START: [Point(START, START_LOAD, (at(START_LOAD, 4 * seconds),))],
    }
    return [point for shape in SHAPES if shape in settings.shapes for point in found[shape]]


def rounds(found: list[Point], settings: Settings) -> Iterator[tuple[int, Point, list[Due]]]:
    """Repeat, point and its requests, for all repeats."""
    rng = random.Random(settings.seed)
    for repeat in range(settings.repeats):
        for index in rng.sample(range(len(found)), len(found)):
            seed = settings.seed * 1_000_000 + index * SEEDS_PER_POINT + repeat
            yield repeat, found[index], requests(found[index], settings, seed)


def requests(point: Point, settings: Settings, seed: int) -> list[Due]:
    """The requests of a point. Never empty."""
    prompts = generated(settings.workload, PROMPT_SEED + seed, settings.template)
    if point.shape == CLOSED:
        return [Due(0.0, prompt) for prompt in islice(prompts, settings.num_closed)]
    times = [0.0, *arrival_times(poisson_gaps(seed), point.phases)]
    return [Due(time_s, prompt) for time_s, prompt in zip(times, prompts, strict=False)]
