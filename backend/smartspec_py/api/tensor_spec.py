"""A row of the wire contract: a tensor, its meaning, and its allowed values.

One object checks a value and also describes the range. So the check, the error and the
documentation cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Allowed:
    """Every value of the dtype. Subclasses allow fewer.

    `holds` checks an element (a str for STRING). `text` follows `must be` in an error.
    """

    def holds(self, value: Any) -> bool:
        return True

    @property
    def text(self) -> str:
        return ""


@dataclass(frozen=True)
class Range(Allowed):
    """Finite numbers from low to high, inclusive. note: added to the text."""

    low: float
    high: float = math.inf
    note: str = ""

    def holds(self, value: Any) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high

    @property
    def text(self) -> str:
        return self._bounds() + _in_brackets(self.note)

    def _bounds(self) -> str:
        is_float = isinstance(self.low, float)
        if self.high == math.inf:
            return f"finite and at least {self.low:g}" if is_float else f"at least {self.low}"
        if is_float:
            return f"in [{self.low:g}, {self.high:g}]"
        return f"in {self.low}..{self.high}"


@dataclass(frozen=True)
class OneOf(Allowed):
    """One of a few values. note: added to the text, e.g. why there are no others."""

    values: tuple[Any, ...]
    note: str = ""

    def holds(self, value: Any) -> bool:
        return value in self.values

    @property
    def text(self) -> str:
        return " or ".join(map(_worded, self.values)) + _in_brackets(self.note)


@dataclass(frozen=True)
class Text(Allowed):
    """Text, by default not empty. max_bytes: largest UTF-8 size."""

    max_bytes: int
    may_be_empty: bool = False

    def holds(self, value: Any) -> bool:
        least = 0 if self.may_be_empty else 1
        return least <= len(value.encode()) <= self.max_bytes

    @property
    def text(self) -> str:
        least = "" if self.may_be_empty else "at least one character and "
        return f"{least}at most {self.max_bytes} bytes"


def _in_brackets(note: str) -> str:
    return f" ({note})" if note else ""


def _worded(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


NUMPY_TYPES: dict[str, type] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
"""By Triton's dtype name without TYPE_. STRING elements are bytes."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor on the wire.

    dtype: a key of NUMPY_TYPES. meaning: for the documentation. dims: without the batch dimension,
    which is always 1; -1 is any size.
    allowed: values of each element. model_range: the check by `Intake` that needs the model.
    convert: converts an element for the field of `GenerateParams`.
    default: in words, if the default in GenerateParams does not say it.
    max_elements: of a list. when: which responses have this output; empty for all.
    has_batch: whether an output is sent with the batch dimension.
    """

    name: str
    dtype: str
    meaning: str
    allowed: Allowed = Allowed()
    dims: tuple[int, ...] = (1,)
    is_optional: bool = True
    convert: Callable[[Any], Any] = lambda value: value
    default: str = ""
    model_range: str = ""
    max_elements: int = 0
    when: str = ""
    has_batch: bool = True

    @property
    def is_list(self) -> bool:
        return self.dims != (1,)

    def why_wrong_size(self, num_elements: int) -> str:
        """The reason of an error, if the tensor must not have so many elements; else empty."""
        if not self.is_list and num_elements != 1:
            return f"got {num_elements} values, must be one value"
        if self.is_list and num_elements > self.max_elements:
            return f"got {num_elements} elements, must be a list of at most {self.max_elements}"
        return ""
