"""The requests of a run and their order. Pure: the same settings and seed give the same run.

A point is a shape of load on a workload, measured with every policy. A turn is a point with one
policy in one repeat. The policies of a point run directly after each other, with the same arrivals
and prompts. The order of policies, and of points in a repeat, is random for each repeat. So drift
of the machine has no systematic effect, and each repeat has a complete pair for every ratio.
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
"""Shapes in which the best fixed length changes during the phase."""

NONE, JUDGED, GLOBAL = "none", "goodput", "goodput_global"
MIXED = "mixed"

IDLE_S = 0.6
"""Pause after each phase, so that the server's metrics are up to date."""

SEEDS_A_POINT = 1000


@dataclass(frozen=True)
class Settings:
    """Settings of one run. `FORMS` has the defaults of each form.

    loads: of steady phases, as shares of the saturation rate of `none`. step_loads: of the
    stretches of a step phase; each lasts 2 * `seconds`. changing_load: of shift and mix phases;
    each lasts 4 * `seconds`. shift_workloads: of a shift phase, one after the other. seconds:
    duration of a steady phase; it is longer if fewer than min_requests would arrive. num_closed:
    requests of a closed phase. saturation_s: duration of each measurement of a saturation rate.
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
"""short: an overview. Its two repeats leave most verdicts open."""


@dataclass(frozen=True)
class Capacity:
    """Results of the warm-up.

    saturation_rps: saturation rate on mixed, by policy. none_rps: saturation rate of `none`, by
    workload. solo_s: latency of one request with `none` on an idle server.
    """

    saturation_rps: Mapping[str, float]
    none_rps: Mapping[str, float]
    solo_s: float


@dataclass(frozen=True)
class Stretch:
    """A period with one rate and one workload."""

    duration_s: float
    rate_rps: float
    workload: str


@dataclass(frozen=True)
class Point:
    """A shape of load on a workload, measured with every policy.

    index: number of the point in the run; its seeds derive from it. stretches: empty for closed.
    num_requests: exact number of requests; None means that durations and rates decide.
    """

    index: int
    shape: str
    workload: str
    load: float
    policies: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    num_requests: int | None = None

    @property
    def sending_s(self) -> float:
        """Expected seconds of sending."""
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
    """A request. time_s: due time in seconds from the start of the phase; 0 for closed."""

    time_s: float
    prompt: Prompt


def points(settings: Settings, capacity: Capacity) -> list[Point]:
    """All points of a run."""
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
    """Workloads whose saturation rate a run needs. mixed is always one of them."""
    shifted = settings.shift_workloads if SHIFT in settings.shapes else ()
    return tuple(dict.fromkeys((MIXED, *settings.workloads, *shifted)))


def turns(found: Sequence[Point], settings: Settings) -> Iterator[Turn]:
    """All turns of all repeats, in the order that the module's docstring describes."""
    rng = random.Random(settings.seed)
    for repeat in range(settings.repeats):
        for point in rng.sample(found, len(found)):
            seed = settings.seed * 1_000_000 + point.index * SEEDS_A_POINT + repeat
            for policy in rng.sample(point.policies, len(point.policies)):
                yield Turn(point, policy, repeat, seed)


def requests(turn: Turn) -> list[Due]:
    """The requests of a turn. They are the same for every policy, and never empty."""
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
    """Expected seconds of a turn: sending, then serving the queue and the last request.

    The queue is modelled as a fluid. It grows or shrinks by the rate minus the policy's saturation
    rate, and never falls below 0.
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
