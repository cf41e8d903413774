"""Shows a result document: tables in Markdown, and one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from smartspec_bench.comparison import GOODPUT, NONE, Place, PolicyMeans, Ratio, places
from smartspec_bench.results import Document

SUMMARY_COLUMNS = (
    "load",
    "no speculation",
    "best fixed length",
    "SmartSpec",
    "faster by",
    "p99",
    "TTFT",
)
POLICY_COLUMNS = ("policy", "mean latency", "p99", "TTFT", "tokens/s", "drafts", "goodput saves")

EXPLANATION = """\
Latencies are milliseconds from the time at which a request was due to its last token; TTFT is the
mean time to the first token. Values are geometric means over the repeats. "Faster by" compares
SmartSpec (the policy goodput) with the best fixed length, with a 95 % interval; it is bold if the
interval excludes 0. The length is chosen by one half of the repeats for the other half. p99 and
TTFT are for no speculation / the best fixed length / SmartSpec. "Goodput saves" is the share of the
mean latency of that policy. Drafts: mean per step."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Columns and rows."""


def summary(document: Document) -> Table:
    """One row for each load."""
    return SUMMARY_COLUMNS, [_summary_row(place) for place in places(document)]


def _summary_row(place: Place) -> tuple[str, ...]:
    none, ours, best = place.policy(NONE), place.policy(GOODPUT), place.best_fixed
    chosen = f" ({best.policy})" if best else ""
    three = (none, best, ours)
    return (
        place.label,
        _ms_of(none, "e2e_ms"),
        _ms_of(best, "e2e_ms") + chosen,
        _ms_of(ours, "e2e_ms"),
        faster_by(place.over_best),
        " / ".join(_ms_of(one, "p99_ms") for one in three),
        " / ".join(_ms_of(one, "ttft_ms") for one in three),
    )


def policies_of(place: Place) -> Table:
    """One row for each policy."""
    return POLICY_COLUMNS, [
        (
            one.policy,
            _ms_of(one, "e2e_ms"),
            _ms_of(one, "p99_ms"),
            _ms_of(one, "ttft_ms"),
            f"{one.tokens_per_s:,.1f}",
            f"{one.draft_len:.2f}",
            faster_by(one.ratio),
        )
        for one in place.policies
    ]


def faster_by(ratio: Ratio | None) -> str:
    """A ratio of latencies in percent saved: 0.87 within 0.8 to 0.95 is `**13 %** (5 to 20)`."""
    if ratio is None:
        return ""
    mean, least, most = (round(100 * (1 - v)) for v in (ratio.value, ratio.high, ratio.low))
    shown = f"{mean} %" if ratio.low <= 1 <= ratio.high else f"**{mean} %**"
    return f"{shown} ({least} to {most})"


def _ms_of(one: PolicyMeans | None, name: str) -> str:
    value = None if one is None else getattr(one, name)
    return "" if value is None else f"{value:,.0f}"


def notes(document: Document) -> list[str]:
    """What a reader must know before the figures."""
    found = [f"The run ended early: {document.error}."] if document.error else []
    for place in places(document):
        texts = f"{place.num_different_texts} texts differ from those without speculation."
        if place.num_failed:
            found.append(f"{place.label}: {place.num_failed} requests failed.")
        if place.num_different_texts:
            found.append(f"{place.label}: {texts}")
    return found


def markdown(document: Document) -> str:
    """The table of the README, and one table for each load."""
    parts = [*notes(document), _markdown_table(summary(document))]
    for place in places(document):
        parts.append(f"**{place.label}**\n\n{_markdown_table(policies_of(place))}")
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    columns, rows = table
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title><style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:70em;margin:0 auto;padding:1em;color:#222;
background:#fff;overflow-wrap:anywhere}}
div{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:.9em;font-variant-numeric:tabular-nums}}
th,td{{padding:.3em .6em;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}}
th:first-child,td:first-child{{text-align:left}}
meter{{width:100%;min-width:6em}}
@media(prefers-color-scheme:dark){{body{{background:#181818;color:#ddd}}th,td{{border-color:#444}}}}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(document: Document) -> str:
    """The HTML page. A bar beside each policy shows its mean latency."""
    parts = [f"<p><b>{escape(note)}</b></p>" for note in notes(document)]
    parts += [_html_table(summary(document)), f"<p>{escape(EXPLANATION)}</p>"]
    for place in places(document):
        longest = max((one.e2e_ms or 0.0 for one in place.policies), default=0.0)
        bars = [_bar(one.e2e_ms or 0.0, longest) for one in place.policies]
        parts += [f"<h2>{escape(place.label)}</h2>", _html_table(policies_of(place), bars)]
    parts.append("<h2>About this run</h2>")
    for name, value in document.about.items():
        if name != "title":
            parts.append(f"<p>{escape(name)}: {escape(str(value))}</p>")
    title = escape(str(document.about.get("title", "Benchmark")))
    return PAGE.format(title=title, body="\n".join(parts))


def _bar(value: float, most: float) -> str:
    return f'<meter max="{most}" value="{value}"></meter>'


def _html_table(table: Table, bars: Sequence[str] = ()) -> str:
    """bars: HTML of a last column without a heading."""
    columns, rows = table
    lines = [f"<th>{'<th>'.join(columns)}" + "<th>" * bool(bars)]
    for number, row in enumerate(rows):
        cells = [_bold(escape(cell)) for cell in row] + list(bars[number : number + 1])
        lines.append(f"<td>{'<td>'.join(cells)}")
    return f"<div><table><tr>{'<tr>'.join(lines)}</table></div>"


def _bold(text: str) -> str:
    before, mark, rest = text.partition("**")
    inner, _, after = rest.partition("**")
    return f"{before}<b>{inner}</b>{after}" if mark else text
