"""Writes the result of a study: a page of Markdown, and the figures as JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smartspec_bench.document import entry_lines
from smartspec_bench.report.blocks import markdown_table
from smartspec_py.serving.profile import machine_name


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats are shown with three decimals."""
    return markdown_table(header, [list(map(_cell, row)) for row in rows])


def publish(
    folder: Path, name: str, title: str, sections: Sequence[str], figures: Mapping[str, Any]
) -> None:
    """Write NAME.md and NAME.json into the folder.

    sections: paragraphs and tables in order. figures: what the tables were made of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = f"`scripts/study {name}`, {datetime.now(UTC):%Y-%m-%d}, {machine_name()}."
    made += f" [All figures]({name}.json)."
    text = "\n\n".join(map(wrapped, [f"# {title}", made, *sections])) + "\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    document = {"study": name, "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine_name()}
    (folder / f"{name}.json").write_text(entry_lines(document | dict(figures)), encoding="utf-8")


def wrapped(text: str) -> str:
    """Paragraphs and lists in lines of at most 100 columns; tables and headings as they are."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(one if one.startswith(("|", "#")) else _wrap(one) for one in blocks)


def _wrap(block: str) -> str:
    items = re.split(r"\n(?=- )", block)
    filled = [
        textwrap.fill(
            re.sub(r"\s+", " ", item).replace(" %", "\0%"),  # a line does not begin with %
            100,
            subsequent_indent="  " if item.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    ]
    return "\n".join(filled).replace("\0", " ")


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
