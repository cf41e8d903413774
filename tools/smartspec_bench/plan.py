"""What a run sends, and in which order. Pure: the same settings and seed give the same run.

A point is a question: a shape of load on a workload, asked of every policy. A turn is a point under
one policy in one repeat. The policies of a point follow each other directly, with the same arrivals
and prompts, in an order that is drawn anew each time; so are the points of a repeat. What drifts on
the machine then favours nobody, and a repeat is a complete pair for every ratio.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from smartspec_bench.prompts import PROMPT_SEED, Prompt, generated
from smartspec_sim.arrivals import RatePhase, arrival_times, poisson_gaps, steady

STEADY, STEP, SHIFT, MIX, CLOSED = "steady", "step", "shift", "mix", "closed"
SHAPES = (STEADY, STEP, SHIFT, MIX, CLOSED)
CHANGING = (STEP, SHIFT, MIX)
"""Where no fixed length is right all the time."""

NONE, JUDGED, GLOBAL = "none", "goodput", "goodput_global"
MIXED = "mixed"

IDLE_S = 0.6
"""Between phases: the server is idle, and has shown its last counts."""

SEEDS_A_POINT = 1000


@dataclass(frozen=True)
class Settings:
    """One run; the defaults of a form stand in `FORMS`.

    loads: shares of the saturation rate of `none`. step_loads: of the stretches of a step, each
    twice `seconds` long. changing_load: of shift and mix, each four times `seconds` long.
    shift_workloads: one after the other. seconds: of a steady phase; it becomes longer where fewer
    than min_requests would come. num_closed: requests of a closed phase. saturation_s: of each
    measurement of a saturation rate.
    """

    policies: tuple[str, ...]
    shapes: tuple[str, ...]
    workloads: tuple[str, ...]
    loads: tuple[float, ...]
    repeats: int
    seconds: float
    min_requests: int
    num_closed: int
    saturation_s: float
    step_loads: tuple[float, ...] = (0.025, 0.4, 1.2)
    changing_load: float = 0.6
    shift_workloads: tuple[str, ...] = ("sql", "summarize")
    seed: int = 1


FORMS: Mapping[str, Settings] = {
    "short": Settings(
        policies=("none", "fixed:3", "goodput"),
        shapes=(STEADY,),
        workloads=("chat", "summarize"),
        loads=(0.2, 0.5, 0.8, 1.1),
        repeats=2,
        seconds=2.0,
        min_requests=2,
        num_closed=4,
        saturation_s=3.0,
    ),
    "full": Settings(
        policies=("none", "fixed:1", "fixed:3", "fixed:5", "fixed:7", "goodput"),
        shapes=SHAPES,
        workloads=(MIXED, "summarize"),
        loads=(0.05, 0.3, 0.6, 0.9, 1.1),
        repeats=4,
        seconds=12.0,
        min_requests=4,
        num_closed=6,
        saturation_s=12.0,
    ),
}
"""short: an overview, whose two repeats leave most verdicts open."""


@dataclass(frozen=True)
class Capacity:
    """What the warm-up found. saturation_rps: by policy on mixed. none_rps: of `none`, by workload.
    solo_s: one request under `none` on an idle server."""

    saturation_rps: Mapping[str, float]
    none_rps: Mapping[str, float]
    solo_s: float


@dataclass(frozen=True)
class Stretch:
    """A time of one rate, whose requests are of one workload."""

    duration_s: float
    rate_rps: float
    workload: str


@dataclass(frozen=True)
class Point:
    """stretches: empty where closed. num_requests: that many come; None: as many as the time and
    the rates give. index: of the point in the run, from which its seeds are made."""

    index: int
    shape: str
    workload: str
    load: float
    policies: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    num_requests: int | None = None

    @property
    def sending_s(self) -> float:
        """Expected."""
        return sum(stretch.duration_s for stretch in self.stretches)


@dataclass(frozen=True)
class Turn:
    point: Point
    policy: str
    repeat: int
    seed: int

    @property
    def name(self) -> str:
        point = self.point
        load = f" at {point.load:g}" if point.load else ""
        return f"{point.shape}{load}, {point.workload}, {self.policy}"


@dataclass(frozen=True)
class Due:
    """A request; time_s: from the start of the phase, 0 where closed."""

    time_s: float
    prompt: Prompt


def points(settings: Settings, capacity: Capacity) -> list[Point]:
    """In the order of the document."""
    numbers = count()

    def point(
        shape: str,
        workload: str,
        load: float,
        stretches: Sequence[Stretch],
        num_requests: int | None = None,
    ) -> Point:
        policies = settings.policies + ((GLOBAL,) if shape == MIX else ())
        unique = tuple(dict.fromkeys(policies))
        return Point(next(numbers), shape, workload, load, unique, tuple(stretches), num_requests)

    found = []
    for workload in settings.workloads:
        if CLOSED in settings.shapes:
            found.append(point(CLOSED, workload, 0.0, (), settings.num_closed))
        if STEADY in settings.shapes:
            for load in settings.loads:
                rate = load * capacity.none_rps[workload]
                num = max(settings.min_requests, round(rate * settings.seconds))
                stretch = Stretch(num / rate, rate, workload)
                found.append(point(STEADY, workload, load, [stretch], num))
    if STEP in settings.shapes:
        mixed = capacity.none_rps[MIXED]
        stretches = [
            Stretch(2 * settings.seconds, load * mixed, MIXED) for load in settings.step_loads
        ]
        found.append(point(STEP, MIXED, 0.0, stretches))
    if SHIFT in settings.shapes:
        stretches = [
            Stretch(2 * settings.seconds, settings.changing_load * capacity.none_rps[name], name)
            for name in settings.shift_workloads
        ]
        name = " then ".join(settings.shift_workloads)
        found.append(point(SHIFT, name, settings.changing_load, stretches))
    if MIX in settings.shapes:
        rate = settings.changing_load * capacity.none_rps[MIXED]
        stretches = [Stretch(4 * settings.seconds, rate, MIXED)]
        found.append(point(MIX, MIXED, settings.changing_load, stretches))
    return found


def needed_workloads(settings: Settings) -> tuple[str, ...]:
    """Those whose saturation rate a run needs; mixed always, as the machine's own figure."""
    shifted = settings.shift_workloads if SHIFT in settings.shapes else ()
    return tuple(dict.fromkeys((MIXED, *settings.workloads, *shifted)))


def turns(found: Sequence[Point], settings: Settings) -> Iterator[Turn]:
    """All repeats of all points; see the module for their order."""
    rng = random.Random(settings.seed)
    for repeat in range(settings.repeats):
        for point in rng.sample(found, len(found)):
            seed = settings.seed * 1_000_000 + point.index * SEEDS_A_POINT + repeat
            for policy in rng.sample(point.policies, len(point.policies)):
                yield Turn(point, policy, repeat, seed)


def requests(turn: Turn) -> list[Due]:
    """What the turn sends; the same for every policy. Never empty."""
    point = turn.point
    if not point.stretches:
        prompts = _prompts(point.workload, turn.seed)
        return [Due(0.0, prompt) for prompt in islice(prompts, point.num_requests)]
    gaps = poisson_gaps(turn.seed)
    times: Iterator[float]
    if point.num_requests is not None:
        times = islice(arrival_times(gaps, steady(point.stretches[0].rate_rps)), point.num_requests)
    else:
        phases = [RatePhase(stretch.duration_s, stretch.rate_rps) for stretch in point.stretches]
        times = iter([0.0, *arrival_times(gaps, phases)])
    sources = {s.workload: _prompts(s.workload, turn.seed) for s in point.stretches}
    return [Due(time_s, next(sources[_workload_at(point, time_s)])) for time_s in times]


def _prompts(workload: str, seed: int) -> Iterator[Prompt]:
    return generated(workload, PROMPT_SEED + seed)


def _workload_at(point: Point, time_s: float) -> str:
    end_s = 0.0
    for stretch in point.stretches:
        end_s += stretch.duration_s
        if time_s < end_s:
            return stretch.workload
    return point.stretches[-1].workload


def expected_s(turn: Turn, capacity: Capacity) -> float:
    """How long a turn takes: its sending, what has queued up by then, and the last request.

    The queue is a fluid: it grows by the rate beyond the policy's saturation rate, and never below
    nothing.
    """
    point = turn.point
    if not point.stretches:
        return (point.num_requests or 0) * capacity.solo_s + IDLE_S
    shares = capacity.saturation_rps
    share = shares.get(turn.policy, shares[NONE]) / shares[NONE]
    queued_s = 0.0
    for stretch in point.stretches:
        full_rps = share * capacity.none_rps[stretch.workload]
        queued_s += (stretch.rate_rps / full_rps - 1.0) * stretch.duration_s
        queued_s = max(0.0, queued_s)
    return point.sending_s + queued_s + 2 * capacity.solo_s + IDLE_S
