"""The same model under the names that TensorRT-LLM's clients ask for.

NVIDIA's model repository offers text to clients as `ensemble` and `tensorrt_llm_bls`. An alias is a
Triton ensemble of one step: Triton hands its tensors on to the model, of which there is one. All
inputs are the model's own, whose names are TensorRT-LLM's. Outputs are, too, but for those that
have the name of an input (`seed`), which an ensemble cannot have twice.

All inputs of an alias are optional: an ensemble that waits for a required tensor ends without any
answer. The model behind it refuses the request, and names what is missing.
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
    """Into the model repository `models`. Triton wants a version of everything, if an empty one."""
    for alias in aliases:
        version = models / alias / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(alias_pbtxt(alias), encoding="utf-8")


def _map(kind: str, name: str) -> str:
    return f'  {kind} {{ key: "{name}" value: "{name}" }}'
