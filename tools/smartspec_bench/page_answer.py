"""What a page says first: what was asked, how it was run, and the answer in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smartspec_bench.document import Comparison, Document
from smartspec_bench.page_text import interval, measure, plural, ratio

VERDICTS = ("met", "missed", "open")
NOT_ASKED = "not asked"
"""Of a ratio that has no bound: it is shown, and judges nothing."""


@dataclass(frozen=True)
class Finding:
    """One question over all loads of a workload. ratios, intervals: from lowest to highest."""

    question: str
    where: str
    ratios: str
    intervals: str
    verdicts: str


def lead(document: Document) -> str:
    """The answer in one sentence: the run's own, or else one from its comparisons."""
    if document.summary:
        return document.summary[0]
    if not document.comparisons:
        return "Nothing is answered: the run compared no policies."
    found = findings(document.comparisons)
    if not found:
        return "Nothing is judged: no comparison has a bound."
    one = found[0]
    return f"{one.question}: {one.ratios} times, 95 % intervals {one.intervals}, {one.where}."


def verdict(one: Comparison) -> str:
    return NOT_ASKED if one.bound is None else one.verdict


def findings(comparisons: Sequence[Comparison]) -> list[Finding]:
    """Of what was asked, in the order of the document."""
    groups: dict[tuple[str, ...], list[Comparison]] = {}
    for one in (one for one in comparisons if one.bound is not None):
        key = (one.policy, one.role, one.metric, one.shape, one.workload)
        groups.setdefault(key, []).append(one)
    return [_finding(own) for own in groups.values()]


def _finding(own: Sequence[Comparison]) -> Finding:
    first = own[0]
    values = sorted({ratio(one.ratio) for one in own}, key=float)
    several = f", {len(own)} comparisons" if len(own) > 1 else ""
    return Finding(
        question=f"{measure(first.metric)}, {first.policy} over {first.role}",
        where=f"{first.shape}, {first.workload}{several}",
        ratios=values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}",
        intervals=interval(min(one.low for one in own), max(one.high for one in own)),
        verdicts=", ".join(f"{count} {name}" for name, count in tally(own) if count),
    )


def tally(comparisons: Sequence[Comparison]) -> list[tuple[str, int]]:
    """Verdicts on what was asked, with their counts; the usual three first."""
    counts = Counter(one.verdict for one in comparisons if one.bound is not None)
    return [(name, counts[name]) for name in (*VERDICTS, *sorted(set(counts) - {*VERDICTS}))]


def how(document: Document) -> Iterator[str]:
    """How it was run, in numbers."""
    phases = document.phases
    if not phases:
        yield "No phase was run to its end."
        return
    shapes = Counter(phase.shape for phase in phases)
    policies = plural(len({phase.policy for phase in phases}), "policy", "policies")
    workloads = sorted({phase.workload for phase in phases})
    repeats = len({phase.repeat for phase in phases})
    parts = ", ".join(f"{count} {shape}" for shape, count in shapes.items())
    yield (
        f"{plural(len(phases), 'phase')} of load ({parts}): {policies}, "
        f"{plural(len(workloads), 'workload')} ({', '.join(workloads)}), "
        f"{plural(repeats, 'repeat')}."
    )
    sent, failed = sum(one.num_sent for one in phases), sum(one.num_failed for one in phases)
    minutes = sum(one.duration_s for one in phases) / 60
    yield f"{plural(sent, 'request')} in {minutes:.1f} minutes of load; {failed:,} failed."
    if repeats == 1:
        yield "There is one repeat: nothing here tells how much another run would differ."
