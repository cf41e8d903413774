"""Random LoRA adapters, and the files and the merged model of one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from smartspec_py.engines.checkpoints.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from smartspec_py.engines.checkpoints.adapters import Adapter, Adapters

Shapes = Mapping[str, tuple[int, int]]


def shapes_of(model: Any) -> Shapes:
    """[out, in] of each linear layer but the output layer."""
    return {
        name: (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings()
    }


def random_adapter(name: str, shapes: Shapes, rank: int, seed: int = 0) -> Adapter:
    """An adapter of all these layers. What it adds to a product has a standard deviation of about 1
    if the inputs have one of 1."""
    rng = torch.Generator().manual_seed(seed)
    return Adapter(
        name,
        rank,
        {
            layer: (
                torch.randn(rank, num_in, generator=rng) / num_in**0.5,
                torch.randn(num_out, rank, generator=rng) / rank**0.5,
            )
            for layer, (num_out, num_in) in shapes.items()
        },
    )


def random_adapters(shapes: Shapes, ranks: Sequence[int]) -> Adapters:
    """Adapters a, b, .. of these ranks. The first adapts all layers, and each next one leaves out
    another one."""
    names = list(shapes)
    found = []
    for number, rank in enumerate(ranks):
        own = {name: shapes[name] for name in names if not number or name != names[number]}
        found.append(random_adapter("abcdefgh"[number], own, rank, number))
    return Adapters(found)


def merged(model: Any, adapters: Adapters, name: str) -> Any:
    """A copy of a model of Transformers, with W + B A instead of W in each adapted layer."""
    copied = copy.deepcopy(model)
    for adapter in adapters._adapters:
        for layer, (a, b) in adapter.pairs.items() if adapter.name == name else ():
            copied.get_submodule(layer).weight.data += b @ a
    return copied


def write_adapter(
    folder: Path, adapter: Adapter, tensors: Mapping[str, torch.Tensor] | None = None, **fields: Any
) -> Path:
    """The files that PEFT writes, with a scale of 1 unless the fields of the configuration say
    another one. tensors: added to those of the adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.rank,
        "bias": "none",
        "lora_dropout": 0.05,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "megatron_core": "megatron.core",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config | fields))
    weights = {
        f"base_model.model.{layer}.lora_{letter}.weight": matrix.contiguous()
        for layer, pair in adapter.pairs.items()
        for letter, matrix in zip("AB", pair, strict=True)
    }
    save_file(weights | dict(tensors or {}), folder / WEIGHTS_FILE)
    return folder
