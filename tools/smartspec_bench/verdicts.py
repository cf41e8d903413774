"""Compares goodput with other policies at each point, and judges each ratio by a bound. Pure.

A verdict is met if the whole interval satisfies the bound, and missed if the whole interval
violates it. Otherwise it is open, and more repeats can decide it. The comparison with `none` looks
for harm: missed if the whole interval is above 1.00, met if the whole interval is at most 1 / 0.98.
A point with failed requests is always open, because ratios do not include failed requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from smartspec_bench.document import Comparison, Phase
from smartspec_bench.plan import CHANGING, CLOSED, GLOBAL, JUDGED, MIX, NONE, SHAPES, STEADY
from smartspec_bench.ratios import Means, Ratio, cross_fit, paired

MET, MISSED, OPEN = "met", "missed", "open"
BEST_FIXED, FIXED = "best fixed", "fixed"

LATENCY, SPEED_UP = "e2e_ms.mean", "speed_up"
STEADY_BOUND = 1.03
"""For the ratio of mean latencies, goodput / best fixed length, at a steady load."""

NONE_BOUND, NONE_HARM = 1.0, 1 / 0.98
SPEED_UP_BOUND = 0.97
"""For the ratio of speed-ups, goodput / best fixed length, at the lowest load."""

CHANGING_BOUND = 1.0


@dataclass(frozen=True)
class _Place:
    """A shape, workload and load, with the mean latency of each policy by repeat."""

    shape: str
    workload: str
    load: float
    rate_rps: float
    num_failed: int
    means: Mapping[str, Means]

    @property
    def fixed(self) -> dict[str, Means]:
        return {name: mean for name, mean in self.means.items() if name.startswith("fixed:")}


def comparisons(phases: Sequence[Phase]) -> list[Comparison]:
    """The comparisons of all points that have at least two repeats of both policies."""
    places = list(_places(phases))
    lowest = min((place.load for place in places if place.shape == STEADY), default=0.0)
    return [
        comparison
        for place in places
        if JUDGED in place.means
        for comparison in _of_place(place, is_lowest=place.load == lowest)
    ]


def _places(phases: Iterable[Phase]) -> Iterator[_Place]:
    def key(phase: Phase) -> tuple[int, str, float]:
        return SHAPES.index(phase.shape), phase.workload, phase.load

    for _, group in groupby(sorted(phases, key=key), key):
        members = list(group)
        means: dict[str, dict[int, float]] = {}
        for phase in members:
            if phase.e2e_ms.mean:
                means.setdefault(phase.policy, {})[phase.repeat] = phase.e2e_ms.mean
        first = members[0]
        rate_rps = sum(phase.rate_rps for phase in members) / len(members)
        num_failed = sum(phase.num_failed for phase in members)
        yield _Place(first.shape, first.workload, first.load, rate_rps, num_failed, means)


def _of_place(place: _Place, is_lowest: bool) -> Iterator[Comparison]:
    judged = place.means[JUDGED]
    is_changing = place.shape in CHANGING
    if (best := cross_fit(judged, place.fixed)) is not None:
        against, ratio = " or ".join(best.chosen), best.ratio
        bound = CHANGING_BOUND if is_changing else STEADY_BOUND
        yield _compared(place, against, BEST_FIXED, ratio, bound, at_most(ratio, bound))
        if place.shape == CLOSED or (place.shape == STEADY and is_lowest):
            yield _speed_up(place, against, ratio)
    if NONE in place.means and (over := paired(judged, place.means[NONE])) is not None:
        yield _compared(place, NONE, NONE, over, NONE_BOUND, no_harm(over))
    if not is_changing:
        return
    for name, means in (*place.fixed.items(), (GLOBAL, place.means.get(GLOBAL, {}))):
        if (over := paired(judged, means)) is not None:
            role = GLOBAL if name == GLOBAL else FIXED
            verdict = at_most(over, CHANGING_BOUND)
            yield _compared(place, name, role, over, CHANGING_BOUND, verdict)


def at_most(ratio: Ratio, bound: float) -> str:
    if ratio.high <= bound:
        return MET
    return MISSED if ratio.low > bound else OPEN


def no_harm(ratio: Ratio) -> str:
    """The verdict of the comparison with `none`; see the module's docstring."""
    if ratio.low > NONE_BOUND:
        return MISSED
    return MET if ratio.high <= NONE_HARM else OPEN


def _compared(
    place: _Place, against: str, role: str, ratio: Ratio, bound: float, verdict: str
) -> Comparison:
    measure = "mean latency is"
    return _comparison(place, against, role, LATENCY, measure, ratio, bound, verdict)


def _speed_up(place: _Place, against: str, latency: Ratio) -> Comparison:
    """The ratio of speed-ups over the same `none` is the inverse of the ratio of latencies."""
    ratio = Ratio(1 / latency.value, 1 / latency.high, 1 / latency.low, latency.num_pairs)
    verdict = MET if ratio.low >= SPEED_UP_BOUND else OPEN
    if ratio.high < SPEED_UP_BOUND:
        verdict = MISSED
    measure = "speed-up over none is"
    return _comparison(
        place, against, BEST_FIXED, SPEED_UP, measure, ratio, SPEED_UP_BOUND, verdict
    )


def _comparison(
    place: _Place,
    against: str,
    role: str,
    metric: str,
    measure: str,
    ratio: Ratio,
    bound: float,
    verdict: str,
) -> Comparison:
    decided = OPEN if place.num_failed else verdict
    text = (
        f"{_where(place)}: {JUDGED}'s {measure} {ratio.value:.3f} of that of {_whom(against, role)}"
        f" (95 % interval {ratio.low:.3f} to {ratio.high:.3f}, {ratio.num_pairs} pairs)"
    )
    side = "least" if metric == SPEED_UP else "most"
    text += f"; asked: at {side} {bound:.2f}; {decided}"
    if place.num_failed:
        text += f"; {place.num_failed} requests failed at this point"
    return Comparison(
        shape=place.shape,
        workload=place.workload,
        load=place.load,
        rate_rps=place.rate_rps,
        policy=JUDGED,
        against=against,
        role=role,
        metric=metric,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        num_pairs=ratio.num_pairs,
        bound=bound,
        verdict=decided,
        text=f"{text}.",
    )


def _where(place: _Place) -> str:
    load = f" at {place.load:g} of saturation" if place.load else ""
    return f"{place.shape}{load}, {place.workload}"


def _whom(against: str, role: str) -> str:
    return f"the best fixed length ({against})" if role == BEST_FIXED else against


QUESTIONS = (
    (
        (STEADY, CLOSED),
        BEST_FIXED,
        LATENCY,
        "Steady loads: within 3 % of the best fixed length's mean latency",
    ),
    (
        (STEADY, CLOSED),
        BEST_FIXED,
        SPEED_UP,
        "Lowest load: at least 0.97 of the best fixed length's speed-up",
    ),
    (SHAPES, NONE, LATENCY, "Never slower than none"),
    (CHANGING, FIXED, LATENCY, "Changing loads and texts: faster than every fixed length"),
    ((MIX,), GLOBAL, LATENCY, "All workloads at once: faster than one length for all"),
)
"""Shapes, role, metric, and the part of the claim that they test."""


def summary(found: Sequence[Comparison]) -> list[str]:
    """One sentence for each tested part of the claim, with its worst point."""
    lines = []
    for shapes, role, metric, question in QUESTIONS:
        asked = [c for c in found if (c.role, c.metric) == (role, metric) and c.shape in shapes]
        if asked:
            lines.append(_answer(question, asked, metric))
    return lines or ["No verdict: no point has two complete repeats."]


def headline(found: Sequence[Comparison]) -> str:
    """How much faster goodput is than the best fixed length and than no speculation.

    Empty if it was compared with neither.
    """
    parts = []
    for role, whom in ((BEST_FIXED, "the best fixed length"), (NONE, "no speculation")):
        ratios = [c.ratio for c in found if (c.role, c.metric) == (role, LATENCY)]
        if ratios:
            parts.append(f"{faster(min(ratios), max(ratios))} than {whom}")
    return f"{JUDGED} is {', and '.join(parts)}, in mean latency." if parts else ""


def faster(low: float, high: float) -> str:
    """Two latency ratios, the lower first, in words: 0.87 and 0.95 are '5 to 13 % faster'."""
    most, least = round(100 * (1 - low)), round(100 * (1 - high))
    if most == least:
        return f"{abs(most)} % {'faster' if most >= 0 else 'slower'}"
    if least >= 0:
        return f"{least} to {most} % faster"
    if most <= 0:
        return f"{-most} to {-least} % slower"
    return f"{most} % faster to {-least} % slower"


def _answer(question: str, asked: Sequence[Comparison], metric: str) -> str:
    counts = {verdict: sum(c.verdict == verdict for c in asked) for verdict in (MET, MISSED, OPEN)}
    told = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    worst = min(asked, key=lambda c: c.ratio if metric == SPEED_UP else -c.ratio)
    load = f" at {worst.load:g}" if worst.load else ""
    return (
        f"{question}: {told} of {len(asked)}; worst {worst.ratio:.3f} "
        f"({worst.low:.3f} to {worst.high:.3f}), {worst.shape}{load}, {worst.workload}, "
        f"against {worst.against}."
    )
