"""The parts of a report. `html` makes a page of them, `markdown` a text without charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

MISSING = "-"
MARKS = {"met": "✓", "missed": "✗", "open": "?"}
"""Marks, so that verdicts differ not only by colour. A cell that begins with one has its colour."""


@dataclass(frozen=True)
class Text:
    """A paragraph. style: "", lead (large), note (pale) or code."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """num_words: columns at the left that are text; the others are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    num_words: int = 1


@dataclass(frozen=True)
class Chart:
    """name: of its file, without an ending. spec: Vega-Lite."""

    name: str
    title: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Folded:
    """Shown when its summary is clicked."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = Text | Bullets | Table | Chart | Folded


@dataclass(frozen=True)
class Section:
    """name: its id on the page."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """head: the text below the title."""

    title: str
    head: Sequence[Block]
    sections: Sequence[Section]


def markdown(report: Report) -> str:
    """Without the charts."""
    parts = [f"# {report.title}", *map(_markdown, report.head)]
    for section in report.sections:
        parts += [f"## {section.title}", *map(_markdown, section.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Text(text, style):
            return f"**{text}**" if style == "lead" else text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Table(columns, rows, caption):
            table = markdown_table(columns, rows)
            return f"{caption}\n\n{table}" if caption else table
        case Folded(_, blocks):
            return "\n\n".join(map(_markdown, blocks))
        case Chart():
            return ""


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def digits(value: float | None) -> str:
    """Three significant digits, with separators; a dash if there is no number."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def tick(value: float) -> str:
    """Of an axis: no zeros at the end."""
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def ratio(value: float) -> str:
    """Three decimals, because differences of 1 % matter; fewer from 10 on."""
    return f"{value:.3f}" if abs(value) < 10 else digits(value)


def interval(low: float, high: float) -> str:
    return f"{ratio(low)} to {ratio(high)}"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Such as `1 load`, `1,200 requests`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
