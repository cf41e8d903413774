"""Pictures with bars: how often each draft length was chosen and kept, and where time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from smartspec_bench.document import Phase
from smartspec_bench.page_colours import INK, PAPER, SHARES, Look
from smartspec_bench.page_lines import WIDTH_IN, dress
from smartspec_bench.page_points import Point

_ROW_IN = 0.85
_BAR_IN = 0.36
_LEAST_LABELLED = 0.06
"""A narrower bar has no room for its number."""


def histograms(points: Sequence[Point], looks: Mapping[str, Look]) -> Figure:
    """A row a policy: draft lengths of its steps, and how many drafts of a step were accepted."""
    policies = [name for name in looks if drafted(points, name)]
    figure = Figure(figsize=(WIDTH_IN, _ROW_IN * len(policies) + 0.7), layout="constrained")
    grid = figure.subplots(len(policies), 2, sharex=True, sharey=True, squeeze=False)
    for (left, right), policy in zip(grid, policies, strict=True):
        colour = looks[policy].colour.light
        _shares(left, drafted(points, policy), colour)
        _shares(right, accepted(points, policy), colour)
        left.set_title(policy, loc="left", fontsize=9, fontweight="bold", pad=2)
    grid[-1][0].set_xlabel("draft length of a step, tokens")
    grid[-1][1].set_xlabel("accepted drafts of a step")
    figure.supylabel("share of steps", fontsize=9, color=INK.light)
    return figure


def _shares(axes: Axes, counts: Sequence[int], colour: str) -> None:
    total = sum(counts)
    dress(axes)
    axes.bar(range(len(counts)), [count / total if total else 0 for count in counts], color=colour)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_yticks((0, 0.5, 1))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylim(0, 1.05)


def drafted(points: Sequence[Point], policy: str) -> list[int]:
    """Steps with 0, 1, 2, .. drafts, over all phases of a policy."""
    return _sum([phase.draft_len_counts for phase in _phases(points, policy)])


def accepted(points: Sequence[Point], policy: str) -> list[int]:
    """Steps with 0, 1, 2, .. accepted drafts, over all phases of a policy."""
    return _sum([phase.accepted_counts for phase in _phases(points, policy)])


def time_shares(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Figure:
    """A bar a label, whose parts are shares of the server's busy time."""
    figure = Figure(figsize=(WIDTH_IN, _BAR_IN * len(rows) + 1.1), layout="constrained")
    axes = figure.subplots()
    dress(axes)
    axes.grid(visible=False, axis="y")
    starts = [0.0] * len(rows)
    for part, colour in SHARES.items():
        widths = [shares.get(part, 0.0) for _, shares in rows]
        bars = axes.barh(
            range(len(rows)),
            widths,
            left=starts,
            color=colour.light,
            edgecolor=PAPER.light,
            height=0.8,
            label=part,
        )
        texts = [f"{width:.0%}" if width >= _LEAST_LABELLED else "" for width in widths]
        axes.bar_label(bars, texts, label_type="center", color=INK.light, fontsize=8)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.0, *starts))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of the server's busy time")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=INK.light)
    return figure


def _phases(points: Sequence[Point], policy: str) -> list[Phase]:
    return [phase for point in points if point.policy == policy for phase in point.phases]


def _sum(counts: Sequence[Sequence[int]]) -> list[int]:
    length = max(map(len, counts), default=0)
    return [sum(one[at] for one in counts if at < len(one)) for at in range(length)]
