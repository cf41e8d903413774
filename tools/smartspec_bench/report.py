"""Shows a result document as text with tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
            reason = f": {place.failure}" if place.failure else ""
            found.append(f"{place.label}: {place.num_failed} requests failed{reason}.")
        if place.num_different_texts:
            found.append(f"{place.label}: {texts}")
    return found


def markdown(document: Document) -> str:
    """One table of all loads, one for each load, and what was measured."""
    parts = [*notes(document), markdown_table(*summary(document)), EXPLANATION]
    for place in places(document):
        parts.append(f"**{place.label}**\n\n{markdown_table(*policies_of(place))}")
    if document.about:
        parts.append("\n".join(f"- {name}: {value}" for name, value in document.about.items()))
    return "\n\n".join(parts) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
