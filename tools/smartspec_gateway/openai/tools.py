"""Finds tool calls in generated text, as it arrives, in two formats.

Hermes (also Qwen): `<tool_call>{"name": .., "arguments": {..}}</tool_call>` anywhere in the text.
Llama 3: the text is `{"name": .., "parameters": {..}}`, maybe after `<|python_tag|>`, and maybe
more of them, with `;` between. A call is passed on when it is complete. Text that is not a call of
a given tool is content, so nothing is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from smartspec_gateway.openai.chat_schema import Tool
from smartspec_gateway.openai.surrogates import without_surrogates
from smartspec_py.defaults import JSON_STYLE

BEGIN, END = "<tool_call>", "</tool_call>"
MAX_CALLS = 16
"""Calls of one answer that must call. Small models repeat themselves until the context is full."""

HEADER = re.compile(r'\{"name": "([^"]+)", "(?:arguments|parameters)": ')
"""What a call of `call_grammar` begins with."""

PYTHON_TAG = "<|python_tag|>"
SPACE = " \t\r\n"
_DECODER = json.JSONDecoder()


@dataclass
class Found:
    """content: text outside of calls. calls: in OpenAI's format, without index. One without `id`
    continues the arguments of the call before it."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.content += other.content
        self.calls += other.calls


class ToolParser:
    """Splits one text into content and calls of the named tools."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._left = ""
        self._may_be_json = True  # as long as there was no content
        self._skipped = ""  # characters to drop between two calls
        self._num_scanned = 0
        """Characters of `_left` that are known not to end a JSON object."""

    def feed(self, text: str) -> Found:
        """What is certain after this part of the text."""
        self._left += text
        return self._take(is_end=False)

    def finish(self) -> Found:
        """The rest."""
        return self._take(is_end=True)

    def _take(self, is_end: bool) -> Found:
        found = Found()
        while True:
            self._left = self._left.lstrip(self._skipped)
            if not self._left:
                break
            part = self._hermes(is_end) if self._left.startswith(BEGIN) else self._other(is_end)
            if part is None:
                break
            self._may_be_json &= not part.content.strip(SPACE)
            self._skipped = f"{SPACE};" if part.calls else ""
            found.add(part)
        return found

    def _hermes(self, is_end: bool) -> Found | None:
        """From BEGIN to END, or None while END is missing."""
        body, end, rest = self._left[len(BEGIN) :].partition(END)
        if not end and not is_end:
            return None
        if not end:  # the text was cut, maybe inside of END
            body = body[: len(body) - overlap(body, END)]
        call = self._call(_read(body.strip(SPACE)))
        whole = self._left[: len(self._left) - len(rest)]
        self._left = rest
        return Found(calls=[call]) if call else Found(content=whole)

    def _other(self, is_end: bool) -> Found | None:
        """Llama's calls, or content up to where a call may begin. None if it is not known yet."""
        start = self._left.lstrip(SPACE)
        if self._may_be_json:
            if start.startswith(PYTHON_TAG):
                self._left = start[len(PYTHON_TAG) :]
                return Found()
            if start.startswith("{"):
                return self._json(start, is_end)
            if not is_end and PYTHON_TAG.startswith(start):
                return None
        at = self._left.find(BEGIN)
        if at < 0:
            at = len(self._left) - (0 if is_end else overlap(self._left, BEGIN))
        content, self._left = self._left[:at], self._left[at:]
        return Found(content) if content else None

    def _json(self, start: str, is_end: bool) -> Found | None:
        """The JSON object at the beginning; None while it is not complete."""
        if not is_end and "}" not in start[self._num_scanned :]:
            return None
        try:
            value, end = _DECODER.raw_decode(start)
        except (ValueError, RecursionError):
            if not is_end:
                self._num_scanned = len(start)
                return None
            value, end = None, len(start)
        self._num_scanned = 0
        call = self._call(value)
        if call:
            self._left = start[end:]
            return Found(calls=[call])
        lead = self._left[: len(self._left) - len(start)]
        self._left = start[end:]
        return Found(lead + start[:end])

    def _call(self, value: Any) -> dict[str, Any] | None:
        """The call in OpenAI's format; None if this is not the call of a given tool."""
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return _new_call(name, without_surrogates(json.dumps(arguments, ensure_ascii=False)))


class ForcedCallParser:
    """Splits a text of `call_grammar` into calls. Arguments are passed on as they arrive, so that a
    text that was cut is a call that was cut."""

    def __init__(self) -> None:
        self._left = ""
        self._depth = 0  # of brackets in the arguments; 0 outside of them
        self._is_quoted = self._is_escaped = False

    def feed(self, text: str) -> Found:
        self._left += text
        found = Found()
        while self._left:
            if not self._depth:
                header = HEADER.search(self._left)
                if header is None or header.end() == len(self._left):
                    break
                found.calls.append(_new_call(header[1], ""))
                self._left = self._left[header.end() :]
            size = self._num_arguments()
            found.calls.append({"function": {"arguments": self._left[:size]}})
            self._left = self._left[size:]
        return found

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends inside of arguments."""
        return self._depth > 0

    def finish(self) -> Found:
        """Nothing: what is left is not a part of arguments."""
        return Found()

    def _num_arguments(self) -> int:
        """Number of leading characters that belong to the arguments."""
        for index, letter in enumerate(self._left):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped, self._is_quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._is_quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return len(self._left)


def call_grammar(tools: Sequence[Tool], is_hermes: bool, may_repeat: bool) -> str:
    """A Lark grammar of one call of these tools, or of several. is_hermes: otherwise Llama 3."""
    begin, end = (f"{BEGIN}\n", f"}}\n{END}") if is_hermes else ("", "}")
    key, separator = ("arguments", "\n") if is_hermes else ("parameters", "; ")
    rules = []
    for number, tool in enumerate(tools):
        given = tool.function.parameters or {}
        schema = {**given, "type": "object", "x-guidance": JSON_STYLE}
        head = f'{begin}{{"name": "{tool.function.name}", "{key}": '
        rules.append(f"call{number}: {json.dumps(head)} arguments{number} {json.dumps(end)}")
        rules.append(f"arguments{number}: %json {json.dumps(schema)}")
    names = " | ".join(f"call{number}" for number in range(len(tools)))
    more = f" ({json.dumps(separator)} call){{0,{MAX_CALLS - 1}}}" if may_repeat else ""
    return "\n".join([f"start: call{more}", f"call: {names}", *rules])


def _new_call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def overlap(text: str, word: str) -> int:
    """Length of the longest end of the text that begins the word."""
    most = min(len(text), len(word) - 1)
    return next((size for size in range(most, 0, -1) if word.startswith(text[-size:])), 0)
