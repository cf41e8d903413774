"""The pictures of a run: which there are, what each is called, and what it says in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from smartspec_bench import page_bars, page_lines
from smartspec_bench import page_metrics as metrics
from smartspec_bench.document import Comparison, Document, Phase
from smartspec_bench.page_colours import Look, looks, variables
from smartspec_bench.page_points import Metric, Point, points_of, workloads_of
from smartspec_bench.page_svg import RC, inline_svg, write_png
from smartspec_bench.page_text import digits, interval, ratio, tick
from smartspec_bench.plan import STEADY

LATENCY, DRAFTS, OVER_TIME, TIME = "latency", "drafts", "over-time", "time"
"""Sections of the page."""

_LATENCIES = (metrics.E2E_MEAN, metrics.E2E_P99, metrics.TTFT_MEAN, metrics.TPOT_MEAN)
_RATIO_METRIC = "e2e_ms.mean"


@dataclass(frozen=True)
class Picture:
    """name: of its file, without an ending. description: what a reader who cannot see it needs."""

    name: str
    section: str
    title: str
    description: str
    figure: Figure

    def svg(self, policies: Mapping[str, Look]) -> str:
        colours = {colour.light: name for name, colour in variables(policies)}
        return inline_svg(self.figure, self.name, self.title, self.description, colours)


def pictures(document: Document) -> list[Picture]:
    """Those that the document has numbers for; a section without any is left to the page."""
    points = points_of(document.phases)
    policies = looks(phase.policy for phase in document.phases)
    with matplotlib.rc_context(RC):
        return [
            *_rate_pictures(document, points, policies),
            *_policy_pictures(points, policies),
            *_time_pictures(document.phases, policies),
            *_count_pictures(points, policies),
            *_share_pictures(points),
        ]


def write_pictures(drawn: Sequence[Picture], directory: Path) -> list[Path]:
    """PNG files, for documents. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{picture.name}.png" for picture in drawn]
    for picture, path in zip(drawn, paths, strict=True):
        write_png(picture.figure, path)
    return paths


def _rate_pictures(
    document: Document, points: Sequence[Point], policies: Mapping[str, Look]
) -> Iterator[Picture]:
    saturation = document.ceilings.saturation_rps.get("none")
    for workload in workloads_of(points, STEADY):
        own = [point for point in points if (point.shape, point.workload) == (STEADY, workload)]
        if not has_line(own):
            continue
        asked = _asked(document.comparisons, workload)
        if asked:
            yield _ratio_picture(asked, workload)
        for metric in (*_LATENCIES, metrics.TOKEN_GOODPUT):
            yield from _line_picture(LATENCY, own, metric, policies, saturation)
        for metric in (metrics.DRAFT_LEN, metrics.ACCEPTANCE):
            yield from _line_picture(DRAFTS, own, metric, policies, saturation)


def has_line(points: Sequence[Point]) -> bool:
    """points: of one workload."""
    return len({point.level for point in points if point.shape == STEADY}) > 1


def _policy_pictures(points: Sequence[Point], policies: Mapping[str, Look]) -> Iterator[Picture]:
    """Of every load that is no line against the rate."""
    for shape, workload in dict.fromkeys((point.shape, point.workload) for point in points):
        own = [point for point in points if (point.shape, point.workload) == (shape, workload)]
        known = [point for point in own if point.values(metrics.E2E_MEAN)]
        if has_line(own) or not known:
            continue
        figure = page_lines.by_policy(known, policies)
        title = f"Latency by policy: {shape}, {workload}"
        said = (
            f"{point.policy}: mean {digits(point.mean(metrics.E2E_MEAN))} ms, "
            f"99th percentile {digits(point.mean(metrics.E2E_P99))} ms"
            for point in known
        )
        name = _name("by-policy", shape, workload)
        yield Picture(name, LATENCY, title, f"{'; '.join(said)}.", figure)


def _asked(comparisons: Sequence[Comparison], workload: str) -> list[Comparison]:
    return [
        one
        for one in comparisons
        if (one.shape, one.workload, one.metric) == (STEADY, workload, _RATIO_METRIC)
        and one.bound is not None
    ]


def _ratio_picture(asked: Sequence[Comparison], workload: str) -> Picture:
    said = (
        f"at {tick(one.rate_rps)}/s against {one.role} {ratio(one.ratio)}"
        f" ({interval(one.low, one.high)})"
        for one in asked
    )
    title = f"Mean end-to-end latency of {asked[0].policy}, over that of others: {workload}"
    figure = page_lines.ratios(asked)
    return Picture(_name("ratio", workload), LATENCY, title, f"{'; '.join(said)}.", figure)


def _line_picture(
    section: str,
    points: Sequence[Point],
    metric: Metric,
    policies: Mapping[str, Look],
    saturation_rps: float | None,
) -> Iterator[Picture]:
    known = [point for point in points if point.values(metric)]
    if not known:
        return
    workload = points[0].workload
    is_log = metric.unit == "ms"
    figure = page_lines.against_rate(known, metric, policies, saturation_rps, is_log)
    title = f"{metric.label[0].upper()}{metric.label[1:]} against rate: {workload}"
    if metric is metrics.TOKEN_GOODPUT:
        title = f"Generated tokens a second against rate: {workload}"
    said = [_said(policy, known, metric) for policy in policies]
    text = f"{metric.axis}, by policy. {' '.join(said)}".strip()
    yield Picture(_name(metric.name, workload), section, title, text, figure)


def _said(policy: str, points: Sequence[Point], metric: Metric) -> str:
    own = [point for point in points if point.policy == policy]
    values = (f"{digits(point.mean(metric))} at {tick(point.rate_rps)}/s" for point in own)
    return f"{policy}: {', '.join(values)}." if own else ""


def _time_pictures(phases: Sequence[Phase], policies: Mapping[str, Look]) -> Iterator[Picture]:
    """Of loads that change, the first repeat that kept a series, of each policy."""
    kept = [phase for phase in phases if phase.shape != STEADY and _is_kept(phase)]
    for shape, workload in dict.fromkeys((phase.shape, phase.workload) for phase in kept):
        own = [phase for phase in kept if (phase.shape, phase.workload) == (shape, workload)]
        repeat = min(phase.repeat for phase in own)
        shown = [
            phase
            for policy in policies
            for phase in own
            if (phase.policy, phase.repeat) == (policy, repeat)
        ]
        title = f"Load and draft length over time: {shape}, {workload}"
        text = f"Repeat {repeat + 1}. Mean draft length: " + ", ".join(
            f"{phase.policy} {digits(phase.mean_draft_len)}" for phase in shown
        )
        figure = page_lines.over_time(shown, policies)
        yield Picture(_name("over-time", shape, workload), OVER_TIME, title, f"{text}.", figure)


def _is_kept(phase: Phase) -> bool:
    series = phase.series
    return len(series.time_s) > 1 and bool(series.draft_len)


def _count_pictures(points: Sequence[Point], policies: Mapping[str, Look]) -> Iterator[Picture]:
    for shape, workload in dict.fromkeys((point.shape, point.workload) for point in points):
        own = [point for point in points if (point.shape, point.workload) == (shape, workload)]
        present = [policy for policy in policies if sum(page_bars.drafted(own, policy))]
        if not present:
            continue
        title = f"Draft lengths and accepted drafts of a step: {shape}, {workload}"
        said = (
            f"{policy}: mean {digits(_mean(page_bars.drafted(own, policy)))} drafted, "
            f"{digits(_mean(page_bars.accepted(own, policy)))} accepted"
            for policy in present
        )
        figure = page_bars.histograms(own, policies)
        name = _name("histograms", shape, workload)
        yield Picture(name, DRAFTS, title, f"{'; '.join(said)}.", figure)


def _mean(counts: Sequence[int]) -> float | None:
    total = sum(counts)
    return sum(at * count for at, count in enumerate(counts)) / total if total else None


def _share_pictures(points: Sequence[Point]) -> Iterator[Picture]:
    for shape, workload in dict.fromkeys((point.shape, point.workload) for point in points):
        own = [point for point in points if (point.shape, point.workload) == (shape, workload)]
        rows = [(_label(point), shares) for point in _ends(own) if (shares := _shares(point))]
        if not rows:
            continue
        title = f"Where a step's time goes: {shape}, {workload}"
        said = (
            f"{label}: {', '.join(f'{part} {share:.0%}' for part, share in shares.items())}"
            for label, shares in rows
        )
        figure = page_bars.time_shares(rows)
        yield Picture(
            _name("time-shares", shape, workload), TIME, title, f"{'; '.join(said)}.", figure
        )


def _ends(points: Sequence[Point]) -> list[Point]:
    """The lowest and the highest rate of a policy tell the rest."""
    levels = [point.level for point in points if _shares(point)]
    return [point for point in points if levels and point.level in (min(levels), max(levels))]


def _label(point: Point) -> str:
    rate = f", {tick(point.rate_rps)}/s" if point.shape == STEADY else ""
    return f"{point.policy}{rate}"


def _shares(point: Point) -> dict[str, float]:
    """Means over the repeats that know them."""
    known = [phase.time_shares for phase in point.phases if phase.time_shares]
    parts = dict.fromkeys(part for shares in known for part in shares)
    return {part: sum(one.get(part, 0.0) for one in known) / len(known) for part in parts}


def _name(*parts: str) -> str:
    """Letters, digits and hyphens: a file's name and the beginning of an id."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
