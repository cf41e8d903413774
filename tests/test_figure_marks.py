"""Figures with a mark: `<!-- figures: FILE WHERE FORMAT; WHERE FORMAT -->` behind a paragraph.

The mark names the file in docs/results, and where in it each figure of the paragraph comes from, in
their order. WHERE is a path of keys with `/` between them, or two of them with ` over ` between,
which is their ratio. A part of a key is enough if no other key has it. FORMAT is Python's, or
`higher` or `lower`: how many percent a ratio is above or below 1. Figures that take more than a
ratio are in test_figures.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- figures: (\S+\.json)\s+(.*?) -->", re.DOTALL)


def marks() -> Iterator[Any]:
    """Page, the words of the paragraph before the mark, file, and the parts of the mark."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for mark in MARK.finditer(text):
            paragraph = MARK.sub("", text[: mark.start()].rstrip().rpartition("\n\n")[2])
            words = " ".join(paragraph.split())
            figures = " ".join(mark[2].split()).split("; ")
            yield pytest.param(words, mark[1], figures, id=f"{page.name}: {words[:40]}")


def value(document: Any, where: str) -> float:
    def get(found: Any, key: str) -> Any:
        if isinstance(found, list):
            return found[int(key)]
        [name] = [key] if key in found else [one for one in found if key in one]
        return found[name]

    first, *second = (float(reduce(get, one.split("/"), document)) for one in where.split(" over "))
    return first / second[0] if second else first


def shown(figure: float, form: str) -> str:
    if form in ("higher", "lower"):
        return f"{abs(100 * (figure - 1)):.0f} %"
    return format(figure, form)


@pytest.mark.parametrize(("words", "name", "figures"), list(marks()))
def test_a_marked_figure_is_that_of_its_file(words: str, name: str, figures: list[str]) -> None:
    document = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))
    start = 0
    for figure in figures:
        where, _, form = figure.rpartition(" ")
        text = shown(value(document, where), form)
        found = re.search(rf"(?<![\d.,]){re.escape(text)}(?!\d|[.,]\d)", words[start:])
        assert found, f"{text} of {where} is not behind {words[:start]!r}"
        start += found.end()
