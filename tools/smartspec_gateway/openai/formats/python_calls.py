"""Reads calls of LFM2: `<|tool_call_start|>[NAME(key="text", n=3)]<|tool_call_end|>`, as Python has
them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from smartspec_gateway.openai.formats.calls import Tools, named_calls

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"

TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
WORDS = {"true": True, "false": False, "null": None}
"""Values as JSON writes them: the template of LFM2.5 shows objects in JSON."""


def python_calls(text: str, tools: Tools) -> list[dict[str, Any]]:
    """The calls of a list; none if it is no such list, or one is not the call of a given tool."""
    names = sorted(tools, key=len, reverse=True)
    any_name = "|".join(map(re.escape, names)) or "(?!)"

    def changed(found: re.Match[str]) -> str:
        if found["name"] is None:  # line breaks are not allowed in texts
            return found[0].replace("\n", r"\n")
        return f"tool_{names.index(found['name'])}"  # some are no names in Python

    pattern = rf"{TEXT}|(?<![\w.-])(?P<name>{any_name})(?=\s*\()"
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
    if not all(one.arg for one in node.keywords):
        raise ValueError("arguments without names")
    values = {one.arg: ast.literal_eval(_Words().visit(one.value)) for one in node.keywords}
    name = names[int(node.func.id.removeprefix("tool_"))]
    found = named_calls(name, json.dumps(values))
    if not found:
        raise ValueError("arguments that are no JSON")
    return found


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(WORDS[node.id]) if node.id in WORDS else node


def written(name: str, arguments: dict[str, Any]) -> str:
    """The call as the model writes it."""
    return f"{name}({', '.join(f'{key}={_value(value)}' for key, value in arguments.items())})"


def _value(value: Any) -> str:
    is_word = value is None or isinstance(value, bool)
    return str(value) if is_word else json.dumps(value, ensure_ascii=False)
