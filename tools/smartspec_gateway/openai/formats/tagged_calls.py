"""Reads calls of GLM and MiniMax, which have each argument in tags:

- GLM: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`
- MiniMax: `<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>`

As in Qwen3-Coder's format, values have no types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

KEY, VALUE, VALUE_END = "<arg_key>", "<arg_value>", "</arg_value>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
MINIMAX, MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"


class Tags(NamedTuple):
    """header: a pattern of what follows the mark of a call. NAMES is a place for those of the
    tools. parameter: of a key and its value. end: of a call."""

    header: str
    parameter: re.Pattern[str]
    end: str


ALL_TAGS = (
    Tags(
        rf"(?P<name>NAMES)\s*(?={KEY}|</tool_call>)",
        re.compile(
            rf"\s*{KEY}(.*?)</arg_key>\s*{VALUE}(.*?){VALUE_END}(?=\s*(?:{KEY}|</tool_call>))",
            re.DOTALL,
        ),
        "</tool_call>",
    ),
    Tags(
        rf'(?:{INVOKE})?(?P<name>NAMES)">',
        re.compile(
            rf'\s*<parameter name="([^"]*)">(.*?)</parameter>(?=\s*(?:<parameter |{INVOKE_END}))',
            re.DOTALL,
        ),
        INVOKE_END,
    ),
)


class TaggedCall(NamedTuple):
    """A complete call. values: texts by key. end: its place in the text."""

    name: str
    values: dict[str, str]
    end: int


class TaggedCalls:
    """Finds the end of a call, while the text arrives."""

    def __init__(self, names: Iterable[str]) -> None:
        any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
        self._headers = [re.compile(tags.header.replace("NAMES", any_name)) for tags in ALL_TAGS]
        self._num_scanned = 0

    def begins(self, text: str, at: int) -> bool:
        """Whether a call of a tool begins at this place behind a mark."""
        return any(header.match(text, at) for header in self._headers)

    def read(self, text: str, at: int) -> TaggedCall | None:
        """The call at this place, where one begins; None as long as it is not complete. text: may
        only have grown since the last call, until one is found."""
        begins = (header.match(text, at) for header in self._headers)
        begin, tags = next(
            (begin, tags) for begin, tags in zip(begins, ALL_TAGS, strict=True) if begin
        )
        place = max(begin.end(), self._num_scanned)
        while (place := text.find(tags.end, place)) >= 0:
            if found := _whole(text, begin, tags):
                self._num_scanned = 0
                return found
            place += 1
        self._num_scanned = max(0, len(text) - len(tags.end))
        return None

    def reset(self) -> None:
        """What was read was no call."""
        self._num_scanned = 0


def _whole(text: str, begin: re.Match[str], tags: Tags) -> TaggedCall | None:
    values, at = dict[str, str](), begin.end()
    while one := tags.parameter.match(text, at):
        values[one[1].strip()] = one[2]
        at = one.end()
    at += len(text[at:]) - len(text[at:].lstrip())
    if not text.startswith(tags.end, at):
        return None
    return TaggedCall(begin["name"], values, at + len(tags.end))
