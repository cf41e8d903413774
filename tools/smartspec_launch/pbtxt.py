"""Writes Triton's model configuration (config.pbtxt) from the table of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from smartspec_py.api.contract import INPUTS, MODEL_NAME, OUTPUTS
from smartspec_py.api.tensor_spec import TensorSpec


def config_pbtxt(name: str = MODEL_NAME) -> str:
    """The model configuration. It has names and shapes only; all else is in engine.json."""
    lines = [
        f'name: "{name}"',
        'backend: "smartspec_py"',
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        # One instance of kind CPU. With kind GPU, Triton would start one process per GPU.
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
    ]
    lines += (*pbtxt_inputs(INPUTS), *pbtxt_outputs(OUTPUTS))
    return "\n".join(lines) + "\n"


def pbtxt_inputs(tensors: Sequence[TensorSpec]) -> tuple[str, str, str]:
    """The lines of the `input` section."""
    return _section("input", [_pbtxt_tensor(t, is_optional=t.is_optional) for t in tensors])


def pbtxt_outputs(tensors: Sequence[TensorSpec]) -> tuple[str, str, str]:
    """The lines of the `output` section."""
    return _section("output", [_pbtxt_tensor(t) for t in tensors])


def _section(heading: str, lines: Sequence[str]) -> tuple[str, str, str]:
    return f"{heading} [", ",\n".join(lines), "]"


def _pbtxt_tensor(tensor: TensorSpec, is_optional: bool = False) -> str:
    optional = ", optional: true" if is_optional else ""
    dims = ", ".join(str(size) for size in tensor.dims)
    return (
        f'  {{ name: "{tensor.name}", data_type: TYPE_{tensor.dtype}, dims: [ {dims} ]{optional} }}'
    )
