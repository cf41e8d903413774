"""Builds the generated pages of docs/reference. `python -m smartspec_cli.reference` writes them.

tensors.md comes from the table that checks requests, command-line.md from the commands' options,
and engine-json.md from the models that check engine.json. A test compares the pages with the code.
"""

from __future__ import annotations

import re
import textwrap
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from smartspec_cli.api_doc import api_markdown
from smartspec_cli.app import app
from smartspec_gateway.openai.chat_schema import ChatRequest, IgnoredInChats
from smartspec_gateway.openai.schema import (
    MAX_INT32,
    REFUSED,
    TENSORS,
    CompletionRequest,
    Generation,
    Ignored,
)
from smartspec_py.config import (
    BatchTableConfig,
    LimitsConfig,
    LookupConfig,
    PlannerConfig,
    ServerConfig,
    TorchEngineConfig,
    TrtllmEngineConfig,
)

FOLDER = Path(__file__).parents[2] / "docs" / "reference"

COLUMNS = 100

_OPENAI_HEAD = """\
# Fields of the OpenAI-compatible endpoint

Generated from the code by `python -m smartspec_cli.reference`. How to use the endpoint:
[OpenAI-compatible endpoint](../operate/openai.md). Fields that OpenAI does not have are the
[request fields](tensors.md) with the same names. A field that is null counts as not given.
"""

_COMMANDS_HEAD = """\
# Command line

Every command of `smartspec` with its options, generated from the code by
`python -m smartspec_cli.reference`. `smartspec COMMAND --help` prints the same text.

Commands with `--json FILE` write their result as JSON: `--json -` writes it to stdout, and tables
then go to stderr. Exit code 2 means that an option is wrong, and 1 that the command failed.
"""

_CONFIG_HEAD = """\
# engine.json

Every key of `model_repository/smartspec/1/engine.json`, generated from the code by
`python -m smartspec_cli.reference`. An unknown key, a wrong type or a value out of range stops the
start with an error that names the key. `smartspec serve` writes this file from its options.
"""

_SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("engine, where kind is torch", TorchEngineConfig),
    ("engine, where kind is trtllm", TrtllmEngineConfig),
    ("limits", LimitsConfig),
    ("lookup", LookupConfig),
    ("planner", PlannerConfig),
    ("planner.batch_table", BatchTableConfig),
)


def command_line_markdown() -> str:
    """The page of all commands."""
    parts = [_COMMANDS_HEAD]
    for path, command in commands():
        parts.append(f"## {path}\n")
        parts.append(_paragraphs(command.help or "") + "\n")
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


def _paragraphs(text: str) -> str:
    """The text without the line breaks of the docstring and without terminal markup."""
    plain = re.sub(r"\[/?(bold|dim|italic)\]", "", text.replace("\f", ""))
    return "\n\n".join(_filled(part) for part in plain.strip().split("\n\n"))


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


def _option(parameter: Any) -> str:
    """An option or argument of a command, with its range and its default."""
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else parameter.opts + parameter.secondary_opts
    default = parameter.default
    rules = [
        *(["required"] if parameter.required else []),
        *_bounds(parameter),
        *([] if default in (None, False) else [f"default {getattr(default, 'value', default)}"]),
    ]
    text = " ".join((parameter.help or "").split())
    shown = f" ({', '.join(rules)})" if rules else ""
    return f"`{' / '.join(names)}`{shown}: {text}"


def _bounds(parameter: Any) -> Iterator[str]:
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if low is not None:
        yield f"at least {low:g}"
    if high is not None:
        yield f"at most {high:g}"


def engine_json_markdown() -> str:
    """The page of all keys."""
    parts = [_CONFIG_HEAD, "## Top level\n", _keys(ServerConfig)]
    parts += [f"## {title}\n\n{_keys(model)}" for title, model in _SECTIONS]
    return "\n".join(parts)


def openai_markdown() -> str:
    """The page of the fields of the OpenAI-compatible endpoint."""
    shared, ignored = Generation.model_fields, Ignored.model_fields | IgnoredInChats.model_fields
    parts = [_OPENAI_HEAD, "## Both routes\n", _fields(shared, ignored)]
    for model in (ChatRequest, CompletionRequest):
        parts += [f"## `POST {model.route}`\n", _fields(model.model_fields, shared | ignored)]
    refused = ", ".join(f"`{name}`" for name in REFUSED)
    parts += ["## Accepted without effect\n", _fields(ignored, ())]
    parts += [_filled(f"Of chats only: {', '.join(IgnoredInChats.model_fields)}.") + "\n"]
    parts += ["## Refused\n", _filled(f"All other fields, for example OpenAI's {refused}.") + "\n"]
    return "\n".join(parts)


def _fields(fields: Mapping[str, FieldInfo], hidden: Container[str]) -> str:
    """A list of fields: type, range, default and meaning. A field without a range of its own has
    that of the tensor that it becomes."""
    lines = []
    for name, field in fields.items():
        if name in hidden:
            continue
        kind, *rules = _rules(field)
        spec = TENSORS.get(name)
        if spec is not None and spec.meaning == field.description and len(rules) == 1:
            text = (spec.dtype == "STRING" and spec.model_range) or spec.allowed.text
            rules = [text, *rules] if text else rules
        lines.append(_item(f"`{name}` ({', '.join([kind, *rules])}): {field.description}"))
    return "\n".join(lines) + "\n"


def _keys(model: type[BaseModel]) -> str:
    """A list of the model's keys: type, range, default and meaning, which is in the docstring."""
    summary, meanings = _documented(model)
    lines = [_filled(summary) + "\n"] if summary else []
    for name, field in model.model_fields.items():
        rules = ", ".join(_rules(field))
        meaning = meanings.get(name, "")
        lines.append(_item(f"`{name}` ({rules}){': ' if meaning else ''}{meaning}"))
    return "\n".join(lines) + "\n"


def _documented(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """The text of the docstring before the first key, and the meaning of each key.

    Keys are written as `key: meaning` or `key, key: meaning`.
    """
    text = " ".join((model.__doc__ or "").split())
    names = "|".join(model.model_fields)
    starts = list(re.finditer(rf"(?:^|(?<=[.;] ))((?:{names})(?:, (?:{names}))*): ", text))
    ends = [*(start.start() for start in starts), len(text)]
    meanings = {
        name: text[start.end() : end].strip()
        for start, end in zip(starts, ends[1:], strict=True)
        for name in start[1].split(", ")
    }
    return text[: ends[0]].strip(), meanings


def _rules(field: FieldInfo) -> Iterator[str]:
    yield _type_text(field.annotation)
    yield from _range(field.metadata)
    for part in get_args(field.annotation):
        yield from _range(getattr(part, "__metadata__", ()))
        for found in getattr(part, "__metadata__", ()):
            if isinstance(found, FieldInfo):
                yield from _range(found.metadata)
    if field.is_required():
        yield "required"
    elif not isinstance(field.default, BaseModel):
        yield f"default {_json_text(field.default)}"


def _range(metadata: Iterable[Any]) -> Iterator[str]:
    """The bounds, but for those of the types on the wire."""
    for rule in metadata:
        match rule:
            case annotated_types.Ge(ge=int() | float() as bound) if abs(bound) < MAX_INT32:
                yield f"at least {bound:g}"
            case annotated_types.Gt(gt=bound):
                yield f"above {bound:g}"
            case annotated_types.Le(le=int() | float() as bound) if abs(bound) < MAX_INT32:
                yield f"at most {bound:g}"


def _type_text(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(_json_text(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(part) for part in parts)
    if hasattr(annotation, "__metadata__"):
        return _type_text(parts[0])
    if origin in (tuple, list):
        return f"list of {_type_text(parts[0])}" if origin is list else "list"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object"
    known = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return known.get(annotation, "object")


def _json_text(value: object) -> str:
    known = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return known[value]
    return f"{value:g}" if isinstance(value, float) else f'"{value}"' if value == "" else str(value)


PAGES = {
    "tensors.md": api_markdown,
    "command-line.md": command_line_markdown,
    "engine-json.md": engine_json_markdown,
    "openai.md": openai_markdown,
}


def main() -> None:
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
