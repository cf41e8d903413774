"""Splits generated text into reasoning and the rest, as it arrives.

A reasoning block is `<think>..</think>` at the beginning of the text. The prompt may contain its
`<think>`. Mistral writes `[THINK]..[/THINK]`, and Seed-OSS `<seed:think>..</seed:think>`. Gemma 4
writes `<|channel>thought..<channel|>`, also behind other text, and sometimes leaves marks without a
block, which are dropped. So are those around the answers of Cohere's models, which think in
`<|START_THINKING|>..<|END_THINKING|>`. Apertus writes `<|inner_prefix|>..<|inner_suffix|>`, and
sometimes calls a tool inside of it, which ends the block. Messages of gpt-oss are read by
`harmony`. Whitespace before the reasoning and before the rest is dropped. A text that is cut inside
its block is only reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from smartspec_gateway.openai.formats import gemma, harmony
from smartspec_gateway.openai.formats.calls import Tools
from smartspec_gateway.openai.formats.tools import APERTUS, COHERE, COHERE_END, overlap


class Marks(NamedTuple):
    """What a block begins and ends with. strays: marks without a block; with them, blocks may be
    anywhere outside of tool calls. calls: what those begin and end with. stops: what ends a
    block, too, and is no part of it. turn: what follows a block. answer: what begins an answer that
    is no call."""

    begin: str
    end: str
    strays: Sequence[str] = ()
    calls: tuple[str, str] = ("", "")
    stops: Sequence[str] = ()
    turn: str = ""
    answer: str = ""


THINK = Marks("<think>", "</think>")
CHANNEL = Marks(
    "<|channel>thought", "<channel|>", ("<|channel>", "<channel|>"), (gemma.BEGIN, gemma.END)
)

HARMONY = Marks(
    harmony.THOUGHT, harmony.END, harmony.MARKS, turn=harmony.TURN, answer=harmony.ANSWER
)

ALL_MARKS = (
    THINK,
    CHANNEL,
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        (COHERE, COHERE_END),
    ),
    Marks("<|inner_prefix|>", "<|inner_suffix|>", stops=(APERTUS,)),
)

Place = Literal["before", "inside", "after", "call"]
"""Of a text: before a block, inside of it, after it, or inside of a tool call after it."""


class Start(NamedTuple):
    """Where an answer begins."""

    marks: Marks
    place: Place


def marks_in(template: str) -> Marks | None:
    """Those that a chat template knows."""
    if HARMONY.begin in template:  # Phi's templates have its end, too
        return HARMONY
    return next((marks for marks in ALL_MARKS if marks.end in template), None)


def start_of(marks: Marks, prompt: str, prefix: str = "") -> Start | None:
    """Where the text after this prompt begins; None if no mark can follow. prefix: the beginning of
    the answer that the prompt ends with."""
    end = prompt.rstrip()
    place: Place = "before"
    if end.endswith((marks.end, marks.answer or marks.end)):
        place = "after"
    elif prefix:
        place = "inside" if prefix.rfind(marks.begin) > prefix.rfind(marks.end) else "after"
    elif end.endswith(marks.begin):
        place = "inside"
    return None if place == "after" and not marks.strays else Start(marks, place)


def parser_of(start: Start, tools: Tools) -> ReasoningParser | harmony.HarmonyParser:
    """What splits an answer. tools: those that it may call."""
    if start.marks != HARMONY:
        return ReasoningParser(start)
    kinds: dict[Place, harmony.Kind] = {"inside": "thought", "after": "text"}
    return harmony.HarmonyParser(tools, kinds.get(start.place, "header"))


class ReasoningParser:
    """Splits one text."""

    def __init__(self, start: Start) -> None:
        self._marks, self._place = start
        self._strays = re.compile("|".join(map(re.escape, self._marks.strays)) or "(?!)")
        self._left = ""
        self._is_at_start = start.place in ("before", "inside")
        """No character of this place but whitespace has come."""

    def feed(self, text: str, is_end: bool = False) -> tuple[str, str]:
        """The reasoning and the rest that are certain after this part of the text."""
        self._left += text
        reasoning, rest, last = "", "", None
        while last != self._place:
            last = self._place
            if last == "before":
                self._find_begin(is_end)
            elif last == "inside":
                reasoning += self._until((self._marks.end, *self._marks.stops), is_end)
            elif last == "after":
                rest += self._until_block(is_end)
            else:
                rest += self._until(self._marks.calls[1:], is_end)
        return reasoning, rest

    def _find_begin(self, is_end: bool) -> None:
        start, begin = self._left.lstrip(), self._marks.begin
        if start.startswith(begin):
            self._place, self._left = "inside", start[len(begin) :]
        elif is_end or not begin.startswith(start):
            self._place, self._is_at_start = "after", False

    def _until(self, marks: Sequence[str], is_end: bool) -> str:
        """The text before the first of these marks, which end a block or a call."""
        places = [self._left.find(mark) for mark in marks if mark in self._left]
        if not places:
            held = 0 if is_end else max(overlap(self._left, mark) for mark in marks)
            return self._taken(len(self._left) - held)
        is_block, self._place = self._place == "inside", "after"
        found = self._taken(min(places))
        if is_block:
            self._left, self._is_at_start = self._left.removeprefix(self._marks.end), True
        return found

    def _until_block(self, is_end: bool) -> str:
        """The rest, up to where another block or a call begins."""
        if not self._marks.strays:
            return self._taken(len(self._left))
        begins: dict[str, Place] = {self._marks.begin: "inside", self._marks.calls[0]: "call"}
        found = [(self._left.find(mark), mark) for mark in begins if mark in self._left]
        if not found:
            marks = (*begins, *self._marks.strays)
            held = 0 if is_end else max(overlap(self._left, mark) for mark in marks)
            return self._taken(len(self._left) - held, self._strays)
        at, mark = min(found)
        rest = self._taken(at, self._strays)
        self._place = begins[mark]
        if self._place == "inside":
            self._left, self._is_at_start = self._left[len(mark) :], True
        return rest

    def _taken(self, size: int, dropped: re.Pattern[str] | None = None) -> str:
        """Takes so many characters, and returns them without marks to drop and without whitespace
        at the start."""
        found, self._left = self._left[:size], self._left[size:]
        found = dropped.sub("", found) if dropped else found
        found = found.lstrip() if self._is_at_start else found
        self._is_at_start &= not found
        return found
