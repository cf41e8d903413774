"""Tables of a page as rows of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smartspec_bench import page_metrics as metrics
from smartspec_bench.document import About, Ceilings, Comparison, Phase
from smartspec_bench.page_answer import verdict
from smartspec_bench.page_colours import Look
from smartspec_bench.page_points import Metric, Point
from smartspec_bench.page_text import MISSING, digits, interval, measure, ratio, tick
from smartspec_bench.plan import STEADY


@dataclass(frozen=True)
class Verdict:
    """A comparison's line."""

    verdict: str
    load: str
    against: str
    measure: str
    ratio: str
    interval: str
    bound: str
    num_pairs: int


@dataclass(frozen=True)
class Row:
    """words: left-aligned, beginning with the policy; numbers: as the columns name them."""

    policy: str
    variable: str
    words: tuple[str, ...]
    numbers: tuple[str, ...]


BEST_FIXED = "best fixed"
"""The role whose policy differs from point to point."""

WORDS = ("policy", "shape", "workload")
POINT_NUMBERS = (
    "requests/s",
    "load, %",
    "repeats",
    "sent",
    "failed",
)
PHASE_NUMBERS = (
    "requests/s",
    "load, %",
    "repeat",
    "seed",
    "sent",
    "finished",
    "failed",
    "seconds",
)
"""Before the columns of `known_metrics`."""

Columns = Sequence[tuple[Metric, str]]
"""Metrics, and the names of their columns."""


def known_metrics(points: Sequence[Point]) -> Columns:
    """Those of the table that any point has a number for."""
    return [one for one in metrics.TABLE if any(point.values(one[0]) for point in points)]


def verdict_row(one: Comparison) -> Verdict:
    return Verdict(
        verdict=verdict(one),
        load=place(one),
        against=f"{one.role}: {one.against}" if one.role == BEST_FIXED else one.against,
        measure=measure(one.metric),
        ratio=ratio(one.ratio),
        interval=interval(one.low, one.high),
        bound=MISSING if one.bound is None else ratio(one.bound),
        num_pairs=one.num_pairs,
    )


def place(one: Comparison) -> str:
    """Shape, workload, and for steady loads the rate."""
    if one.shape != STEADY:
        return f"{one.shape}, {one.workload}"
    share = f" ({_percent(one.load)} %)" if one.load else ""
    return f"{one.workload}, {tick(one.rate_rps)}/s{share}"


def point_row(point: Point, columns: Columns, policies: Mapping[str, Look]) -> Row:
    """Means over repeats; counts are sums."""
    numbers = (
        _rate(point.rate_rps),
        _percent(point.load),
        str(len(point.phases)),
        f"{point.total(lambda phase: phase.num_sent):,}",
        f"{point.total(lambda phase: phase.num_failed):,}",
        *(digits(point.mean(metric)) for metric, _ in columns),
    )
    return Row(
        point.policy, policies[point.policy].variable, (point.shape, point.workload), numbers
    )


def phase_row(phase: Phase, columns: Columns, policies: Mapping[str, Look]) -> Row:
    numbers = (
        _rate(phase.rate_rps),
        _percent(phase.load),
        str(phase.repeat + 1),
        str(phase.seed),
        f"{phase.num_sent:,}",
        f"{phase.num_finished:,}",
        f"{phase.num_failed:,}",
        f"{phase.duration_s:.1f}",
        *(digits(metric.of(phase)) for metric, _ in columns),
    )
    return Row(
        phase.policy, policies[phase.policy].variable, (phase.shape, phase.workload), numbers
    )


def machine_rows(about: About) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    limits = ", ".join(
        f"{name} {'unset' if value is None else value}" for name, value in about.limits.items()
    )
    return [
        ("machine", about.machine),
        ("cores", str(about.cores)),
        ("models", about.pair),
        ("versions", versions or MISSING),
        ("commit", about.commit or MISSING),
        ("server's limits", limits or MISSING),
        ("form of the run", about.form),
        ("began", about.date),
    ]


def ceiling_rows(ceilings: Ceilings) -> list[tuple[str, str]]:
    rates = [
        (f"saturation rate, {policy}", f"{digits(rate)} requests/s")
        for policy, rate in ceilings.saturation_rps.items()
    ]
    passes = [
        (f"pass of the target, {sequences} at once", f"{digits(time_ms)} ms")
        for sequences, time_ms in ceilings.target_pass_ms.items()
    ]
    copy = ceilings.copy_gb_per_s
    copies = [] if copy is None else [("copy in memory", f"{digits(copy)} GB/s")]
    return [*rates, *passes, *copies, *(("note", note) for note in ceilings.notes)]


def subtitle(about: About) -> str:
    """The line below the title."""
    return " · ".join(part for part in (about.pair, about.machine, about.date) if part)


def _rate(rate_rps: float) -> str:
    return digits(rate_rps) if rate_rps else MISSING


def _percent(share: float) -> str:
    return f"{100 * share:.3g}" if share else MISSING
