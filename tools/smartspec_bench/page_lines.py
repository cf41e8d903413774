"""Pictures with lines: a number against the rate of requests, ratios, and a phase over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from smartspec_bench.document import Comparison, Phase
from smartspec_bench.page_colours import INK, MUTED, PAPER, RULE, Look
from smartspec_bench.page_metrics import E2E_MEAN, E2E_P99
from smartspec_bench.page_points import Metric, Point
from smartspec_bench.page_text import tick

WIDTH_IN = 5.0
RATE_AXIS = "offered rate, requests/s"
MOST_SHOWN = 3.0
"""An interval of two repeats may span decades: the picture ends this factor beyond the points."""

_ROLE_LINES = (("o", "-"), ("X", (0, (4, 2))), ("s", (0, (1, 1))), ("D", (0, (6, 1, 1, 1))))


def against_rate(
    points: Sequence[Point],
    metric: Metric,
    looks: Mapping[str, Look],
    saturation_rps: float | None,
    is_log: bool,
) -> Figure:
    """A line a policy: means over repeats; bars reach from the lowest repeat to the highest."""
    figure, axes = _axes(3.5)
    policies = [name for name in looks if any(point.policy == name for point in points)]
    for policy in policies:
        own = [point for point in points if point.policy == policy and point.values(metric)]
        _error_line(axes, own, metric, looks[policy], policy)
    axes.set_xlabel(RATE_AXIS)
    axes.set_ylabel(metric.axis)
    if is_log:
        _log_axis(axes)
    else:
        axes.set_ylim(bottom=0)
    if saturation_rps is not None:
        axes.axvline(saturation_rps, color=MUTED.light, linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(
            "none saturates",
            (saturation_rps, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
            color=MUTED.light,
            fontsize=8,
        )
    _legend(figure, axes)
    return figure


def _error_line(
    axes: Axes, points: Sequence[Point], metric: Metric, look: Look, label: str
) -> None:
    values = [point.values(metric) for point in points]
    means = [sum(one) / len(one) for one in values]
    below = [max(0.0, mean - min(one)) for mean, one in zip(means, values, strict=True)]
    above = [max(0.0, max(one) - mean) for mean, one in zip(means, values, strict=True)]
    axes.errorbar(
        [point.rate_rps for point in points],
        means,
        yerr=[below, above],
        color=look.colour.light,
        marker=look.marker,
        linestyle=look.dash,
        linewidth=look.width,
        elinewidth=1,
        capsize=2.5,
        markersize=5,
        label=label,
        zorder=3 if look.width > 2 else 2,
    )


def by_policy(points: Sequence[Point], looks: Mapping[str, Look]) -> Figure:
    """A row a policy, with its mean latency and the 99th percentile; bars as in `against_rate`."""
    figure, axes = _axes(0.3 * len(points) + 1.1)
    for metric, marker, size in ((E2E_MEAN, "o", 6), (E2E_P99, "|", 11)):
        for row, point in enumerate(points):
            values = point.values(metric)
            if not values:
                continue
            colour = looks[point.policy].colour.light
            mean = sum(values) / len(values)
            axes.errorbar(
                [mean],
                [row],
                xerr=[[mean - min(values)], [max(values) - mean]],
                color=colour,
                marker=marker,
                markersize=size,
                markeredgewidth=2,
                elinewidth=1,
                capsize=2.5,
            )
    axes.set_yticks(range(len(points)), [point.policy for point in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    _log_ticks(axes.xaxis, low, high)
    axes.set_xlabel("end-to-end latency, ms: mean (dot), p99 (stroke)")
    return figure


def ratios(comparisons: Sequence[Comparison]) -> Figure:
    """Of one metric, a line a role, with 95 % intervals; those of few repeats may leave it."""
    figure, axes = _axes(3.5)
    axes.axhline(1, color=INK.light, linewidth=1)
    for index, role in enumerate(dict.fromkeys(one.role for one in comparisons)):
        own = sorted((one for one in comparisons if one.role == role), key=lambda one: one.rate_rps)
        marker, dash = _ROLE_LINES[index % len(_ROLE_LINES)]
        colour = (INK, MUTED)[index % 2].light
        axes.errorbar(
            [one.rate_rps for one in own],
            [one.ratio for one in own],
            yerr=[
                [max(0.0, one.ratio - one.low) for one in own],
                [max(0.0, one.high - one.ratio) for one in own],
            ],
            color=colour,
            marker=marker,
            markersize=5,
            linestyle=dash,
            linewidth=1.4,
            elinewidth=1,
            capsize=2.5,
            label=f"against {role}",
        )
    axes.set_xlabel(RATE_AXIS)
    axes.set_ylabel("latency, ratio (below 1: less)")
    low, high = axes.get_ylim()
    values = [1.0, *(one.ratio for one in comparisons)]
    axes.set_ylim(max(low, min(values) / MOST_SHOWN), min(high, max(values) * MOST_SHOWN))
    _log_axis(axes)
    _legend(figure, axes)
    return figure


def over_time(phases: Sequence[Phase], looks: Mapping[str, Look]) -> Figure:
    """Load, requests in flight and draft length, one above the other, a phase of each policy."""
    figure = Figure(figsize=(WIDTH_IN, 5.2), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2, 3, 3))
    rate = phases[0].series
    top.step(rate.time_s, rate.rate_rps, where="mid", color=INK.light, linewidth=1.2)
    top.set_ylabel("requests/s due")
    for phase in phases:
        look = looks[phase.policy]
        for axes, values in (
            (middle, phase.series.running),
            (bottom, phase.series.draft_len),
        ):
            axes.plot(
                phase.series.time_s,
                values,
                color=look.colour.light,
                linestyle=look.dash,
                linewidth=look.width * 0.8,
                marker=look.marker,
                markevery=max(1, len(values) // 8),
                markersize=4,
                label=phase.policy,
                zorder=3 if look.width > 2 else 2,
            )
    middle.set_ylabel("requests in flight")
    bottom.set_ylabel("draft length, tokens")
    bottom.set_xlabel("time since the phase began, s")
    for axes in (top, middle, bottom):
        axes.set_ylim(bottom=0)
        dress(axes)
    _legend(figure, middle)
    return figure


def dress(axes: Axes) -> None:
    """Quiet frame and grid; ticks that fit a narrow picture."""
    axes.grid(color=RULE.light, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED.light)
    axes.tick_params(which="both", color=MUTED.light, labelcolor=INK.light)


def _axes(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots()
    dress(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    return figure, axes


def _log_axis(axes: Axes) -> None:
    """Labels are plain numbers, at 1, 2 and 5, or closer where the range is narrow."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    _log_ticks(axes.yaxis, low, high)


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    if high / low < 4:
        axis.set_major_locator(MaxNLocator(6))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axis.set_minor_locator(NullLocator())


def _num_columns(labels: Sequence[str]) -> int:
    """As many as fit, in rows of about equal length."""
    most = 4 if max(map(len, labels), default=0) < 10 else 3
    num_rows = math.ceil(len(labels) / most)
    return math.ceil(len(labels) / max(1, num_rows)) or 1


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=_num_columns(labels),
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
        facecolor=PAPER.light,
        labelcolor=INK.light,
    )
