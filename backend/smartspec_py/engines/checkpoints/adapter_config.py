"""Checks the configuration of a LoRA adapter in PEFT's format, before its weights are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartspec_py.engines.checkpoints.checks import ModelError, check_pointers, read_json
from smartspec_py.faults import shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

MAX_TOTAL_RANK = 512
"""Of all adapters of a server. Each pass computes the products of all of them."""

VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
    "use_rslora": (None, False, True),
}
"""Values that are served. Other initial weights, such as those of PiSSA, change the base model."""

NO_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
)
"""Fields that only matter in training. The names of the tensors say which layers are adapted."""

NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})
"""Values with which any other field has no effect. Examples are use_dora, modules_to_save and
rank_pattern."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """rank: rows of each matrix A. scale: factor of the product B A."""

    rank: int
    scale: float


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raise ModelError, which names the field, if the adapter cannot be served."""
    check_pointers(f"the adapter {folder}", folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise _incomplete(folder)
    return read_adapter_settings(folder)


def read_adapter_settings(folder: Path) -> AdapterConfig:
    """`read_adapter_config` before the weights are there."""
    name = f"the LoRA adapter {folder}"
    document = read_json(name, folder, CONFIG_FILE)
    if document is None:
        raise _incomplete(folder)
    known = {"r", "lora_alpha", *VALUES, *NO_EFFECT}
    for field in (*VALUES, *(field for field in document if field not in known)):
        value, values = document.get(field), VALUES.get(field, NEUTRAL)
        if not any(type(value) is type(one) and value == one for one in values):
            served = ", ".join(str(one) for one in VALUES.get(field, ()) if one is not None)
            raise _wrong(name, field, value, f"one of {served}" if served else "left out")
    rank: Any = document.get("r")
    alpha: Any = document.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_TOTAL_RANK:
        raise _wrong(name, "r", rank, f"a whole number in 1..{MAX_TOTAL_RANK}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise _wrong(name, "lora_alpha", alpha, "a finite number")
    return AdapterConfig(rank, alpha / (math.sqrt(rank) if document.get("use_rslora") else rank))


def _incomplete(folder: Path) -> ModelError:
    return ModelError(
        f"the LoRA adapter {folder} must be a directory with {CONFIG_FILE} and {WEIGHTS_FILE}: "
        "save it with PEFT"
    )


def _wrong(name: str, field: str, value: Any, rule: str) -> ModelError:
    return ModelError(
        f"{name} has the {field} {shown(value)} in its {CONFIG_FILE}, which must be {rule}: use an "
        "adapter of the kind that is supported"
    )
