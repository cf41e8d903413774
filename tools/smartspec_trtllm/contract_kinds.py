"""Checks whether a value has a kind of `signatures.json`, for example "Optional[list[int]]"."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from os import PathLike
from typing import Any

_CHECKS: dict[str, Callable[[Any], bool]] = {
    "Any": lambda value: True,
    "int": lambda value: type(value) is int,
    "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) in (int, float),
    "str": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, bytes),
    "os.PathLike": lambda value: isinstance(value, PathLike),
    "datetime.timedelta": lambda value: isinstance(value, timedelta),
    "Callable": callable,
}
"""Plain numbers only: the bindings do not convert NumPy scalars."""

_GENERIC = re.compile(r"(Optional|list|dict|tuple)\[(.*)\]")


def is_of_kind(value: Any, kind: str) -> bool:
    """Other names in `kind` are class names; `value` must be an instance of such a class."""
    if match := _GENERIC.fullmatch(kind):
        return _is_of_generic_kind(value, *match.groups())
    return any(_is_of_plain_kind(value, option) for option in kind.split("|"))


def _is_of_generic_kind(value: Any, outer: str, inner: str) -> bool:
    if outer == "Optional":
        return value is None or is_of_kind(value, inner)
    if outer == "list":
        return isinstance(value, list | tuple) and all(is_of_kind(item, inner) for item in value)
    return type(value).__name__ == outer


def _is_of_plain_kind(value: Any, kind: str) -> bool:
    if kind in _CHECKS:
        return _CHECKS[kind](value)
    name = kind.rsplit(".", 1)[-1]
    return any(base.__name__ == name for base in type(value).__mro__)
