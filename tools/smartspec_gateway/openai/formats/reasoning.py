"""Splits generated text into reasoning and the rest, as it arrives.

A reasoning block is `<think>..</think>` at the beginning of the text. The prompt may contain its
`<think>`. Whitespace before the reasoning and before the rest is dropped. A text that is cut inside
its block is only reasoning.
"""

from __future__ import annotations

from typing import Literal

from smartspec_gateway.openai.formats.tools import overlap

BEGIN, END = "<think>", "</think>"


def ends_in_reasoning(prompt: str) -> bool:
    """Whether the text after this prompt begins inside of a block."""
    return prompt.rstrip().endswith(BEGIN)


def is_open(text: str) -> bool:
    """Whether this beginning of an answer ends inside of a block."""
    return text.rfind(BEGIN) > text.rfind(END)


class ReasoningParser:
    """Splits one text."""

    def __init__(self, is_inside: bool) -> None:
        self._place: Literal["before", "inside", "after"] = "inside" if is_inside else "before"
        self._left = ""
        self._is_at_start = True
        """No character of this place but whitespace has come."""

    def feed(self, text: str, is_end: bool = False) -> tuple[str, str]:
        """The reasoning and the rest that are certain after this part of the text."""
        self._left += text
        reasoning = ""
        if self._place == "before":
            self._find_begin(is_end)
        if self._place == "inside":
            reasoning = self._until_end(is_end)
        return reasoning, self._taken(len(self._left)) if self._place == "after" else ""

    def _find_begin(self, is_end: bool) -> None:
        start = self._left.lstrip()
        if start.startswith(BEGIN):
            self._place, self._left = "inside", start[len(BEGIN) :]
        elif is_end or not BEGIN.startswith(start):
            self._place, self._is_at_start = "after", False

    def _until_end(self, is_end: bool) -> str:
        at = self._left.find(END)
        is_over = at >= 0
        if not is_over:
            at = len(self._left) - (0 if is_end else overlap(self._left, END))
        found = self._taken(at)
        if is_over:
            self._place, self._left, self._is_at_start = "after", self._left[len(END) :], True
        return found

    def _taken(self, size: int) -> str:
        """Takes so many characters, and returns them without whitespace at the start."""
        found, self._left = self._left[:size], self._left[size:]
        found = found.lstrip() if self._is_at_start else found
        self._is_at_start &= not found
        return found
