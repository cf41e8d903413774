"""Grammars of answers that must call a tool, in the format that the model was trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from smartspec_gateway.openai.formats import (
    gemma,
    gemma_grammar,
    harmony,
    python_calls,
    tagged_calls,
)
from smartspec_gateway.openai.formats.calls import types_of
from smartspec_gateway.openai.formats.tool_ways import in_system_message, in_text
from smartspec_gateway.openai.formats.tools import (
    APERTUS,
    APERTUS_END,
    ARGS,
    BEGIN,
    CALL_ID,
    CLOSINGS,
    COHERE,
    COHERE_END,
    END,
    FUNCTION,
    FUNCTION_END,
    FUNCTIONS,
    HARMONY,
    HARMONY_ARGS,
    HARMONY_TYPE,
    KIMI,
    KIMI_ARGS,
    KIMI_CALL,
    KIMI_ENDS,
    MISTRAL,
    SEED,
    SEED_END,
)
from smartspec_py.constants import JSON_STYLE, LOOK_AROUND, lark_text

MAX_CALLS = 16
"""Calls of one answer that must call. Small models repeat themselves until the context is full."""

ARGUMENTS_STYLE = JSON_STYLE | {"lenient": True, "coerce_one_of": True}
"""What a grammar cannot express, such as `uniqueItems` of a set of Pydantic, does not restrict
arguments: people write schemas of tools for models that no grammar restricts."""


class CallFormat(Enum):
    """How a model writes tool calls; see `smartspec_gateway.openai.formats.tools`."""

    APERTUS = auto()
    COHERE = auto()
    GEMMA = auto()
    GLM = auto()
    GLM_LINES = auto()
    HARMONY = auto()
    HERMES = auto()
    KIMI = auto()
    LIST = auto()
    LLAMA = auto()
    MINIMAX = auto()
    MISTRAL = auto()
    PYTHON = auto()
    QWEN_XML = auto()
    SEED_XML = auto()


OF_MARKS = {
    ARGS: CallFormat.MISTRAL,
    APERTUS: CallFormat.APERTUS,
    COHERE: CallFormat.COHERE,
    python_calls.BEGIN: CallFormat.PYTHON,
    tagged_calls.MINIMAX: CallFormat.MINIMAX,
    KIMI: CallFormat.KIMI,
}
"""Formats of the chat templates that contain these."""


def format_of(
    template: str, of_tools: Callable[..., Any], tokens: Container[str] = ()
) -> CallFormat:
    """What a chat template asks for. of_tools: its way of `Ways`. If it does not know tools, this
    server asks for Hermes. tokens: that the tokenizer adds. Some templates of LFM2 do not have its
    marks."""
    if f"{gemma.BEGIN}{gemma.CALL}" in template:
        return CallFormat.GEMMA
    if harmony.THOUGHT in template:
        return CallFormat.HARMONY
    if FUNCTION in template:
        return CallFormat.SEED_XML if SEED in template else CallFormat.QWEN_XML
    if tagged_calls.KEY in template:
        is_dense = f"</arg_key>{tagged_calls.VALUE}" in template
        return CallFormat.GLM if is_dense else CallFormat.GLM_LINES
    if of_tools is in_text or BEGIN in template:
        return CallFormat.HERMES
    for mark, found in OF_MARKS.items():
        if mark in template:
            return found
    if python_calls.BEGIN in tokens:
        return CallFormat.PYTHON
    is_list = of_tools is in_system_message or any(mark in template for mark in CLOSINGS)
    return CallFormat.LIST if is_list else CallFormat.LLAMA


Function = tuple[str, Mapping[str, Any] | None]
"""The name of a function, and the JSON schema of its parameters. Without one it has none."""


class Form(NamedTuple):
    """What is around the arguments of a call, between calls and around all calls, in Lark. NAME is
    a place for the function's name. What is before arguments in JSON is in parts as JSON has them,
    so that a text that begins as JSON can become either. parameter: what is before and behind each
    argument, if these are in tags, with a place KEY; None if they are JSON."""

    before: str = ""
    after: str = '"}"'
    separator: str = '", "'
    begin: str = ""
    end: str = ""
    parameter: tuple[str, str] | None = None


def _text(text: str) -> str:
    return json.dumps(text)


def _named(key: str, key_of_name: str = "name") -> str:
    return rf'"\"{key_of_name}\"" ": " "\"NAME\"" ", " "\"{key}\"" ": "'


def _xml(begin: str, end: str, padding: str) -> Form:
    before, after = rf'"{begin}\n{FUNCTION}NAME>\n"', rf'"{FUNCTION_END}\n{end}"'
    parameter = f"<parameter=KEY>{padding}", f"{padding}</parameter>\n"
    return Form(before, after, r'"\n"', parameter=parameter)


def _glm(padding: str) -> Form:
    """padding: between tags."""
    key, value, end = tagged_calls.KEY, tagged_calls.VALUE, tagged_calls.VALUE_END
    parameter = f"{key}KEY</arg_key>{padding}{value}", f"{end}{padding}"
    before = _text(f"{BEGIN}NAME{padding}")
    return Form(before, f'"{END}"', _text(padding), parameter=parameter)


FORMS = {
    # Its end may be a token that ends the text.
    CallFormat.APERTUS: Form(r'"{\"NAME\": "', begin=f'"{APERTUS}["', end=f'"]" "{APERTUS_END}"?'),
    CallFormat.COHERE: Form(
        rf'"{{\"tool_call_id\": \"" /[0-9]{{1,4}}/ "\", " {_named("parameters", "tool_name")}',
        separator=r'",\n    "',
        begin=rf'"{COHERE}[\n    "',
        end=rf'"\n]{COHERE_END}"',
    ),
    CallFormat.GEMMA: Form(separator=""),
    CallFormat.GLM: _glm(""),
    CallFormat.GLM_LINES: _glm("\n"),
    CallFormat.HARMONY: Form(f'"{HARMONY}NAME {HARMONY_TYPE}{HARMONY_ARGS}"', "", ""),
    CallFormat.HERMES: Form(rf'"{BEGIN}\n{{" {_named("arguments")}', rf'"}}\n{END}"', r'"\n"'),
    CallFormat.KIMI: Form(
        f'"{KIMI_CALL}{FUNCTIONS}NAME:" /[0-9]{{1,2}}/ "{KIMI_ARGS}"',
        f'"{KIMI_ENDS[0]}"',
        "",
        f'"{KIMI}"',
        f'"{KIMI_ENDS[1]}"',
    ),
    CallFormat.LIST: Form(f'"{{" {_named("arguments")}', begin='"["', end='"]"'),
    CallFormat.LLAMA: Form(f'"{{" {_named("parameters")}', separator='"; "'),
    CallFormat.MINIMAX: Form(
        _text(f'{tagged_calls.INVOKE}NAME">\n'),
        _text(tagged_calls.INVOKE_END),
        r'"\n"',
        _text(f"{tagged_calls.MINIMAX}\n"),
        rf'"\n" "{tagged_calls.MINIMAX_END}"',  # in two, because a line break is also between calls
        ('<parameter name="KEY">', "</parameter>\n"),
    ),
    CallFormat.MISTRAL: Form(f'"{MISTRAL}NAME" ("{CALL_ID}" /[a-zA-Z0-9]{{9}}/)? "{ARGS}"', "", ""),
    CallFormat.PYTHON: Form(
        '"NAME("', '")"', '", "', f'"{python_calls.BEGIN}["', f'"]{python_calls.END}"'
    ),
    CallFormat.QWEN_XML: _xml(BEGIN, END, "\n"),
    CallFormat.SEED_XML: _xml(SEED, SEED_END, ""),
}

OPENS = {"additionalProperties", "patternProperties", "anyOf", "oneOf", "$ref"}
"""Keys of an object in a schema that say what else it may have."""


def call_grammar(functions: Iterable[Function], call_format: CallFormat, may_repeat: bool) -> str:
    """A Lark grammar of one call of these functions, or of several. The end of a call ends the
    answer of gpt-oss, so it has one."""
    functions, form = list(functions), FORMS[call_format]
    may_repeat &= call_format is not CallFormat.HARMONY
    names = " | ".join(f"call{number}" for number in range(len(functions)))
    more = f"({form.separator} call){{0,{MAX_CALLS - 1}}}" if may_repeat else ""
    rules = [f"start: {form.begin} call {more} {form.end}", f"call: {names}"]
    for number, (name, parameters) in enumerate(functions):
        known = _without_look_around(parameters or {"properties": {}})
        schema = {**_closed(known), "type": "object"}
        if call_format is CallFormat.GEMMA:
            rules += gemma_grammar.CallRules(number, name, schema, ARGUMENTS_STYLE).rules
            continue
        before = form.before.replace("NAME", _text(name)[1:-1])
        rules.append(f"call{number}: {before} arguments{number} {form.after}")
        if call_format is CallFormat.PYTHON:
            rules += _python_rules(number, schema)
        elif form.parameter is None:
            rules.append(f"arguments{number}: {_json(schema, ARGUMENTS_STYLE)}")
        else:
            rules += _xml_rules(number, schema, *form.parameter)
    if call_format is CallFormat.GEMMA:
        rules.append(gemma_grammar.SHARED)
    elif form.parameter is not None:
        rules.append(_value_rules(form.parameter[1]))
    return "\n".join(rules)


def calls_or_json(calls: str, schema: str, begin: str = "") -> str:
    """A Lark grammar of what follows the grammar of `call_grammar`, or this JSON schema. begin:
    what is before the JSON."""
    both = calls.replace("start: ", "start: json | calls\ncalls: ", 1)
    return f"{both}\njson: {lark_text(begin)} {_json(json.loads(schema), JSON_STYLE)}"


def _without_look_around(part: Any) -> Any:
    """The schema without patterns that a grammar cannot express. Which keys those of an object's
    `patternProperties` allow is then unknown, so it may have any."""
    if isinstance(part, list):
        return list(map(_without_look_around, part))
    if not isinstance(part, dict):
        return part
    found = {key: _without_look_around(value) for key, value in part.items()}
    if _has_look_around(part.get("pattern")):
        del found["pattern"]
    named = part.get("patternProperties")
    if isinstance(named, dict) and any(map(_has_look_around, named)):
        rest = {key: found["patternProperties"][key] for key in named if not _has_look_around(key)}
        found |= {"patternProperties": rest, "additionalProperties": True}
    return found


def _has_look_around(pattern: Any) -> bool:
    return isinstance(pattern, str) and LOOK_AROUND.match(pattern) is not None


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema for objects without keys that it does not name. JSON Schema allows them, and small
    models invent some, which a function then has no parameter for. With `allOf`, objects have the
    keys of several parts, so all stay as they are."""
    return dict(schema) if '"allOf"' in json.dumps(schema) else _closed_part(schema)


def _closed_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    found = dict(part)
    for key, value in part.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            found[key] = {name: _closed_part(each) for name, each in value.items()}
        elif key in ("anyOf", "oneOf") and isinstance(value, list) and "properties" not in part:
            found[key] = [_closed_part(each) for each in value]
        elif key in ("items", "additionalProperties"):
            found[key] = _closed_part(value)
    named: Any = part.get("properties")
    required: Any = part.get("required", [])
    has_names = isinstance(named, dict) and isinstance(required, list)
    if has_names and named.keys() >= {*map(str, required)} and not OPENS & part.keys():
        found["additionalProperties"] = False
    return found


def _xml_rules(number: int, schema: dict[str, Any], begin: str, end: str) -> Iterator[str]:
    """Parameters in the order of the schema. Texts end at the mark that ends a parameter. begin,
    end: see `Form.parameter`."""
    required, parts = set(schema.get("required", ())), []
    shared = {str(key): schema[key] for key in ("$defs", "definitions") if key in schema}
    for place, (key, value) in enumerate((schema.get("properties") or {}).items()):
        rule = f"parameter{number}_{place}"
        parts.append(rule if key in required else f"{rule}?")
        named = _text(begin.replace("KEY", key))
        yield f"{rule}: {named} {_value(value, shared, _text(end))}"
    yield f"arguments{number}: {' '.join(parts) or _text('')}"


def _python_rules(number: int, schema: dict[str, Any]) -> Iterator[str]:
    """Arguments in the order of the schema, with values as JSON has them, but for the words of
    Python. Those that are not required may be left out, so a comma is written only behind one:
    `after` is what may follow an argument, and `begin` what a call may have without one."""
    required = set(schema.get("required", ()))
    shared = {str(key): schema[key] for key in ("$defs", "definitions") if key in schema}
    begin = after = _text("")
    properties = enumerate((schema.get("properties") or {}).items())
    for place, (key, value) in reversed([*properties]):
        names = [f"{kind}{number}_{place}" for kind in ("argument", "begin", "after")]
        yield f"{names[0]}: {_text(f'{key}=')} {_python_value(value, shared)}"
        only = f"{names[0]} {after}"
        is_required = key in required
        begin, after = (
            only if is_required else f"{only} | {begin}",
            f'", " {only}' if is_required else f'(", " {names[0]})? {after}',
        )
        yield f"{names[1]}: {begin}"
        yield f"{names[2]}: {after}"
        begin, after = names[1:]
    yield f"arguments{number}: {begin}"


def _python_value(schema: Any, shared: dict[str, Any]) -> str:
    of_value = schema if isinstance(schema, dict) else {}
    types = () if {"enum", "const"} & of_value.keys() else types_of(of_value) or ()
    words = {"boolean": '"True" | "False"', "null": '"None"'}
    parts = [words[one] for one in types if one in words]
    if len(parts) < len(types) or not types:
        rest = [one for one in types if one not in words]
        of_rest = {**of_value, **shared} | ({"type": rest} if rest else {})
        parts.append(_json(of_rest, ARGUMENTS_STYLE))
    return f"({' | '.join(parts)})"


def _value_rules(end: str) -> str:
    """A text and the end of its parameter. That of GLM begins with a token, which no text
    contains, or is written in pieces."""
    mark, end = tagged_calls.VALUE_END, _text(end)
    by_pieces = f"[suffix={end}]: /(?s:.*)/"
    if mark not in end:
        return f"value{by_pieces}"
    pattern = re.escape(mark).replace("/", r"\/")
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){pattern}(?s:.*)/"
    return f"value: TEXT? {end} | pieces\n{text}\npieces{by_pieces}"


def _value(schema: Any, shared: dict[str, Any], end: str) -> str:
    """A value and the end of its parameter, which is a text of Lark. A text is the rule `value`,
    with its end."""
    of_value = schema if isinstance(schema, dict) else {}
    texts = of_value.get("enum", [of_value["const"]] if "const" in of_value else ())
    if texts and all(isinstance(text, str) for text in texts):
        return f"({' | '.join(_text(text) for text in texts)}) {end}"
    types = types_of(of_value)
    if types is not None and (not types or "string" in types):
        return "value"
    return f"{_json({**of_value, **shared}, ARGUMENTS_STYLE)} {end}"


def _json(schema: dict[str, Any], style: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': style})}"
