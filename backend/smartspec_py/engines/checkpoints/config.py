"""The Transformers config of a model directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smartspec_py.engines.checkpoints.checks import (
    GEMMA_4,
    GRANITE_4,
    ModelError,
    is_plain_granite,
    read_json,
)
from smartspec_py.engines.checkpoints.recurrent import num_key_layers
from smartspec_py.engines.checkpoints.rope import IS_OLD, fix_longrope, use_new_rope


def text_config(folder: Path) -> Any:
    """The Transformers config of the language model in this directory, with the defaults of its
    class. It may raise any exception of Transformers."""
    whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if whole.model_type == GRANITE_4 and is_plain_granite(whole.to_dict()):
        return _as_granite(whole)
    config = whole.get_text_config()
    document = read_json(str(folder), folder, "config.json") or {}
    if config is not whole and "tie_word_embeddings" in document:  # Transformers ties by it
        config.tie_word_embeddings = whole.tie_word_embeddings
    return config


def _as_granite(config: Any) -> Any:
    """config: of a Granite 4 without experts and state layers."""
    fields = config.to_dict() | {"intermediate_size": config.shared_intermediate_size}
    for name in ("architectures", "layer_types", "model_type"):
        fields.pop(name, None)
    return AutoConfig.for_model("granite", **fields)


def load_config(folder: Path, max_len: int) -> Any:
    """The model's Transformers config, for rows of max_len tokens. Raises ModelError if the engine
    cannot serve the model."""
    # Never download anything, whatever the files in the directory refer to.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: give a Hugging Face model directory")
    hf_config = text_config(folder)
    hf_config.__dict__.pop("quantization_config", None)  # `file_tensors` dequantises
    if IS_OLD:
        use_new_rope(hf_config, folder)
    fix_longrope(hf_config, max_len)
    return hf_config


def model_without_weights(hf_config: Any) -> Any:
    """The model of Transformers with this config. Its weights have shapes, and no memory.

    They are of float32: with another precision, Transformers would make it PyTorch's default
    meanwhile, for all threads.
    """
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            hf_config, trust_remote_code=False, dtype=torch.float32
        )


def num_weights(hf_config: Any) -> int:
    """Of a model with this config. Tied ones count once."""
    return sum(int(weight.numel()) for weight in model_without_weights(hf_config).parameters())


def key_shape(hf_config: Any, index: int | None = None) -> tuple[int, int]:
    """Shape of a token's keys in one layer: number of heads, width of a head. index: of the layer,
    of a Gemma 4."""
    config = hf_config if index is None else hf_config.per_layer_config[index]
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    return num_heads, head_dim or config.hidden_size // config.num_attention_heads


def key_shapes(hf_config: Any) -> list[tuple[int, int]]:
    """The shapes of all layers that have keys of their own."""
    if hf_config.model_type in GEMMA_4:
        num = hf_config.num_hidden_layers - hf_config.num_kv_shared_layers
        return [key_shape(hf_config, index) for index in range(num)]
    return [key_shape(hf_config)] * num_key_layers(hf_config)
