"""Models of any cost, expanded on the device.

Nothing is written to disk, and no large tensor passes through the host. A model is created without
memory (on the meta device) and takes the expanded tensors. Tensors that are in no weight file, such
as the rotary frequencies of a Llama model, are created separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from smartspec_bench.expand import Size, expanded
from smartspec_bench.gpu.device import GB, DeviceError, memory_bytes
from smartspec_bench.gpu.document import ModelInfo
from smartspec_bench.gpu.plan import MAX_CONTEXT_LEN
from smartspec_py.engines.torch.packed import ATTENTION_NAME

CACHE_SHARE = 0.7
"""Share of the memory that is free after loading the weights; the rest is for activations and
graphs."""

HEAD_DIM = 16
"""Vocabulary size of the shipped pair, and so of its expansions."""

EMBEDDINGS = "model.embed_tokens.weight"


@dataclass(frozen=True)
class ExpandedModel:
    """A model on the device. folder: its source, which has its tokenizer."""

    folder: Path
    model: Any
    info: ModelInfo


def expanded_model(
    source: Path, size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> ExpandedModel:
    """The model of `source` at this size, with the engine's attention, ready for a runner."""
    config, tensors = expanded(source, size, torch.Generator(device).manual_seed(seed))
    weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    model = model_on_device(config, weights, device, dtype)
    num_read = sum(tensor.nbytes for name, tensor in weights.items() if name != EMBEDDINGS)
    return ExpandedModel(
        source,
        model,
        ModelInfo(
            size=dict(size),
            num_parameters=sum(tensor.numel() for tensor in weights.values()),
            bytes_read=num_read,
            cache_bytes_per_token=_cache_bytes_per_token(config, dtype),
        ),
    )


def model_on_device(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """A Llama model with these tensors. config: of its config.json. Raises RuntimeError if a tensor
    is missing or does not belong to the model."""
    hf_config: Any = LlamaConfig.from_dict(dict(config))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            hf_config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
        )
    model.load_state_dict(dict(weights), strict=True, assign=True)
    # Made again on the CPU, as when a model is loaded from a file, and then moved.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(hf_config).to(device)
    named = chain(model.named_parameters(), model.named_buffers())
    unmade = [name for name, tensor in named if tensor.is_meta]
    assert not unmade, f"tensors without memory: {unmade}"
    return model.requires_grad_(False).eval()


def _cache_bytes_per_token(config: Mapping[str, Any], dtype: torch.dtype) -> int:
    width: int = config["num_key_value_heads"] * config["head_dim"]
    num_layers: int = config["num_hidden_layers"]
    return 2 * num_layers * width * dtype.itemsize


def check_memory(sizes: Sequence[Size], device: torch.device, dtype: torch.dtype) -> None:
    """Check the memory first: the weights, and the largest tensor once more, because its random
    numbers are drawn in float32. Raises DeviceError."""
    if device.type != "cuda":
        return
    needed = sum(num_weights(size) for size in sizes) * dtype.itemsize
    needed += torch.float32.itemsize * max(_largest_tensor(size) for size in sizes)
    free, _ = memory_bytes(device)
    if free < needed:
        raise DeviceError(
            f"device memory: {free / GB:.1f} GB are free, must be at least {needed / GB:.1f} GB "
            "for the weights; free some, or use a larger device"
        )


def num_weights(size: Size) -> int:
    """Parameters of an expansion, without norms; size must have the vocabulary."""
    hidden, width = size["hidden_size"], HEAD_DIM * size["num_heads"]
    a_layer = 4 * hidden * width + 3 * hidden * size["intermediate_size"]
    return size["num_layers"] * a_layer + 2 * size["vocab_size"] * hidden


def _largest_tensor(size: Size) -> int:
    return size["hidden_size"] * max(size["intermediate_size"], size["vocab_size"])


def batch_size_that_fits(
    batches: Sequence[int], device: torch.device, models: Sequence[ModelInfo]
) -> int:
    """The largest batch whose caches fit beside the weights. Raises DeviceError."""
    if device.type != "cuda":
        return batches[-1]
    free, _ = memory_bytes(device)
    a_row = MAX_CONTEXT_LEN * sum(one.cache_bytes_per_token for one in models)
    fitting = [num for num in batches if num * a_row <= CACHE_SHARE * free]
    if not fitting:
        raise DeviceError(
            f"device memory: {free / GB:.1f} GB are free behind the weights, must be at least "
            f"{batches[0] * a_row / CACHE_SHARE / GB:.1f} GB; use a larger device"
        )
    return fitting[-1]
