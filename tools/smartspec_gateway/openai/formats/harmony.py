"""Reads the messages of gpt-oss, in OpenAI's format Harmony, as they arrive.

A message is a role and a header, a text and a mark that ends it:
`<|start|>assistant<|channel|>analysis<|message|>..<|end|>`. The prompt has the first role. A header
has a channel, and may have a recipient, as in ` to=functions.NAME`, before the channel or behind
it, and a type of the text, as in `<|constrain|>json`.

- To a function of the request, a text is the arguments of a call. It is passed on when it is
  complete, in the form that `tools.ToolParser` reads, whatever the channel and the order are.
- To another recipient, it is content behind the recipient's name. So is what is no JSON object.
- Without a recipient, it is a thought in the channel `analysis`, and else content.

A text without a header is content. Thoughts are a blank line apart, and so are texts. All marks are
dropped, and a header that is cut.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Literal

from smartspec_gateway.openai.formats.calls import ObjectEnd, named_calls
from smartspec_gateway.openai.formats.tools import FUNCTIONS, HARMONY, HARMONY_ARGS
from smartspec_py.engines.tokenizer_file import HARMONY_MARKS

START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL = HARMONY_MARKS
MARKS = (*HARMONY_MARKS, "<|endoftext|>")
STRAYS = (MESSAGE, CONSTRAIN)
"""Marks that end no text."""

TURN = f"{START}assistant"
THOUGHT = f"{CHANNEL}analysis{MESSAGE}"
TEXT = f"{CHANNEL}commentary{MESSAGE}"
ANSWER = f"{CHANNEL}final{MESSAGE}"

BEGINS = (*MARKS, "to=")
"""What a header begins with, besides spaces."""

MOST_HEADER = 256
"""Characters of a header."""

ANY_MARK = re.compile("|".join(map(re.escape, MARKS)))
HEADER_END = re.compile(
    "|".join(re.escape(mark) for mark in MARKS if mark not in (START, CHANNEL, CONSTRAIN))
)
NAME_OF_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CUT_HEADER = re.compile(
    rf"\s*+(?:{re.escape(START)}\w*+)?+(?:\s*+to=[^\s<]*+|\s*+{re.escape(CHANNEL)}\w*+)*+"
    rf"\s*+(?:{re.escape(CONSTRAIN)})?+\w*+"
)
"""What is no text if the answer ends there."""

EFFORTS = {
    given: {"reasoning_effort": shown}
    for shown, names in {
        "low": ("none", "minimal", "low"),
        "medium": ("medium",),
        "high": ("high", "xhigh", "max"),
    }.items()
    for given in names
}
"""The variable of the chat template, by the `reasoning_effort` of a request. The models know three,
and always think."""

Kind = Literal["header", "thought", "text", "call"]


class HarmonyParser:
    """Splits one text as `ReasoningParser` does."""

    def __init__(self, functions: Container[str], kind: Kind = "header") -> None:
        """functions: names of those that the text may call. kind: of what the text begins with."""
        self._functions, self._kind = functions, kind
        self._left = ""
        self._recipient = ""
        self._object = ObjectEnd()
        self._is_new = False  # no character of this message has come
        self._were: set[Kind] = set()
        """What the text had before."""

    def feed(self, text: str, is_end: bool = False) -> tuple[str, str]:
        """The reasoning and the rest that are certain after this part of the text."""
        self._left += text
        reasoning, rest = "", ""
        while self._left:
            before = self._left, self._kind
            kind, found = self._next(is_end)
            if found and kind != "call":
                found = f"\n\n{found}" if self._is_new and kind in self._were else found
                self._is_new = False
                self._were.add(kind)
            if kind == "thought":
                reasoning += found
            else:
                rest += found
            if before == (self._left, self._kind):
                break
        return reasoning, rest

    def _next(self, is_end: bool) -> tuple[Kind, str]:
        """The next text that is certain, maybe none."""
        if self._kind == "header":
            return "text", self._read_header(is_end)
        if self._kind == "call":
            return self._read_call(is_end)
        kind, mark = self._kind, ANY_MARK.search(self._left)
        if mark is None:
            held = 0 if is_end else _num_held(self._left)
            return kind, self._taken(len(self._left) - held)
        found = self._taken(mark.start())
        if mark[0] not in STRAYS:
            self._kind = "header"
        if mark[0] not in (START, CHANNEL):
            self._taken(len(mark[0]))
        return kind, found

    def _read_header(self, is_end: bool) -> str:
        """Where there is none, the next text is content."""
        begin = self._left.lstrip()
        if not begin.startswith(BEGINS):
            if is_end or not any(one.startswith(begin) for one in BEGINS):
                self._kind = "text"
            return ""
        head = self._left[:MOST_HEADER]
        end = HEADER_END.search(head)
        if end is None:
            if len(head) < MOST_HEADER and not is_end:
                return ""
            self._kind = "text"
            is_cut = is_end and CUT_HEADER.fullmatch(self._left)
            found = self._taken(len(head) - (0 if is_end else _num_held(head)))
            return "" if is_cut else ANY_MARK.sub("", found)
        header = self._taken(end.end()).rpartition(START)[2]
        if end[0] != MESSAGE:
            return ""
        recipients = [one for one in RECIPIENT.findall(header) if one != "assistant"]
        channel = NAME_OF_CHANNEL.findall(header)[-1:]
        self._recipient = recipients[-1] if recipients else ""
        self._kind = "thought" if channel == ["analysis"] else "text"
        self._kind = "call" if recipients else self._kind
        self._is_new = True
        return ""

    def _read_call(self, is_end: bool) -> tuple[Kind, str]:
        """The call, when it is complete."""
        name = self._recipient.removeprefix(FUNCTIONS)
        self._left = self._left.lstrip()
        if name in self._functions and self._left.startswith("{"):
            size = self._object.read(self._left)
            if size is None and not self._object.is_broken and not is_end:
                return "call", ""
            self._object = ObjectEnd()
            if size is not None and named_calls(name, self._left[:size]):
                self._kind = "text"
                return "call", f"{HARMONY}{name}{HARMONY_ARGS}{self._taken(size)}"
        if self._left or is_end:
            self._kind = "text"
            return "text", f"{self._recipient}\n"
        return "call", ""

    def _taken(self, size: int) -> str:
        found, self._left = self._left[:size], self._left[size:]
        return found


def _num_held(text: str) -> int:
    """Characters at the end of the text that may begin a mark."""
    end = text[text.rfind("<") :] if "<" in text else ""
    return len(end) if any(mark.startswith(end) for mark in MARKS) else 0
