"""Other names for the model, for clients of TensorRT-LLM.

NVIDIA's model repository offers text generation as `ensemble` and `tensorrt_llm_bls`. An alias is a
Triton ensemble of one step, which forwards all tensors to the one loaded model. Its inputs and
outputs have the names of the model's tensors, which are TensorRT-LLM's. An ensemble cannot use one
name for an input and an output. Outputs with the name of an input (`seed`) are therefore left out.

All inputs of an alias are optional. If a required tensor of an ensemble is missing, the request
ends without a response. Instead, the model refuses the request and names the missing tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from smartspec_launch.pbtxt import pbtxt_inputs, pbtxt_outputs
from smartspec_py.api.contract import INPUTS, MODEL_NAME, OUTPUTS

ALIASES = ("ensemble", "tensorrt_llm_bls")


def alias_pbtxt(alias: str, model: str = MODEL_NAME) -> str:
    """Triton's configuration of an alias of the model."""
    names = {tensor.name for tensor in INPUTS}
    outputs = [tensor for tensor in OUTPUTS if tensor.name not in names]
    lines = [
        f'name: "{alias}"',
        'platform: "ensemble"',
        "max_batch_size: 1",
        *pbtxt_inputs([replace(tensor, is_optional=True) for tensor in INPUTS]),
        *pbtxt_outputs(outputs),
        "ensemble_scheduling { step [ {",
        f'  model_name: "{model}"',
        "  model_version: -1",
        *(_map("input_map", tensor.name) for tensor in INPUTS),
        *(_map("output_map", tensor.name) for tensor in outputs),
        "} ] }",
    ]
    return "\n".join(lines) + "\n"


def write_aliases(models: Path, aliases: Iterable[str]) -> None:
    """Write aliases into the model repository `models`.

    Triton requires a version directory for each model. For an alias it is empty.
    """
    for alias in aliases:
        version = models / alias / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(alias_pbtxt(alias), encoding="utf-8")


def _map(kind: str, name: str) -> str:
    return f'  {kind} {{ key: "{name}" value: "{name}" }}'
