"""Writes Triton's model configurations (config.pbtxt) from the table of tensors.

Clients of TensorRT-LLM know other names of the model: NVIDIA's model repository offers text
generation as `ensemble` and `tensorrt_llm_bls`. An alias is a Triton ensemble of one step, which
forwards all tensors to the one loaded model. An ensemble cannot use one name for an input and an
output, so outputs with the name of an input (`seed`) are left out. All inputs of an alias are
optional. If a required tensor of an ensemble is missing, the request ends without a response.
Instead, the model refuses the request and names the missing tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smartspec_py.api.contract import INPUTS, MODEL_NAME, OUTPUTS
from smartspec_py.api.tensor_spec import TensorSpec

ALIASES = ("ensemble", "tensorrt_llm_bls")


def config_pbtxt() -> str:
    """The model configuration. It has names and shapes only; all else is in engine.json."""
    return _text(
        f'name: "{MODEL_NAME}"',
        'backend: "smartspec_py"',
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        # One instance of kind CPU. With kind GPU, Triton would start one process per GPU.
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
        *_section("input", INPUTS),
        *_section("output", [replace(tensor, is_optional=False) for tensor in OUTPUTS]),
    )


def alias_pbtxt(alias: str) -> str:
    """The configuration of an alias of the model."""
    names = {tensor.name for tensor in INPUTS}
    outputs = [tensor for tensor in OUTPUTS if tensor.name not in names]
    return _text(
        f'name: "{alias}"',
        'platform: "ensemble"',
        "max_batch_size: 1",
        *_section("input", [replace(tensor, is_optional=True) for tensor in INPUTS]),
        *_section("output", [replace(tensor, is_optional=False) for tensor in outputs]),
        "ensemble_scheduling { step [ {",
        f'  model_name: "{MODEL_NAME}"',
        "  model_version: -1",
        *(f'  input_map {{ key: "{each.name}" value: "{each.name}" }}' for each in INPUTS),
        *(f'  output_map {{ key: "{each.name}" value: "{each.name}" }}' for each in outputs),
        "} ] }",
    )


def _text(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _section(heading: str, tensors: Sequence[TensorSpec]) -> tuple[str, str, str]:
    return f"{heading} [", ",\n".join(map(_tensor, tensors)), "]"


def _tensor(tensor: TensorSpec) -> str:
    optional = ", optional: true" if tensor.is_optional else ""
    dims = ", ".join(str(size) for size in tensor.dims)
    return (
        f'  {{ name: "{tensor.name}", data_type: TYPE_{tensor.dtype}, dims: [ {dims} ]{optional} }}'
    )
