"""The pages of the documentation, and the commands in their shell blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
BETWEEN = {"&&", "||", "|", "&", ";"}
FENCED = re.MULTILINE | re.DOTALL


def commands_of(path: Path) -> Iterator[list[str]]:
    """The words of each command in the page's shell blocks."""
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, FENCED):
        for words in _lines(re.sub(r"\\\n\s*", " ", block)):
            for is_between, group in groupby(words, lambda word: word in BETWEEN):
                if not is_between:
                    yield list(group)


def _lines(block: str) -> Iterator[list[str]]:
    """The words of each line; a quoted text may have several lines."""
    text = ""
    for line in block.splitlines():
        text += line + "\n"
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation that goes on
            continue
        text = ""
        yield words
    assert not text, text
