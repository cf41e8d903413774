"""Finds tool calls in generated text, as it arrives, in the formats that models write.

- Hermes and Qwen: `<tool_call>{"name": .., "arguments": {..}}</tool_call>` anywhere in the text
- Qwen3-Coder: `<function=NAME><parameter=KEY>value</parameter></function>`, with or without
  `<tool_call>` around it; Llama 3.1 also with a JSON object in place of the parameters
- Qwen2.5-Coder: the JSON object in a fence, ```` ```json ````
- Llama 3: the text is `{"name": .., "parameters": {..}}`, maybe after `<|python_tag|>`, and maybe
  more of them, with `;` between
- Mistral, Phi-4-mini and Granite 3: the text is a list of such objects, maybe after `[TOOL_CALLS]`,
  `functools` or `<|tool_call|>`
- Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>` anywhere in the text
- GLM-4 and Mistral since 2025: the text is `NAME{..}`, maybe with a line break or `[ARGS]` between

A call is passed on when it is complete. Text that is not a call of a given tool is content, so
nothing is lost. A call ends where its JSON ends: a text in its arguments may contain the marks.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

from smartspec_gateway.openai.formats import gemma
from smartspec_gateway.openai.formats.calls import (
    ObjectEnd,
    Tools,
    json_calls,
    named_calls,
    new_call,
    xml_call,
)

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
ANYWHERE = (BEGIN, FUNCTION, gemma.BEGIN)
"""What begins a call anywhere in a text."""

FENCE = "```"
LIST_MARKS = ("[TOOL_CALLS]", "<|tool_call|>")
MARKS = ("<|python_tag|>", *LIST_MARKS, "functools")
"""What may be before calls at the beginning of a text."""

ARGS = "[ARGS]"
SPACE = " \t\r\n"

HEADER = re.compile(r'\{"name": "([^"]+)", "(?:arguments|parameters)": ')
"""What a call of `call_grammar` in JSON begins with."""

FENCED = re.compile(r"```(?:json)?\s*(?=[\[{])")
BEGINS_FENCE = re.compile(r"`{1,3}$|```(?:j|js|jso|json)?\s*$")
"""The end of a text in which FENCED may begin."""

FUNCTION_NAME = re.compile(r"<function=([^>\n]{1,128})>")
NO_PARAMETERS = re.compile(rf"\s*{FUNCTION_END}")


Part = str | dict[str, Any]
"""A text outside of calls, or a call in OpenAI's format, without index. A call without `id`
continues the arguments of the call before it."""


class ToolParser:
    """Splits one text into content and calls of the given tools, in their order."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._left = ""
        self._is_begin = True  # as long as there was no content
        names, marks = ("|".join(map(re.escape, words)) for words in (tools, MARKS))
        names = names or "(?!)"
        named = rf"(?P<name>{names})\s*(?:{re.escape(ARGS)}\s*)?(?=\{{)"
        self._head = re.compile(rf"\s*+(?P<mark>{marks})?\s*+(?:{named}|(?=[\[{{]))")
        self._heads = [
            f"{mark}{name}{args}"
            for mark in ("", *MARKS)
            for name, args in (("", ""), *product(tools, ("", ARGS)))
        ]
        """What a text of calls may begin with, without spaces, besides JSON."""
        self._most_head = 2 * max(map(len, self._heads))
        """Characters of a text that tell whether it begins with one."""
        self._closing = ""  # what may follow the last call
        self._skipped = ""  # characters to drop between two calls
        self._object = ObjectEnd()
        self._gemma_end = gemma.CallEnd()
        self._num_scanned = 0
        """Characters of `_left` that are known not to end a function."""

    def feed(self, text: str) -> list[Part]:
        """What is certain after this part of the text."""
        self._left += text
        return self._take(is_end=False)

    def finish(self) -> list[Part]:
        """The rest."""
        return self._take(is_end=True)

    def _take(self, is_end: bool) -> list[Part]:
        found: list[Part] = []
        while (parts := self._next(is_end)) is not None:
            found += parts
        return found

    def _next(self, is_end: bool) -> list[Part] | None:
        """The next calls or content. None if it is not known yet, or at the end."""
        if self._closing:
            start = len(self._left) - len(self._left.lstrip(SPACE))
            if self._closing == END and self._left.startswith("{", start):
                return self._json(start, END, is_end)  # the next one between the same marks
            if not self._closed(is_end):
                return None
        self._left = self._left.lstrip(self._skipped)
        if not self._left:
            return None
        if self._left.startswith(BEGIN):
            return self._tagged(is_end)
        if self._left.startswith(gemma.BEGIN):
            return self._gemma(is_end)
        if self._left.startswith(FUNCTION):
            return self._function(0, is_end)
        if fence := FENCED.match(self._left):
            return self._json(fence.end(), FENCE, is_end)
        if self._is_begin:
            is_reading = self._object.num_read > 0  # JSON, so the head is known
            if not (is_end or is_reading) and self._may_be_head():
                return None
            if head := self._head.match(self._left):
                is_marked = head["mark"] is not None
                return self._json(head.end(), "", is_end, is_marked, head["name"])
        return self._other(is_end)

    def _may_be_head(self) -> bool:
        """Whether the text so far may continue as one of `_heads`."""
        text = "".join(self._left.lstrip()[: self._most_head].split())
        return any(head.startswith(text) for head in self._heads)

    def _closed(self, is_end: bool) -> bool:
        """Drop what closes the last call, which models sometimes leave out. False if it may still
        come."""
        rest = self._left.lstrip(SPACE)
        if rest.startswith(self._closing):
            self._left = rest[len(self._closing) :]
        elif self._closing.startswith(rest):
            if not is_end:
                return False
            self._left = ""  # the text was cut
        self._closing = ""
        return True

    def _tagged(self, is_end: bool) -> list[Part] | None:
        """What follows BEGIN."""
        start = len(self._left) - len(self._left[len(BEGIN) :].lstrip(SPACE))
        rest = self._left[start:]
        if rest.startswith(("{", "[")):
            return self._json(start, END, is_end)
        if rest.startswith(FUNCTION):
            return self._function(start, is_end)
        if not is_end and FUNCTION.startswith(rest):
            return None
        return self._content(len(BEGIN))

    def _gemma(self, is_end: bool) -> list[Part] | None:
        """What follows the mark of Gemma 4."""
        rest = self._left[len(gemma.BEGIN) :].lstrip(SPACE)
        if not rest.startswith(gemma.CALL) and (is_end or not gemma.CALL.startswith(rest)):
            return self._content(len(gemma.BEGIN))
        ends = self._gemma_end.read(self._left)
        if ends is None and not is_end:
            return None
        self._gemma_end = gemma.CallEnd()
        end_of_arguments, end = ends or (len(self._left), len(self._left))
        calls = gemma.gemma_calls(self._left[:end_of_arguments], self._tools)
        return self._called(calls, end, "")

    def _json(
        self,
        start: int,
        closing: str,
        is_end: bool,
        is_marked: bool = False,
        name: str | None = None,
    ) -> list[Part] | None:
        """The object or list at `start`; None while it is not complete. closing: what may follow a
        call. is_marked: whether it is known to be calls. name: of the function whose arguments it
        is."""
        size = self._object.read(self._left, start)
        if size is None:
            num_read, is_broken = self._object.num_read, self._object.is_broken
            if not is_broken and not is_end:
                return None
            self._object = ObjectEnd()
            return self._content(start + num_read if is_broken else len(self._left))
        self._object = ObjectEnd()
        text = self._left[start : start + size]
        if name is not None:
            calls = named_calls(name, text)
        else:
            calls = json_calls(text, self._tools, is_marked or closing == END)
        return self._called(calls, start + size, closing)

    def _function(self, start: int, is_end: bool) -> list[Part] | None:
        """The function at `start`, as Qwen3-Coder writes it; None while it is not complete."""
        header = FUNCTION_NAME.match(self._left, start)
        if header is None or header[1] not in self._tools:
            is_whole = header is not None or re.search(r"[>\n]", self._left[start:]) is not None
            if not is_whole and not is_end:
                return None
            return self._content(start + len(FUNCTION))
        start = len(self._left) - len(self._left[header.end() :].lstrip(SPACE))
        if self._left.startswith("{", start):
            return self._json(start, FUNCTION_END, is_end, name=header[1])
        at = self._end_of_function(header.end())
        if at is None:
            return self._content(len(self._left)) if is_end else None
        self._num_scanned = 0
        body = self._left[header.end() : at]
        call = xml_call(header[1], body, self._tools)
        return self._called([call], at + len(FUNCTION_END), END)

    def _end_of_function(self, start: int) -> int | None:
        """Where FUNCTION_END is that follows the last parameter. A value may contain it."""
        if empty := NO_PARAMETERS.match(self._left, start):
            return empty.end() - len(FUNCTION_END)
        at = self._left.find(FUNCTION_END, max(start, self._num_scanned))
        while at >= 0:
            if self._left[start:at].rstrip(SPACE).endswith("</parameter>"):
                return at
            at = self._left.find(FUNCTION_END, at + 1)
        self._num_scanned = max(0, len(self._left) - len(FUNCTION_END))
        return None

    def _called(self, calls: list[dict[str, Any]], end: int, closing: str) -> list[Part]:
        """The text up to `end`, which is these calls, or content."""
        if not calls:
            return self._content(end)
        self._left = self._left[end:]
        self._closing, self._skipped = closing, f"{SPACE};"
        return [*calls]

    def _content(self, size: int) -> list[Part]:
        content, self._left = self._left[:size], self._left[size:]
        self._is_begin &= not content.strip(SPACE)
        self._closing = self._skipped = ""
        return [content]

    def _other(self, is_end: bool) -> list[Part] | None:
        """Content up to where a call may begin. None if it is not known yet."""
        begins = [self._left.find(mark) for mark in ANYWHERE]
        fence = FENCED.search(self._left)
        begins += [fence.start()] if fence else []
        at = min((begin for begin in begins if begin >= 0), default=-1)
        if at < 0:
            at = len(self._left) if is_end else self._num_certain()
        return self._content(at) if at else None

    def _num_certain(self) -> int:
        """Leading characters of `_left` in which no call can begin."""
        held = max(overlap(self._left, mark) for mark in ANYWHERE)
        fence = BEGINS_FENCE.search(self._left)
        certain = len(self._left) - held
        return min(certain, fence.start()) if fence else certain


class ForcedCallParser:
    """Splits a text of `call_grammar` in JSON into calls. Arguments are passed on as they arrive,
    so a text that was cut is a call that was cut."""

    def __init__(self) -> None:
        self._left = ""
        self._object: ObjectEnd | None = None

    def feed(self, text: str) -> list[Part]:
        self._left += text
        found: list[Part] = []
        while self._left:
            if self._object is None:
                header = HEADER.search(self._left)
                if header is None or header.end() == len(self._left):
                    break
                found.append(new_call(header[1], ""))
                self._left, self._object = self._left[header.end() :], ObjectEnd()
            size = self._object.read(self._left)
            arguments = self._left if size is None else self._left[:size]
            found.append({"function": {"arguments": arguments}})
            self._left = self._left[len(arguments) :]
            self._object.num_read = 0
            if size is not None:
                self._object = None
        return found

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends inside of arguments."""
        return self._object is not None

    def finish(self) -> list[Part]:
        """Nothing: what is left is not a part of arguments."""
        return []


def overlap(text: str, word: str) -> int:
    """Length of the longest end of the text that begins the word."""
    most = min(len(text), len(word) - 1)
    return next((size for size in range(most, 0, -1) if word.startswith(text[-size:])), 0)
