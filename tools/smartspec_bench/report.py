"""Shows a result document: tables in Markdown, and one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from smartspec_bench.comparison import GOODPUT, NONE, Place, PolicyMeans, places
from smartspec_bench.ratios import Ratio
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


def summary_rows(document: Document) -> list[tuple[str, ...]]:
    """One row for each load, with the columns of SUMMARY_COLUMNS."""
    return [_summary(place) for place in places(document)]


def _summary(place: Place) -> tuple[str, ...]:
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


def policy_rows(place: Place) -> list[tuple[str, ...]]:
    """One row for each policy, with the columns of POLICY_COLUMNS."""
    return [
        (
            one.policy,
            _ms(one.e2e_ms),
            _ms(one.p99_ms),
            _ms(one.ttft_ms),
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


def notes(document: Document) -> list[str]:
    """What a reader must know before the figures."""
    found = [f"The run ended early: {document.error}."] if document.error else []
    for place in places(document):
        if place.num_failed:
            found.append(f"{place.label}: {place.num_failed} requests failed.")
        if place.num_different_texts:
            found.append(
                f"{place.label}: {place.num_different_texts} texts differ from those without "
                "speculation."
            )
    return found


def markdown(document: Document) -> str:
    """The table of the README, and one table for each load."""
    parts = [*notes(document), _table(SUMMARY_COLUMNS, summary_rows(document))]
    for place in places(document):
        parts.append(f"**{place.label}**\n\n{_table(POLICY_COLUMNS, policy_rows(place))}")
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


STYLE = """\
body{font:16px/1.5 system-ui,sans-serif;max-width:70em;margin:0 auto;padding:1em;color:#222;
background:#fff;overflow-wrap:anywhere}
div.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9em;font-variant-numeric:tabular-nums}
th,td{padding:.3em .6em;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.bar{display:grid;grid-template-columns:8em 1fr 5em;gap:.5em;font-size:.9em;align-items:center}
.bar i{display:block;height:1em;background:#8aa}
.bar i.ours{background:#06c}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}th,td{border-color:#444}}
@media(max-width:30em){.bar{grid-template-columns:5.5em 1fr 4em}}"""


def page(document: Document) -> str:
    """The HTML page."""
    title = str(document.about.get("title", "Benchmark"))
    about = [
        (name, str(value))
        for name, value in document.about.items()
        if name not in ("title", "definitions") and isinstance(value, str | int | float)
    ]
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p><b>{escape(note)}</b></p>" for note in notes(document)),
        _html_table(SUMMARY_COLUMNS, summary_rows(document)),
        f"<p>{escape(EXPLANATION)}</p>",
        *(part for place in places(document) for part in _section(place)),
        "<h2>About this run</h2>",
        *(f"<p>{escape(name)}: {escape(value)}</p>" for name, value in about),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{STYLE}\n</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(place: Place) -> Iterator[str]:
    """A bar for the mean latency of each policy, and the table."""
    yield f"<h2>{escape(place.label)}</h2>"
    yield "<p>Mean latency in milliseconds; shorter is faster.</p>"
    longest = max((one.e2e_ms or 0.0 for one in place.policies), default=0.0)
    yield from (_bar(one, longest) for one in place.policies if one.e2e_ms)
    yield _html_table(POLICY_COLUMNS, policy_rows(place))


def _bar(one: PolicyMeans, longest_ms: float) -> str:
    share = 100 * (one.e2e_ms or 0.0) / longest_ms
    kind = ' class="ours"' if one.policy == GOODPUT else ""
    return (
        f'<div class="bar"><span>{escape(one.policy)}</span>'
        f'<i{kind} style="width:{share:.1f}%"></i><span>{_ms(one.e2e_ms)}</span></div>'
    )


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        shown = (_bold(escape(cell)) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in shown)}</tr>"

    body = [line("th", columns), *(line("td", row) for row in rows)]
    return f'<div class="wide"><table>{"".join(body)}</table></div>'


def _bold(text: str) -> str:
    before, mark, rest = text.partition("**")
    inner, _, after = rest.partition("**")
    return f"{before}<b>{inner}</b>{after}" if mark else text


def _ms_of(one: PolicyMeans | None, name: str) -> str:
    return "" if one is None else _ms(getattr(one, name))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
