"""Converts the options of a command to a checked configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from smartspec_cli.commands import USAGE_ERROR, fail
from smartspec_py.config import ServerConfig
from smartspec_py.core.plan.planner import parse_policy


def torch_settings(model: Path, draft: Path | None, **more: object) -> dict[str, Any]:
    """The `engine` part of a configuration, with absolute paths."""
    of_draft = None if draft is None else str(draft.resolve())
    return {"kind": "torch", "model": str(model.resolve()), "draft": of_draft, **more}


def set_keys(settings: dict[str, Any], changes: Sequence[str]) -> list[str]:
    """Set the keys of `--set KEY=VALUE` in the settings; returns the keys.

    A change without `=`, or inside a value that is no section, ends the command.
    """
    keys = []
    for change in changes:
        key, equals, text = change.partition("=")
        *sections, name = key.split(".")
        if not equals or not name or not all(sections):
            fail(f"--set: got {change!r}, must be KEY=VALUE with a key of engine.json", USAGE_ERROR)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        place = settings
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                fail(f"--set: {key}: {section} is not a section of engine.json", USAGE_ERROR)
        place[name] = value
        keys.append(key)
    return keys


def checked_config(settings: dict[str, Any], keys: Sequence[str] = ()) -> ServerConfig:
    """The checked configuration. A wrong value ends the command and names its option.

    keys: those that were given by --set.
    """
    try:
        return ServerConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = _option(first["loc"], keys)
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "engine.json has no such key"
        fail(f"--{option}: {reason} (got {first['input']!r})", USAGE_ERROR)


def _option(place: Sequence[int | str], keys: Sequence[str]) -> str:
    """The name of the option that sets this place in the configuration."""
    path = ".".join(map(str, place))
    if any(path.startswith(key) or key.startswith(path) for key in keys):
        return f"set: {path}"
    return path.rpartition(".")[2].replace("_", "-")


def policies_of(text: str, option: str = "policies") -> list[str]:
    """Policy names separated by commas. An invalid name ends the command."""
    names = text.split(",")
    for name in names:
        try:
            parse_policy(name)
        except ValueError as error:
            fail(f"--{option}: {name!r} must be {error}", USAGE_ERROR)
    return names


def sizes_of(text: str, option: str = "rows") -> list[int]:
    """Numbers from 1 separated by commas. Anything else ends the command."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        fail(f"--{option}: got {text!r}, must be numbers from 1 separated by commas", USAGE_ERROR)
    return sizes


def numbers_of(text: str, option: str) -> list[float]:
    """Numbers above 0 separated by commas. Anything else ends the command."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(0 < value < math.inf for value in values):
        fail(f"--{option}: got {text!r}, must be numbers above 0 separated by commas", USAGE_ERROR)
    return values


def temperatures_of(text: str) -> list[float]:
    """Numbers separated by commas. Raises ValueError, naming the option."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value < 100 for value in values):
        raise ValueError(f"--temperatures: got {text!r}, must be numbers from 0 to 100")
    return values
