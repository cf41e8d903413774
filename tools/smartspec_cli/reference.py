"""Writes the generated parts of the documentation: `python -m smartspec_cli.reference`.

A generated part of a page is between `<!-- generated: NAME -->` and `<!-- end -->`. Request fields
come from the table that checks requests, commands from their options, keys of engine.json and
fields of OpenAI's API from the models that check them, and metrics from their table. A test
compares the pages with the code.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

import typer
from pydantic import BaseModel

from smartspec_bench.report import markdown_table
from smartspec_cli.app import app
from smartspec_gateway.openai.apis.chat_schema import IgnoredInChats
from smartspec_gateway.openai.apis.messages_schema import MessagesRequest
from smartspec_gateway.openai.apis.responses_schema import ResponsesRequest
from smartspec_gateway.openai.apis.routes import ROUTES
from smartspec_gateway.openai.apis.schema import (
    MAX_INT32,
    REFUSED,
    TENSORS,
    Generation,
    Ignored,
    Sampling,
)
from smartspec_py.api.contract import OUTPUTS
from smartspec_py.api.inputs import FIELDS, INPUT_GROUPS, GenerateParams
from smartspec_py.api.refused import REFUSED as REFUSED_TENSORS
from smartspec_py.api.tensor_spec import OneOf, TensorSpec
from smartspec_py.config import (
    LimitsConfig,
    LocalEngineConfig,
    LookupConfig,
    PlannerConfig,
    ServerConfig,
    TrtllmEngineConfig,
)
from smartspec_py.serving.metric_families import FAMILIES, Family

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
COLUMNS = 100

SECTIONS: dict[str, type[BaseModel]] = {
    "Top level": ServerConfig,
    "engine, where kind is local": LocalEngineConfig,
    "engine, where kind is trtllm": TrtllmEngineConfig,
    "limits": LimitsConfig,
    "lookup": LookupConfig,
    "planner": PlannerConfig,
}
"""Of engine.json."""

Schema = dict[str, Any]
"""A JSON schema, as pydantic writes it."""

TYPES = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "null": "null",
}
BOUNDS = {"at least": "minimum", "above": "exclusiveMinimum", "at most": "maximum"}
"""In words, by their names in JSON schemas."""


def inputs() -> str:
    """The tables of input tensors."""
    columns = ("tensor", "type", "shape", "range", "default", "meaning")
    return "\n".join(
        f"### {title}\n\n" + _table(columns, map(_input_row, group))
        for title, group in INPUT_GROUPS.items()
    )


def _input_row(spec: TensorSpec) -> Sequence[str]:
    most = f"at most {spec.max_elements} elements" if spec.max_elements else ""
    each = f"each {spec.allowed.text}" if most and spec.allowed.text else spec.allowed.text
    checked = ", ".join(part for part in (most, each) if part) or "any"
    allowed = "; ".join(part for part in (checked, spec.model_range) if part)
    # The batch dimension is always one.
    shape = f"[1, {', '.join('n' if size == -1 else str(size) for size in spec.dims)}]"
    return f"`{spec.name}`", spec.dtype, shape, allowed, _default(spec), spec.meaning


def _default(spec: TensorSpec) -> str:
    if not spec.is_optional:
        return "required"
    if spec.default:
        return spec.default
    if spec.name in FIELDS:
        defaults = {field.name: field.default for field in dataclasses.fields(GenerateParams)}
        value = defaults[FIELDS[spec.name]]
    else:
        value = spec.allowed.values[0] if isinstance(spec.allowed, OneOf) else None
    value = value.value if isinstance(value, Enum) else value
    return "none" if value in (None, ()) else _json_text(value).strip('"') or "empty"


def outputs() -> str:
    """The table of output tensors."""
    return _table(("tensor", "type", "shape", "sent", "meaning"), map(_output_row, OUTPUTS))


def _output_row(spec: TensorSpec) -> Sequence[str]:
    # The first dimension counts the texts per prompt, which is always one.
    sizes = ("1", *("n" if size == -1 else str(size) for size in (1, *spec.dims[1:])))
    shape = f"[{', '.join(sizes)}]" if spec.has_batch else "[1]"
    return f"`{spec.name}`", spec.dtype, shape, spec.when or "always", spec.meaning


def refused() -> str:
    """The table of refused names."""
    rows = ((f"`{name}`", why) for name, why in REFUSED_TENSORS.items())
    return _table(("name", "answer"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_table(columns, rows) + "\n"


def command_line() -> str:
    """All commands with their options."""
    parts = []
    for path, command in commands():
        text = re.sub(r"\[/?(bold|dim|italic)\]", "", (command.help or "").replace("\f", ""))
        parts += [f"## {path}\n"]
        parts += [_filled(paragraph) + "\n" for paragraph in text.strip().split("\n\n")]
        parts += [_item(_option(one)) for one in command.params if one.name != "help"]
        parts.append("")
    return "\n".join(parts)


def commands(command: Any = None, path: str = "smartspec") -> Iterator[tuple[str, Any]]:
    """All commands below `command` (default: the root), each with its full name."""
    command = command or typer.main.get_command(app)
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    ctx = command.make_context(path, [], resilient_parsing=True)
    for name in command.list_commands(ctx):
        yield from commands(command.get_command(ctx, name), f"{path} {name}")


def _option(parameter: Any) -> str:
    """An option or argument of a command, with its range and its default."""
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else parameter.opts + parameter.secondary_opts
    rules = ["required"] if parameter.required else []
    for word, bound in (("at least", "min"), ("at most", "max")):
        value = getattr(parameter, bound, None)
        rules += [] if value is None else [f"{word} {value:g}"]
    if parameter.default not in (None, False):
        rules.append(f"default {parameter.default}")
    shown = f" ({', '.join(rules)})" if rules else ""
    return f"`{' / '.join(names)}`{shown}: {parameter.help or ''}"


def engine_json() -> str:
    """All keys of engine.json."""
    parts = []
    for title, model in SECTIONS.items():
        parts += [f"## {title}\n", _filled(model.__doc__ or "") + "\n", _fields(_properties(model))]
    return "\n".join(parts)


def openai_fields() -> str:
    """All fields of OpenAI's API: those that have an effect, ignored and refused ones."""
    ignored = _properties(Ignored) | _properties(IgnoredInChats)
    shared = _properties(Sampling) | ignored
    parts = ["## All routes\n", _fields(shared, ignored)]
    parts += ["## Chats and completions\n", _fields(_properties(Generation), shared)]
    for route in (route for route in ROUTES if route.writer is not None):
        known = shared | (_properties(Generation) if issubclass(route.body, Generation) else {})
        own = {name: f for name, f in _properties(route.body).items() if known.get(name) != f}
        parts += [f"## `POST {route.path}`\n", _fields(own)]
    parts += ["## Accepted without effect\n", _fields(ignored)]
    only = f"Of chats only: {', '.join(IgnoredInChats.model_fields)}."
    parts += [_filled(f"{only} `{MessagesRequest.route}` has its own.") + "\n"]
    names = ", ".join(f"`{name}`" for name in REFUSED)
    open_ = f"`{ResponsesRequest.route}` and `{MessagesRequest.route}`"
    refused = f"All other fields, for example OpenAI's {names}. On {open_} they have no effect."
    parts += ["## Refused\n", _filled(refused) + "\n"]
    return "\n".join(parts)


def metrics() -> str:
    """The table of metrics."""
    return _table(("name", "kind", "labels", "meaning"), map(_metric_row, FAMILIES))


def _metric_row(family: Family) -> Sequence[str]:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"`{family.name}`", family.kind, labels, family.meaning


def buckets() -> str:
    """The upper edges of each histogram."""
    edges = {family.name: ", ".join(f"{edge:g}" for edge in family.buckets) for family in FAMILIES}
    return "\n".join(_item(f"`{name}`: {text}") for name, text in edges.items() if text) + "\n"


def _properties(model: type[BaseModel]) -> Schema:
    """The JSON schema of each field, with its meaning as `description`."""
    return cast("Schema", model.model_json_schema()["properties"])


def _fields(fields: Schema, hidden: Container[str] = ()) -> str:
    """A list of fields: type, range, default and meaning. A field without a range of its own has
    that of the tensor that it becomes."""
    lines = []
    for name, field in fields.items():
        if name in hidden:
            continue
        kind, *rules = _rules(field)
        spec = TENSORS.get(name)
        if spec is not None and spec.meaning == field["description"] and len(rules) == 1:
            text = (spec.dtype == "STRING" and spec.model_range) or spec.allowed.text
            rules = [text, *rules] if text else rules
        lines.append(_item(f"`{name}` ({', '.join([kind, *rules])}): {field['description']}"))
    return "\n".join(lines) + "\n"


def _rules(field: Schema) -> Iterator[str]:
    """The type of a field, its bounds, and its default."""
    kinds = field.get("anyOf", [field])
    yield " or ".join(map(_type_text, kinds))
    for kind in kinds:
        bounded = kind.get("items", kind)
        for word, name in BOUNDS.items():
            # Those of the types on the wire are left out.
            if abs(bounded.get(name, MAX_INT32)) < MAX_INT32:
                yield f"{word} {bounded[name]:g}"
    if "default" not in field:
        yield "required"
    elif not isinstance(field["default"], dict):
        yield f"default {_json_text(field['default'])}"


def _type_text(schema: Schema) -> str:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return "one of " + ", ".join(map(_json_text, values))
    if "items" in schema:
        return f"list of {_type_text(schema['items'])}"
    return TYPES.get(schema.get("type", "object"), "object")


def _json_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) and value else json.dumps(value)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        COLUMNS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _item(text: str) -> str:
    return _filled(f"- {text}", "  ")


PARTS: dict[str, Callable[[], str]] = {
    "inputs": inputs,
    "outputs": outputs,
    "refused": refused,
    "commands": command_line,
    "keys": engine_json,
    "fields": openai_fields,
    "metrics": metrics,
    "buckets": buckets,
}


def generated(page: str) -> str:
    """The page with its generated parts as the code has them now."""
    return re.sub(
        r"(?s)(<!-- generated: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}",
        page,
    )


def main() -> None:
    for path in PAGES:
        path.write_text(generated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
