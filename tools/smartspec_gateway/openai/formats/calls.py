"""Reads tool calls as models write them: where a JSON object ends, and what it calls."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from smartspec_gateway.openai.surrogates import without_surrogates

Types = Sequence[str] | None
"""JSON types that the schema of a value names; none if it names none, None if it is not a list of
types, as with `anyOf`."""

Tools = Mapping[str, Mapping[str, Types]]
"""The types of the parameters of each tool, by names."""

OUTSIDE = frozenset("{}[],:+-.0123456789eEtrufalsn \t\r\n")
"""Characters of JSON outside of texts."""

OBJECT_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
"""Keys of a call. An object with others is an answer, unless it is marked as a call."""

PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
END_OF_PARAMETER = re.compile(r"</parameter>\s*(?=<parameter=|\Z)")


class ObjectEnd:
    """Finds the end of the JSON object or list that a text begins with, while the text arrives."""

    def __init__(self) -> None:
        self.num_read = 0
        self.is_broken = False
        """Whether the text cannot be JSON."""
        self._depth = 0
        self._is_quoted = self._is_escaped = False

    def read(self, text: str, start: int = 0) -> int | None:
        """start: of the object in the text, which may only have grown since the last call. Returns
        the size of the object, or None as long as it is not complete."""
        for index in range(start + self.num_read, len(text)):
            letter = text[index]
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
                if self._depth <= 0:
                    return index + 1 - start
            elif letter not in OUTSIDE:
                self.is_broken, self.num_read = True, index - start
                return None
        self.num_read = len(text) - start
        return None


def new_call(name: str, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    """A call in OpenAI's format. arguments: JSON, or its beginning. call_id: default: a new one."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id or f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def json_calls(text: str, tools: Tools, is_marked: bool) -> list[dict[str, Any]]:
    """The calls that a JSON object makes, or a list of objects; none if one of them is not the call
    of a given tool.

    Models write arguments as an object, as its text, or not at all, and line breaks and tabs as
    they are. is_marked: whether the text is known to be calls. If not, each must have arguments,
    and no other keys.
    """
    value = _read(text)
    found = [
        _call(one, tools, is_marked) for one in (value if isinstance(value, list) else [value])
    ]
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def _call(value: Any, tools: Tools, is_marked: bool) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    if is_marked and len(value) == 1 and "name" not in value:
        [(name, arguments)] = value.items()
        value = {"name": name, "arguments": arguments}
    name = value.get("tool_name" if is_marked and "tool_name" in value else "name")
    if not isinstance(name, str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _read(arguments)
    elif arguments is None and is_marked:
        arguments = {}
    is_other = not is_marked and not value.keys() <= OBJECT_KEYS
    if name not in tools or not isinstance(arguments, dict) or is_other:
        return None
    return new_call(name, _written(arguments))


def named_calls(name: str, arguments: str) -> list[dict[str, Any]]:
    """The call of this function; none if the arguments are no JSON object."""
    value = _read(arguments)
    return [new_call(name, _written(value))] if isinstance(value, dict) else []


def xml_call(name: str, body: str, tools: Tools) -> dict[str, Any]:
    """The call of `<function=NAME>body</function>`, as Qwen3-Coder writes it. Its values have no
    types, so the schema of the tool gives them. A line break ends a value if one begins it."""
    found, at = dict[str, str](), 0
    while (begin := PARAMETER.match(body, at)) and (
        end := END_OF_PARAMETER.search(body, begin.end())
    ):
        text = body[begin.end() : end.start()]
        found[begin[1]] = text.removesuffix("\n") if begin[0].endswith("\n") else text
        at = end.end()
    return typed_call(name, found, tools)


def typed_call(name: str, values: Mapping[str, str], tools: Tools) -> dict[str, Any]:
    """The call of a tool with these values, which have the types of its schema."""
    types = tools[name]
    typed = {key: _typed(text, types.get(key, ())) for key, text in values.items()}
    return new_call(name, _written(typed))


def parameter_types(schema: Any) -> dict[str, Types]:
    """The types of the parameters of a tool with this JSON schema."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: types_of(one) for name, one in properties.items() if isinstance(one, dict)}


def types_of(schema: Mapping[str, Any]) -> Types:
    """The types of a value with this JSON schema."""
    types = schema.get("type")
    if isinstance(types, list):
        return tuple(one for one in types if isinstance(one, str))
    if isinstance(types, str):
        return (types,)
    return None if schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"} else ()


def _typed(text: str, types: Types) -> Any:
    """The value that a text means. Without a type, and where it is not valid, it stays a text."""
    word = text.strip()
    if word == "null" and (types is None or "null" in types):
        return None
    if types is not None and (not types or "string" in types):
        return text
    value = _read(word.lower() if word in ("True", "False") else word)
    return text if value is None else value


def _written(arguments: dict[str, Any]) -> str:
    return without_surrogates(json.dumps(arguments, ensure_ascii=False))


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


def _read(text: str) -> Any:
    """The value of a JSON text, in which line breaks need not be escaped; None if it is none. NaN
    and infinite numbers are none: clients could not read them."""
    try:
        return json.loads(text, strict=False, parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError):
        return None
