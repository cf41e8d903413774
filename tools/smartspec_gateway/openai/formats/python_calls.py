"""Reads calls of LFM2: `<|tool_call_start|>[NAME(key="text", n=3)]<|tool_call_end|>`, as Python has
them."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from smartspec_gateway.openai.formats.calls import Tools, named_calls

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"

TEXT = r"""'''(?:[^'\\]|\\.|'(?!''))*+(?:''')?|'(?:[^'\\]|\\.)*+'?"""
TEXTS = TEXT + "|" + TEXT.replace("'", '"')
"""Also without their end, so that each is read once."""

LETTER = re.compile(
    r"""\\(?:[\\'"abfnrtv]|[0-3]?[0-7]{1,2}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5})"""
    r"|\\/|[\\\r\n\0]"
)
CHANGED = {r"\/": "/", "\\": r"\\", "\r": r"\r", "\n": r"\n", "\0": r"\x00"}
"""What texts in Python may not have, of what LETTER finds. Models write line breaks as they are,
paths of Windows, and slashes as in JSON."""

NAME = r"[^\W\d][\w.-]*+"

STAND_IN = f"_{secrets.token_hex(8)}_"
"""Begins what stands for a name, which may be none in Python. No model can know it."""

WORDS = {"true": True, "false": False, "null": None}
"""Values as JSON writes them: the template of LFM2.5 shows objects in JSON."""


def python_calls(text: str, tools: Tools) -> list[dict[str, Any]]:
    """The calls of a list; none if it is no such list, or one is not the call of a given tool."""
    known = {key for types in tools.values() for key in types if key}
    pattern = (
        rf"(?P<raw>\b[rR])?(?P<text>{TEXTS})|(?<![\w.-])(?P<name>{_any(tools)})(?=\s*+\()"
        rf"|(?<=[(,\s])(?P<key>(?:{_any(known)})(?=\s*+=)|{NAME}(?=\s*+=))"
    )
    names: list[str] = []

    def changed(found: re.Match[str]) -> str:
        if (word := found["name"] or found["key"]) is not None:
            names.append(word)
            return f"{STAND_IN}{len(names) - 1}"
        return found[0] if found["raw"] else LETTER.sub(_letter, found["text"])

    text = re.sub(pattern, changed, text.strip(), flags=re.DOTALL)
    try:
        body = ast.parse(text, mode="eval").body
        if not isinstance(body, ast.List):
            return []
        return [call for one in body.elts for call in _call(one, names)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr, names: Sequence[str]) -> list[dict[str, Any]]:
    """Raises one of the errors above if it is no call."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
        raise ValueError("no call with names of arguments")
    values = {
        _named(one.arg, names): ast.literal_eval(_Words().visit(one.value)) for one in node.keywords
    }
    name = _named(node.func.id, names)
    found = named_calls(name, json.dumps(values))
    if not found:
        raise ValueError("arguments that are no JSON")
    return found


def _any(words: Iterable[str]) -> str:
    """A pattern of these words, the longest ones first."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"


def _letter(found: re.Match[str]) -> str:
    return CHANGED.get(found[0], found[0])


def _named(word: str | None, names: Sequence[str]) -> str:
    if word is None or not word.startswith(STAND_IN):
        raise ValueError("a name that is not known, or none")
    return names[int(word.removeprefix(STAND_IN))]


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(WORDS[node.id]) if node.id in WORDS else node


def written(name: str, arguments: dict[str, Any]) -> str:
    """The call as the model writes it."""
    return f"{name}({', '.join(f'{key}={_value(value)}' for key, value in arguments.items())})"


def _value(value: Any) -> str:
    is_word = value is None or isinstance(value, bool)
    return str(value) if is_word else json.dumps(value, ensure_ascii=False)
