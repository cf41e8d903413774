"""Names and types of the fields of a request, by the table of `smartspec_py.api`.

Triton checks them too, but its messages name no field, and a wrong type is answered with status
500. It cuts integers that do not fit their type. Values are checked by the backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from smartspec_launch.front.refused import Refused
from smartspec_py.api.contract import INPUTS
from smartspec_py.api.refused import asks_for_nothing, why_refused
from smartspec_py.api.tensor_spec import NUMPY_TYPES, Range, TensorSpec

SPECS = {spec.name: spec for spec in INPUTS}
OF_TRITON = ("id", "parameters")
"""Keys of Triton's generate extension, which are no tensors."""

KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "STRING": ((str,), "text"),
    "BOOL": ((bool,), "true or false"),
    "INT32": ((int,), "an integer"),
    "UINT64": ((int,), "an integer"),
    "FP32": ((int, float), "a number"),
}
"""The Python types of a JSON value by dtype, and their name."""

MAX_SHOWN = 80


def check_fields(document: Mapping[str, Any]) -> None:
    """document: the JSON object of a generate request, its text decoded as Latin-1."""
    for name, value in document.items():
        if name in SPECS:
            _check_value(SPECS[name], value)
        elif name not in OF_TRITON and not asks_for_nothing(name, value):
            raise Refused(400, why_refused(name, SPECS))
    missing = [name for name, spec in SPECS.items() if not spec.is_optional if name not in document]
    if missing:
        raise Refused(400, f"{' and '.join(missing)}: required, but the request has no such field")


def _check_value(spec: TensorSpec, value: Any) -> None:
    elements = value if isinstance(value, list) else [value]
    if not spec.is_list and len(elements) != 1:
        raise Refused(400, f"{spec.name}: got {len(elements)} values, must be one value")
    types, kind = KINDS[spec.dtype]
    for element in elements:
        is_bool = isinstance(element, bool)
        if not isinstance(element, types) or (is_bool and bool not in types):
            allowed = f"{kind}, {spec.allowed.text}" if spec.allowed.text else kind
            listed = f"a list with each element {allowed}" if spec.is_list else allowed
            raise Refused(400, f"{spec.name}: got {_shown(element)}, must be {listed}")
        if types == (int,) and isinstance(element, int):
            _check_fits(spec, element)


def _check_fits(spec: TensorSpec, value: int) -> None:
    limits: np.iinfo[Any] = np.iinfo(NUMPY_TYPES[spec.dtype])
    if not limits.min <= value <= limits.max:
        low = int(spec.allowed.low) if isinstance(spec.allowed, Range) else limits.min
        raise Refused(400, f"{spec.name}: got {value}, must be in {low}..{limits.max}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False).encode("latin-1", "replace")
    shown = text.decode("utf-8", "replace")
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
