"""Charts, by Vega-Altair. A policy has the same colour, dash and marker in each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

import altair as alt

from smartspec_bench.report.points import fixed_len

Rows: TypeAlias = Sequence[Mapping[str, Any]]

INK, MUTED = "#1b1f24", "#59626d"
WIDTH, HEIGHT = 430, 260

_KNOWN = {
    "goodput": "#c94a00",
    "goodput_global": "#7b3294",
    "none": "#5e6873",
    "batch_table": "#00795a",
    "draft": "#f3c677",
    "target": "#b7cfe6",
    "host": "#dadcdf",
}
"""Colours of policies, and of parts of a step, which are pale so that text on them is readable."""
_BLUES = ("#4292c6", "#3182bd", "#2171b5", "#1561a5", "#08519c", "#084081", "#08306b")
"""Colours of fixed draft lengths, from short to long."""
_OTHERS = ("#806600", "#a3316b", "#8a4b2a", "#3a6b35", "#5b4b9a", "#006d77", "#b5530f", "#555555")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 1], [1, 3], [10, 3])
_MARKERS = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
)


def colours(names: Sequence[str]) -> list[str]:
    """Colours of policies in the order of `ordered`, or of other names."""
    fixed = [name for name in names if fixed_len(name) is not None]
    others = [name for name in names if name not in _KNOWN and name not in fixed]

    def colour(name: str) -> str:
        if name in fixed:
            step = (len(_BLUES) - 1) / max(1, len(fixed) - 1)
            return _BLUES[round(fixed.index(name) * step) if len(fixed) > 1 else 2]
        return _KNOWN.get(name) or _OTHERS[others.index(name) % len(_OTHERS)]

    return [colour(name) for name in names]


def lines(
    rows: Rows,
    groups: Sequence[str],
    x: str,
    y: str,
    *,
    is_log: bool = False,
    is_x_log: bool = False,
    domain: list[float] | None = None,
    x_rules: Mapping[str, float] | None = None,
    y_rule: float | None = None,
) -> dict[str, Any]:
    """One line per group. rows: group, x, y; low and high, if any, are the ends of a bar. x, y:
    titles of the axes. domain: of y on a logarithmic axis; values beyond it are cut off. x_rules:
    positions by their labels."""
    shown = [name for name in groups if any(row["group"] == name for row in rows)]
    legend = alt.Legend(values=shown)
    x_scale = alt.Scale(type="log", base=2) if is_x_log else alt.Scale(zero=True, padding=8)
    scale = alt.Scale(zero=True)
    if is_log:
        scale = alt.Scale(type="log", nice=False, padding=8, domain=domain or alt.Undefined)
    base = _chart(rows).encode(
        x=alt.X("x:Q", title=x, scale=x_scale, axis=alt.Axis(tickCount=6)),
        y=alt.Y("y:Q", title=y, scale=scale, axis=alt.Axis(tickCount=6, format=",.3~r")),
        color=_colour(groups, legend=legend),
        tooltip=["group:N", *_numbers("x", "y", *({"low", "high"} & {*rows[0]}))],
    )
    layers: list[alt.Chart] = []
    for label, place in (x_rules or {}).items():
        at = _chart([{"x": place, "label": label}]).encode(x="x:Q")
        layers += [
            at.mark_rule(color=MUTED, strokeDash=[1, 2]),
            at.mark_text(angle=270, align="left", dy=-6, color=MUTED, y=HEIGHT - 4).encode(
                text="label:N"
            ),
        ]
    if y_rule is not None:
        layers.append(_chart([{"y": y_rule}]).mark_rule().encode(y="y:Q"))
    if "low" in rows[0]:
        layers.append(base.mark_rule(clip=True).encode(y="low:Q", y2="high:Q"))
    layers += [
        base.mark_line(clip=True).encode(
            strokeDash=alt.StrokeDash(
                "group:N", title=None, scale=_cycled(_DASHES, groups), legend=legend
            )
        ),
        base.mark_point(filled=True, size=45, clip=True, opacity=1).encode(
            shape=alt.Shape("group:N", title=None, scale=_cycled(_MARKERS, groups), legend=legend)
        ),
    ]
    return _spec(alt.layer(*layers).properties(width=WIDTH, height=HEIGHT))


def ranges(rows: Rows, groups: Sequence[str], x: str) -> dict[str, Any]:
    """One row per group, on a logarithmic axis. rows: group, mean, low, high; far, a stroke."""
    base = _chart(rows).encode(
        y=alt.Y("group:N", title=None, sort=list(groups)),
        color=_colour(groups, legend=None),
        tooltip=["group:N", *_numbers("mean", "low", "high", "far")],
    )
    scale = alt.Scale(type="log", nice=False, padding=10)
    axis = alt.Axis(tickCount=6, format=",.3~r")
    layers = (
        base.mark_rule().encode(x=alt.X("low:Q", title=x, scale=scale, axis=axis), x2="high:Q"),
        base.mark_circle(size=70, opacity=1).encode(x="mean:Q"),
        base.mark_tick(thickness=2).encode(x="far:Q"),
    )
    return _spec(alt.layer(*layers).properties(width=WIDTH, height=alt.Step(24)))


def stacked(rows: Rows, groups: Sequence[str], parts: Sequence[str], x: str) -> dict[str, Any]:
    """One bar per group. rows: group, part, share."""
    placed = [{**row, "order": parts.index(row["part"])} for row in rows]
    base = _chart(placed).encode(
        x=alt.X("share:Q", title=x, axis=alt.Axis(format="%")),
        y=alt.Y("group:N", title=None, sort=list(groups)),
        order="order:Q",
        tooltip=["group:N", "part:N", alt.Tooltip("share:Q", format=".0%")],
    )
    texts = base.mark_text(color=INK, fontSize=10).encode(
        x=alt.X("share:Q", stack="zero", bandPosition=0.5),
        text=alt.Text("share:Q", format=".0%"),
        opacity=alt.condition("datum.share >= 0.06", alt.value(1), alt.value(0)),
    )
    bars = base.mark_bar(stroke="white").encode(color=_colour(parts, "part"))
    return _spec(alt.layer(bars, texts).properties(width=WIDTH, height=alt.Step(22)))


def histograms(rows: Rows, groups: Sequence[str], sides: Sequence[str]) -> dict[str, Any]:
    """One row per group, one column per side. rows: group, side, length, share."""
    chart = _chart(rows).mark_bar()
    chart = chart.encode(
        x=alt.X("length:O", title=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("share:Q", title=None, axis=alt.Axis(format="%", tickCount=3)),
        color=_colour(groups, legend=None),
        tooltip=["group:N", "side:N", "length:O", alt.Tooltip("share:Q", format=".1%")],
    ).properties(width=190, height=60)
    grid = chart.facet(
        row=alt.Row("group:N", title=None, sort=list(groups)),
        column=alt.Column("side:N", title=None, sort=list(sides)),
        spacing=8,
    )
    return _spec(grid)


def over_time(panels: Mapping[str, Rows], groups: Sequence[str]) -> dict[str, Any]:
    """Panels with the titles of their y axes, one above the other. rows: group, x, y. A group with
    another name, such as the load's, is drawn in the text colour."""
    charts = []
    for title, rows in panels.items():
        is_policy = any(row["group"] in groups for row in rows)
        chart = _chart(rows)
        chart = chart.mark_line(interpolate="linear" if is_policy else "step", color=INK)
        chart = chart.encode(
            x=alt.X("x:Q", title="time since the phase began, s"),
            y=alt.Y("y:Q", title=title, axis=alt.Axis(tickCount=4)),
            tooltip=["group:N", *_numbers("x", "y")],
        )
        if is_policy:
            chart = chart.encode(color=_colour(groups))
        charts.append(chart.properties(width=WIDTH, height=110))
    return _spec(alt.vconcat(*charts))


def _chart(rows: Rows) -> alt.Chart:
    return alt.Chart({"values": list(rows)})


def _colour(
    groups: Sequence[str], field: str = "group", legend: alt.Legend | Any | None = alt.Undefined
) -> alt.Color:
    scale = alt.Scale(domain=list(groups), range=colours(groups))
    return alt.Color(f"{field}:N", title=None, scale=scale, legend=legend)


def _numbers(*fields: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{field}:Q", format=",.4~r") for field in fields]


def _cycled(values: Sequence[Any], names: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=list(names), range=[v for v, _ in zip(cycle(values), names)])


def _spec(chart: Any) -> dict[str, Any]:
    """The chart with the common look of all charts."""
    chart = chart.configure_axis(labelColor=INK, titleColor=INK, titleFontWeight="normal")
    chart = chart.configure_legend(orient="top", columns=5, symbolStrokeWidth=2)
    found: dict[str, Any] = chart.configure_view(stroke=None).to_dict()
    return found
