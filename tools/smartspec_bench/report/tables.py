"""Tables of a load run, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from smartspec_bench.document import Comparison
from smartspec_bench.plan import STEADY
from smartspec_bench.report.blocks import MARKS, MISSING, Table, digits, interval, ratio, tick
from smartspec_bench.report.points import Metric, Point

WORDS = ("policy", "shape", "workload")
BEST_FIXED = "best fixed"
"""A role. The policy that has it can differ between points."""


def means_table(points: Sequence[Point], metrics: Sequence[Metric]) -> Table:
    counts = ("requests/s", "load, %", "repeats", "sent", "failed")
    return Table(
        (*WORDS, *counts, *(metric.column for metric in metrics)),
        [_point(point, metrics) for point in points],
        "Means over the repeats. Sent and failed are sums.",
        num_words=3,
    )


def _point(point: Point, metrics: Sequence[Metric]) -> tuple[str, ...]:
    return (
        point.policy,
        point.shape,
        point.workload,
        rate(point.rate_rps),
        percent(point.load),
        str(len(point.phases)),
        f"{point.total(lambda phase: phase.num_sent):,}",
        f"{point.total(lambda phase: phase.num_failed):,}",
        *(digits(point.mean(metric)) for metric in metrics),
    )


def verdicts_table(comparisons: Sequence[Comparison], caption: str = "") -> Table:
    columns = ("verdict", "load", "against", "measure", "ratio", "95 % interval", "bound", "pairs")
    return Table(columns, [_comparison(one) for one in comparisons], caption, num_words=4)


def _comparison(one: Comparison) -> tuple[str, ...]:
    return (
        marked("not asked" if one.bound is None else one.verdict),
        _place(one),
        f"{one.role}: {one.against}" if one.role == BEST_FIXED else one.against,
        measure(one.metric),
        ratio(one.ratio),
        interval(one.low, one.high),
        MISSING if one.bound is None else ratio(one.bound),
        str(one.num_pairs),
    )


def marked(verdict: str) -> str:
    return f"{MARKS.get(verdict, '·')} {verdict}"


def _place(one: Comparison) -> str:
    """Shape and workload; for steady loads, workload and rate."""
    if one.shape != STEADY:
        return f"{one.shape}, {one.workload}"
    share = f" ({percent(one.load)} %)" if one.load else ""
    return f"{one.workload}, {tick(one.rate_rps)}/s{share}"


def measure(name: str) -> str:
    """The metric of a comparison in words: `e2e_ms.mean` is "mean end-to-end latency"."""
    field, _, statistic = name.partition(".")
    words = {
        "e2e_ms": "end-to-end latency",
        "ttft_ms": "time to first token",
        "itl_ms": "time between tokens",
        "tpot_ms": "time per token",
        "speed_up": "speed-up over none",
    }.get(field, field)
    return f"{statistic} {words}".strip()


def rate(rate_rps: float) -> str:
    return digits(rate_rps) if rate_rps else MISSING


def percent(share: float) -> str:
    return f"{100 * share:.3g}" if share else MISSING
