"""Reads calls of Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:3}<tool_call|>`."""

from __future__ import annotations

import json
import re
from typing import Any

from smartspec_gateway.openai.formats.calls import Tools, named_calls

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"

MARK = re.compile("|".join(map(re.escape, (QUOTE, END, BEGIN))))
HEADER = re.compile(rf"{re.escape(BEGIN)}\s*{CALL}\s*([\w.-]+)\s*(?=\{{)")

PIECE = re.compile(
    rf"""{re.escape(QUOTE)}(?P<text>.*?){re.escape(QUOTE)}
    |"(?:[^"\\]|\\.)*"
    |(?P<word>[^\s"<{{}}\[\],:][^"<{{}}\[\],:]*)(?P<colon>:?)""",
    re.DOTALL | re.VERBOSE,
)
"""What may differ from JSON: texts, and keys and values without quotes. Models also write texts as
JSON has them."""

WORDS = {"None": "null", "True": "true", "False": "false"}
"""Values as Python writes them. Gemma 4's template shows the first one in earlier calls."""


class CallEnd:
    """Finds the end of a call that a text begins with, while the text arrives."""

    def __init__(self) -> None:
        self._at = len(BEGIN)
        self._is_quoted = False

    def read(self, text: str) -> tuple[int, int] | None:
        """text: may only have grown since the last call. Returns where the arguments and the call
        end, or None as long as the call is not complete. The next call ends one without END."""
        while found := MARK.search(text, self._at):
            if found[0] == QUOTE:
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted:
                return found.start(), found.end() if found[0] == END else found.start()
            self._at = found.end()
        self._at = max(self._at, len(text) - len(END) + 1)
        return None


def gemma_calls(text: str, tools: Tools) -> list[dict[str, Any]]:
    """The call that a text makes, without END; none if it is not the call of a given tool."""
    header = HEADER.match(text)
    if header is None or header[1] not in tools:
        return []
    return named_calls(header[1], PIECE.sub(_as_json, text[header.end() :].strip()))


def _as_json(found: re.Match[str]) -> str:
    if found["text"] is not None:
        return json.dumps(found["text"])
    if found["word"] is None:
        return found[0]
    word = found["word"].rstrip()
    return f"{json.dumps(word)}:" if found["colon"] else WORDS.get(word, word)
