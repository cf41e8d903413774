"""The fields of a Hugging Face model directory that matter for building an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartspec_py.engines.trtllm.engine_config import Role

FAMILIES = {"llama": "llama", "qwen2": "qwen"}
"""From `model_type` in config.json to the folder of convert_checkpoint.py in TensorRT-LLM."""


class BuildError(ValueError):
    """The build cannot start. The message is one sentence with field, value and remedy."""


@dataclass(frozen=True)
class HfModel:
    """num_*: from config.json. quantization: its quantization_config, or empty."""

    role: Role
    folder: Path
    family: str
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    quantization: Mapping[str, Any]


def read_model(role: Role, folder: Path) -> HfModel:
    """Raises BuildError if config.json lacks a field, or if the model type is not supported."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{role} {folder}: config.json cannot be read ({error}): give a local Hugging Face "
            "model directory"
        ) from error
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BuildError(
            f"model_type: {role} {folder} has {model_type!r}, must be one of {known}: choose "
            "such a model, or build its engine by hand and test it with `smartspec check-engines`"
        )
    return HfModel(
        role=role,
        folder=folder,
        family=FAMILIES[model_type],
        num_heads=_count(role, path, config, "num_attention_heads"),
        num_kv_heads=config.get("num_key_value_heads")
        or _count(role, path, config, "num_attention_heads"),
        hidden_size=_count(role, path, config, "hidden_size"),
        intermediate_size=_count(role, path, config, "intermediate_size"),
        vocab_size=_count(role, path, config, "vocab_size"),
        max_position_embeddings=_count(role, path, config, "max_position_embeddings"),
        quantization=config.get("quantization_config") or {},
    )


def _count(role: Role, path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise BuildError(f"{key}: the {role}'s {path} has {value!r}, must be an integer >= 1")
    return value


def check_tp(model: HfModel, tp: int) -> None:
    """Check that each rank gets whole heads and an equal share of each layer."""
    option = "--tp" if model.role is Role.TARGET else "--draft-tp"
    shares = {
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
    }
    for key, count in shares.items():
        if count % tp:
            fit = [n for n in (1, 2, 4, 8) if not any(share % n for share in shares.values())]
            raise BuildError(
                f"{option}: {tp} does not divide {key} {count} of the {model.role} "
                f"{model.folder}: choose one of {', '.join(map(str, fit))}"
            )
