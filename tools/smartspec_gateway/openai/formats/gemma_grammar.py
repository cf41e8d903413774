"""Rules of Lark for calls with arguments as Gemma 4 writes them, from the schemas of functions.

Keys are in the order in which Gemma 4's chat template shows them. As in Qwen3-Coder's format, texts
follow only `enum` and `const`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from smartspec_gateway.openai.formats.calls import types_of
from smartspec_gateway.openai.formats.gemma import BEGIN, CALL, END, QUOTE
from smartspec_py.constants import lark_text

_MARK = lark_text(QUOTE)
_LETTER = r'[^\s:,{}\[\]<"]'
PLAIN_KEY = re.compile(rf"{_LETTER}+( +{_LETTER}+)*")
"""A key that can be read without quotes."""

SHARED = f"""any: text | word | list | object
word: %json {{"type": ["number", "boolean", "null"]}}
list: "[" (any ("," any)*)? "]"
object: "{{" (member ("," member)*)? "}}"
member: KEY ":" any
KEY: /{PLAIN_KEY.pattern}/
text: {_MARK} (TEXT? {_MARK} | pieces)
TEXT: /(?s:.+)/ & ~/(?s:.*){re.escape(QUOTE)}(?s:.*)/
pieces[suffix={_MARK}]: /(?s:.*)/"""
"""Values without a schema. A text ends at the token QUOTE, or where its letters are written in
pieces."""

OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
PLAIN_TYPES = ("number", "integer", "boolean", "null")
MAX_DEPTH = 64
"""Of parts of a schema in each other. Python would refuse about twice as many."""


class CallRules:
    """The rules of one call. Parts of a schema that are not understood restrict nothing."""

    def __init__(
        self, number: int, name: str, schema: Mapping[str, Any], style: Mapping[str, Any]
    ) -> None:
        """number: of the rule `call{number}`. schema: of the arguments. style: of numbers, for
        llguidance."""
        self._root, self._style, self._prefix = schema, style, f"v{number}_"
        self._of_refs: dict[str, str] = {}
        self._depth = 0
        self.rules: list[str] = []
        begin = lark_text(f"{BEGIN}{CALL}{name}")
        self.rules.append(f"call{number}: {begin} {self._value(schema)} {lark_text(END)}")

    def _named(self, body: str) -> str:
        """The name of a new rule."""
        name = f"{self._prefix}{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        """What a value with this schema may be."""
        if not isinstance(schema, Mapping) or self._depth == MAX_DEPTH:
            return "any"
        self._depth += 1
        found = self._restricted(schema)
        self._depth -= 1
        return found

    def _restricted(self, schema: Mapping[str, Any]) -> str:
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            return _any_of(lark_text(written(value)) for value in values)
        if all_of := _list(schema, "allOf"):
            return self._value(self._merged([_without(schema, "allOf"), *all_of]))
        for key in ("anyOf", "oneOf"):
            if (parts := _list(schema, key)) and "properties" not in schema:
                rest = _without(schema, key)
                return _any_of(self._value({**rest, **_mapping(part)}) for part in parts)
        types = types_of(schema) or (("object",) if "properties" in schema else ())
        return _any_of(self._of_type(one, schema) for one in types) if types else "any"

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        if name == "object":
            return self._object(schema)
        if name == "array":
            return self._array(schema)
        if name in PLAIN_TYPES:
            limits = {key: schema[key] for key in OF_NUMBERS if key in schema}
            return f"%json {json.dumps({'type': name, **limits, 'x-guidance': self._style})}"
        return "text" if name == "string" else "any"

    def _reference(self, reference: str) -> str:
        """The rule of a part of the schema, which may contain itself."""
        if reference not in self._of_refs:
            place = len(self.rules)
            self._of_refs[reference] = self._named("")
            self.rules[place] += self._value(self._part(reference))
        return self._of_refs[reference]

    def _part(self, reference: str) -> Any:
        """None if the schema has no such part."""
        begin, *names = reference.split("/")
        found: Any = self._root if begin == "#" else None
        for name in names:
            found = _mapping(found).get(name)
        return found

    def _merged(self, parts: Iterable[Any]) -> dict[str, Any]:
        """One schema of the parts of `allOf`."""
        found, named, required = dict[str, Any](), dict[str, Any](), list[Any]()
        for part in map(_mapping, parts):
            one = _mapping(self._part(str(part["$ref"]))) if "$ref" in part else part
            found |= _without(one, "allOf")
            named |= _mapping(one.get("properties"))
            required += _list(one, "required")
        return found | ({"properties": named, "required": required} if named else {})

    def _array(self, schema: Mapping[str, Any]) -> str:
        first = [self._value(part) for part in _list(schema, "prefixItems")]
        item = self._named(self._value(schema.get("items")))
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if schema.get("items") is False or (most is not None and most < len(first)):
            most = len(first)
        if most == 0:
            return '"[" "]"'
        head = first or [item]
        begin, end = max(0, least - len(head)), "" if most is None else str(most - len(head))
        more = "" if most == len(head) else f' ("," {item}){{{begin},{end}}}'
        body = ' "," '.join(head) + more
        return f'"[" {body} "]"' if first or least else f'"[" ({body})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Keys may be left out, so a comma is written only behind a key: `after` is what may follow
        one, and `begin` what the object may have if it has no key yet."""
        properties = _mapping(schema.get("properties"))
        required = {key for key in _list(schema, "required") if isinstance(key, str)}
        keys = sorted({*properties, *required}, key=lambda key: (key.lower(), key))
        begin = after = ""
        if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
            member = self._other_member(schema, keys)
            begin, after = f'({member} ("," {member})*)?', f'("," {member})*'
        for key in reversed(keys):
            head = f"{key if PLAIN_KEY.fullmatch(key) else written(key)}:"
            part = self._named(f"{lark_text(head)} {self._value(properties.get(key))}")
            only = f"{part} {after}"
            if key in required:
                begin, after = only, f'"," {only}'
            else:
                begin = f"{only} | {begin}" if begin else f"({only})?"
                after = f'("," {part})? {after}'
            begin, after = self._named(begin), self._named(after)
        return f'"{{" {begin} "}}"'

    def _other_member(self, schema: Mapping[str, Any], keys: list[str]) -> str:
        """A key that the schema does not name, and its value."""
        value = "any"
        if not schema.get("patternProperties"):
            value = self._value(schema.get("additionalProperties"))
        if not keys:
            return self._named(f'KEY ":" {value}')
        name = f"KEY_{self._prefix}{len(self.rules)}".upper()
        self.rules.append(f"{name}: /{PLAIN_KEY.pattern}/ & ~({' | '.join(map(lark_text, keys))})")
        return self._named(f'{name} ":" {value}')


def written(value: Any) -> str:
    """The value in Gemma 4's form."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{written(key)}:{written(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


def _any_of(rules: Iterable[str]) -> str:
    return f"({' | '.join(dict.fromkeys(rules))})"


def _without(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := schema.get(key), list) else []


def _count(schema: Mapping[str, Any], key: str) -> int | None:
    return value if isinstance(value := schema.get(key), int) else None
