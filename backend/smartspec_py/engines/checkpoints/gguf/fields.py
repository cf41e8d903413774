"""The fields of a GGUF file, with their types and ranges checked when they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smartspec_py.faults import ConfigError, shown

MOST = 2**31 - 1


class Fields:
    """Fields whose keys begin with the prefix. Keys are given without it. All methods raise
    ConfigError if the field is missing and has no default, or if its value is not possible."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file, self.values, self._prefix = file, values, prefix
        self._used: set[str] = set()

    def unused(self) -> list[str]:
        """The whole keys with the prefix that were not read."""
        return [
            key for key in self.values if key.startswith(self._prefix) and key not in self._used
        ]

    def ignore(self, *keys: str) -> None:
        """Count these as read."""
        self._used |= {self._prefix + key for key in keys}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of any type."""
        key = self._prefix + key
        self._used.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise ConfigError(f"{self.file} has no {key}: convert the model again")
        return value

    def _checked(self, key: str, value: Any, is_right: bool, rule: str) -> Any:
        if is_right:
            return value
        raise ConfigError(
            f"{self.file} has the {self._prefix}{key} {shown(value)}, but it must be {rule}: "
            "convert or copy the model again"
        )

    def integer(
        self, key: str, default: int | None = None, least: int = 1, most: int = MOST
    ) -> int:
        value = self.get(key, default)
        is_right = type(value) is int and least <= value <= most
        number: int = self._checked(key, value, is_right, f"a whole number in {least}..{most}")
        return number

    def number(self, key: str, default: float | None, least: float, most: float) -> float:
        value = self.get(key, default)
        is_right = type(value) in (int, float) and least <= value <= most
        return float(self._checked(key, value, is_right, f"a number in {least}..{most}"))

    def text(self, key: str, default: str | None = None, is_name: bool = True) -> str:
        """is_name: the text has one line."""
        value = self.get(key, default)
        is_right = isinstance(value, str) and (value.isprintable() or not is_name)
        return str(self._checked(key, value, is_right, "a name" if is_name else "a text"))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        return bool(self._checked(key, value, isinstance(value, bool), "true or false"))

    def texts(self, key: str) -> list[str]:
        value = self.get(key)
        is_right = isinstance(value, list) and all(isinstance(text, str) for text in value)
        texts: list[str] = self._checked(key, value, is_right, "a list of texts")
        return texts

    def numbers(self, key: str, length: int, least: float, most: float = math.inf) -> list[Any]:
        """A list of this length."""
        value = self.get(key)
        is_right = isinstance(value, list) and len(value) == length
        is_right = is_right and all(
            type(number) in (int, float) and least <= number <= most for number in value
        )
        rule = f"a list of {length} numbers in {least}..{most}"
        numbers: list[Any] = self._checked(key, value, is_right, rule)
        return numbers

    def only(self, key: str, *values: Any) -> None:
        """Refuse other values than these, of which the first one is the default."""
        value = self.get(key, values[0])
        allowed = " or ".join(map(str, values))
        self._checked(key, value, value in values, f"{allowed}, because others cannot be read")
