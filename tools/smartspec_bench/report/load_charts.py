"""The charts of a load run. Vega adds a text label to every mark, for screen readers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smartspec_bench.document import Comparison, Document, Phase
from smartspec_bench.plan import NONE, STEADY
from smartspec_bench.report import charts
from smartspec_bench.report.blocks import Chart, tick
from smartspec_bench.report.points import (
    ACCEPTANCE,
    DRAFT_LEN,
    E2E_MEAN,
    E2E_P99,
    TOKEN_GOODPUT,
    TPOT_MEAN,
    TTFT_MEAN,
    Metric,
    Point,
    by_place,
    has_line,
    ordered,
    points_of,
)

LATENCY, DRAFTS, OVER_TIME, TIME = "latency", "drafts", "over-time", "time"
"""Sections of the report."""

RATE_AXIS = "offered rate, requests/s"
MOST_SHOWN = 3.0
"""Intervals of two repeats can be very wide. The axis ends at this factor beyond the points."""


def charts_of(document: Document) -> dict[str, list[Chart]]:
    """Charts by section. A chart is omitted if the document has no numbers for it."""
    places = by_place(points_of(document.phases))
    saturation = document.ceilings.saturation_rps.get(NONE)
    latency, drafts = list[Chart](), list[Chart]()
    for points in places:
        if not has_line(points):
            latency += _by_policy(points)
            continue
        latency += _ratios(document.comparisons, points[0].workload)
        for metric in (E2E_MEAN, E2E_P99, TTFT_MEAN, TPOT_MEAN, TOKEN_GOODPUT):
            latency += _against_rate(points, metric, saturation)
        for metric in (DRAFT_LEN, ACCEPTANCE):
            drafts += _against_rate(points, metric, saturation)
    return {
        LATENCY: latency,
        OVER_TIME: list(_over_time(document.phases)),
        DRAFTS: drafts + [chart for points in places for chart in _histograms(points)],
        TIME: [chart for points in places for chart in _time_shares(points)],
    }


def _against_rate(
    points: Sequence[Point], metric: Metric, saturation_rps: float | None
) -> Iterator[Chart]:
    known = [point for point in points if point.values(metric)]
    if not known:
        return
    workload, label = points[0].workload, metric.label
    spec = charts.lines(
        [
            {
                "group": point.policy,
                "x": point.rate_rps,
                "y": point.mean(metric),
                **_ends(point, metric),
            }
            for point in known
        ],
        _policies(points),
        RATE_AXIS,
        label,
        is_log=metric.is_time,
        x_rules={} if saturation_rps is None else {"saturation of none": saturation_rps},
    )
    title = f"{label[0].upper()}{label[1:].partition(', ')[0]} over rate: {workload}"
    yield Chart(_name(metric.name, workload), title, spec)


def _ends(point: Point, metric: Metric) -> dict[str, float]:
    values = point.values(metric)
    return {"low": min(values), "high": max(values)}


def _ratios(comparisons: Sequence[Comparison], workload: str) -> Iterator[Chart]:
    asked = [
        one
        for one in comparisons
        if (one.shape, one.workload, one.metric) == (STEADY, workload, "e2e_ms.mean")
        and one.bound is not None
    ]
    if not asked:
        return
    values = [1.0, *(one.ratio for one in asked)]
    spec = charts.lines(
        [
            {"group": one.role, "x": one.rate_rps, "y": one.ratio, "low": one.low, "high": one.high}
            for one in asked
        ],
        list(dict.fromkeys(one.role for one in asked)),
        RATE_AXIS,
        "latency ratio (below 1: goodput is faster)",
        is_log=True,
        domain=[
            max(min(one.low for one in asked), min(values) / MOST_SHOWN),
            min(max(1.0, *(one.high for one in asked)), max(values) * MOST_SHOWN),
        ],
        y_rule=1.0,
    )
    title = f"Mean end-to-end latency of {asked[0].policy} / other policies: {workload}"
    yield Chart(_name("ratio", workload), title, spec)


def _by_policy(points: Sequence[Point]) -> Iterator[Chart]:
    """Latency by policy, for loads that have no chart over the rate."""
    known = [point for point in points if point.values(E2E_MEAN)]
    if not known:
        return
    rows: list[dict[str, Any]] = [
        {
            "group": point.policy,
            "mean": point.mean(E2E_MEAN),
            "far": point.mean(E2E_P99),
            **_ends(point, E2E_MEAN),
        }
        for point in known
    ]
    spec = charts.ranges(rows, _policies(known), "end-to-end latency, ms: mean (dot), p99 (tick)")
    place = (points[0].shape, points[0].workload)
    title = f"Latency by policy: {', '.join(place)}"
    yield Chart(_name("by-policy", *place), title, spec)


def _over_time(phases: Sequence[Phase]) -> Iterator[Chart]:
    """For each changing load, the first repeat with a series, for each policy."""
    kept = [
        phase
        for phase in phases
        if phase.shape != STEADY and len(phase.series.time_s) > 1 and phase.series.draft_len
    ]
    for place in dict.fromkeys((phase.shape, phase.workload) for phase in kept):
        own = [phase for phase in kept if (phase.shape, phase.workload) == place]
        repeat = min(phase.repeat for phase in own)
        shown = [phase for phase in own if phase.repeat == repeat]

        def rows(field: str, phases: Sequence[Phase], name: str = "") -> list[dict[str, Any]]:
            return [
                {"group": name or phase.policy, "x": x, "y": y}
                for phase in phases
                for x, y in zip(phase.series.time_s, getattr(phase.series, field), strict=True)
            ]

        panels = {
            "requests/s due": rows("rate_rps", shown[:1], "load"),
            "requests in flight": rows("running", shown),
            "draft length": rows("draft_len", shown),
        }
        spec = charts.over_time(panels, ordered(phase.policy for phase in shown))
        title = f"Load and draft length over time: {', '.join(place)}"
        yield Chart(_name(OVER_TIME, *place), title, spec)


def _histograms(points: Sequence[Point]) -> Iterator[Chart]:
    sides = {"drafted": "draft_len_counts", "accepted, steps with drafts": "accepted_counts"}
    rows: list[dict[str, Any]] = []
    for policy in _policies(points):
        phases = [phase for point in points if point.policy == policy for phase in point.phases]
        for side, field in sides.items():
            counts = _sum([getattr(phase, field) for phase in phases])
            if total := sum(counts):
                rows += [
                    {"group": policy, "side": side, "length": length, "share": count / total}
                    for length, count in enumerate(counts)
                ]
    if not rows:
        return
    place = (points[0].shape, points[0].workload)
    groups = [policy for policy in _policies(points) if any(r["group"] == policy for r in rows)]
    title = f"Steps by draft length and by number of accepted drafts: {', '.join(place)}"
    spec = charts.histograms(rows, groups, list(sides))
    yield Chart(_name("histograms", *place), title, spec)


def _time_shares(points: Sequence[Point]) -> Iterator[Chart]:
    """Time shares at the lowest and the highest rate. Rates between them are omitted."""
    known = [point for point in points if _shares(point)]
    ends = {point.level for point in (known[:1] + known[-1:])}
    shown = {_label(point): _shares(point) for point in known if point.level in ends}
    if not shown:
        return
    parts = list(dict.fromkeys(part for shares in shown.values() for part in shares))
    rows = [
        {"group": label, "part": part, "share": share}
        for label, shares in shown.items()
        for part, share in shares.items()
    ]
    place = (points[0].shape, points[0].workload)
    title = f"Time shares of a step: {', '.join(place)}"
    spec = charts.stacked(rows, list(shown), parts, "share of the server's busy time")
    yield Chart(_name("time-shares", *place), title, spec)


def _label(point: Point) -> str:
    rate = f", {tick(point.rate_rps)}/s" if point.shape == STEADY else ""
    return f"{point.policy}{rate}"


def _shares(point: Point) -> Mapping[str, float]:
    """Means over the repeats that have time shares."""
    known = [phase.time_shares for phase in point.phases if phase.time_shares]
    parts = dict.fromkeys(part for shares in known for part in shares)
    return {part: sum(one.get(part, 0.0) for one in known) / len(known) for part in parts}


def _policies(points: Sequence[Point]) -> list[str]:
    return ordered(point.policy for point in points)


def _sum(counts: Sequence[Sequence[int]]) -> list[int]:
    length = max(map(len, counts), default=0)
    return [sum(one[at] for one in counts if at < len(one)) for at in range(length)]


def _name(*parts: str) -> str:
    """A name of letters, digits and hyphens, for files and element ids."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
