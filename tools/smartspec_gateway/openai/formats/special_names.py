"""Cuts the names of special tokens in the texts of a request, so that no text contains a token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

CUT = "\ufdd0"
"""Marks where a name is cut. Unicode reserves this character for use inside programs."""

Tree = dict[str, "Tree"]


class SpecialNames:
    """The names of a tokenizer's special tokens. Those of one character cannot be cut."""

    def __init__(self, names: Iterable[str]) -> None:
        tree: Tree = {}
        for name in names:
            node = tree
            for letter in name if name[1:] else "":
                node = node.setdefault(letter, {})
            if node is not tree:
                node[""] = {}
        self._pattern = re.compile(_pattern(tree) or "(?!)")

    def cut(self, value: Any) -> Any:
        """The value of JSON, with CUT after the first character of each name in it."""
        if isinstance(value, dict):
            return {self.cut(key): self.cut(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.cut(each) for each in value]
        if isinstance(value, str):
            value = value.replace(CUT, "")
            while self._pattern.search(value):
                value = self._pattern.sub(lambda found: f"{found[0][0]}{CUT}{found[0][1:]}", value)
        return value


def num_characters(value: Any) -> int:
    """Of all texts in a value of JSON, keys too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_characters, value)) + sum(map(num_characters, value.values()))
    return sum(map(num_characters, value)) if isinstance(value, list) else 0


def _pattern(node: Tree) -> str:
    """Of what may follow. Names share the branches of the letters that they begin with. As a plain
    list, the 771 names of some models are tried one by one at each `[` of a text."""
    branches: dict[str, str] = {}
    for letter, after in node.items():
        if letter:
            rest = _pattern(after)
            branches[rest] = branches.get(rest, "") + re.escape(letter)
    found = "|".join(f"[{letters}]{rest}" for rest, letters in branches.items())
    return f"(?:{found})" + "?" * ("" in node) if found else ""
