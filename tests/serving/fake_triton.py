"""A fake of the module that Triton gives its backends, and the codec loaded on it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from smartspec_py.api.contract import INPUTS
from smartspec_py.api.tensor_spec import NUMPY_TYPES

_DTYPES = {spec.name: NUMPY_TYPES[spec.dtype] for spec in INPUTS}


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    INVALID_ARG, UNAVAILABLE, INTERNAL = "invalid", "unavailable", "internal"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


@dataclass
class InferenceRequest:
    tensors: list[Tensor]
    named: dict[str, Any]

    def inputs(self) -> list[Tensor]:
        return self.tensors

    def requested_output_names(self) -> list[str]:
        return ["seed"]

    def parameters(self) -> str:
        return json.dumps(self.named) if self.named else ""


def request(fields: dict[str, Any], **parameters: Any) -> InferenceRequest:
    """As the wire has it: [1, 1], or [1, n] of a list."""
    tensors = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        raw = [item.encode() if isinstance(item, str) else item for item in values]
        tensors.append(Tensor(name, np.array([raw], dtype=_DTYPES[name])))
    return InferenceRequest(tensors, parameters)


with pytest.MonkeyPatch.context() as patch:
    fake = ModuleType("triton_python_backend_utils")
    fake.__dict__.update(
        Tensor=Tensor, TritonError=TritonError, InferenceResponse=InferenceResponse
    )
    patch.setitem(sys.modules, fake.__name__, fake)
    from smartspec_py import codec as codec
