"""The matrices of experts by their names in files.

A file has each matrix of each expert. Transformers has all those of a layer in one tensor, with
gate and up of an expert one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

TYPES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Types of models with experts whose files have these names."""

EXPERTS = ".experts."
"""In the names of the tensors of experts."""

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of an expert in a tensor of Transformers."""


OF_MIXTRAL = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}
"""Parts of names in files of Mixtral, and what they are in the other models."""


def usual_name(name: str) -> str:
    """The name of a tensor of Mixtral as other models would have it."""
    if ".block_sparse_moe." in name:
        for part, usual in OF_MIXTRAL.items():
            name = name.replace(part, usual)
    return name


def by_expert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model of Transformers by their names in files. Those of experts share the
    memory of the model's."""
    found = {}
    for name, tensor in tensors.items():
        if EXPERTS not in name:
            found[name] = tensor
            continue
        mlp, part = name.split(EXPERTS)
        for expert, matrix in enumerate(tensor):
            names = expert_names(mlp, expert, part)
            found |= zip(names, matrix.chunk(len(names)), strict=True)
    return found


def expert_names(mlp: str, expert: int, part: str) -> list[str]:
    """Names of the matrices of an expert. mlp: name of the layer's MLP. part: see PARTS."""
    return [f"{mlp}{EXPERTS}{expert}.{matrix}.weight" for matrix in PARTS[part]]
