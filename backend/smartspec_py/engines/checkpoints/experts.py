"""The matrices of experts by their names in files.

A file has each matrix of each expert. Transformers has those of a layer in one tensor for all
experts, with gate and up of an expert one after the other. It can write files of that form too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

TYPES = ("lfm2_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe")
"""Types of models with experts whose files have these names."""


def has_experts(hf_config: Any) -> bool:
    """Whether a model with this config has experts. Of Gemma 4, some have."""
    return hf_config.model_type in TYPES or bool(getattr(hf_config, "enable_moe_block", False))


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
"""Parts of names in files of Mixtral and LFM2, and what they are in the other models."""

EXPERT_BIAS = ".expert_bias"
"""How the name of what is added to the scores of experts of LFM2 ends. It is no parameter."""


def usual_name(name: str) -> str:
    """The name of a tensor of Mixtral or LFM2 as other models would have it."""
    if ".block_sparse_moe." in name or ".feed_forward.experts." in name:
        for part, usual in OF_MIXTRAL.items():
            name = name.replace(part, usual)
    return name


def expert_names(mlp: str, expert: int, part: str) -> list[str]:
    """Names of the matrices of an expert. mlp: name of the layer's MLP. part: see PARTS."""
    return [f"{mlp}{EXPERTS}{expert}.{matrix}.weight" for matrix in PARTS[part]]


class _Place(NamedTuple):
    """Of a matrix: the name of its tensor, and if that has several, its expert and its part."""

    tensor: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1


class ByExpert(Mapping[str, torch.Tensor]):
    """Tensors of a model of Transformers, or of files, by their names in files with a tensor for
    each matrix. Those of experts share the memory of the given ones."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._places: dict[str, _Place] = {}
        for name in tensors:
            mlp, _, part = name.rpartition(EXPERTS)
            if not mlp or part not in PARTS:
                self._places[name] = _Place(name)
                continue
            for expert in range(len(tensors[name])):
                names = expert_names(mlp, expert, part)
                for i, matrix in enumerate(names):
                    self._places[matrix] = _Place(name, expert, i, len(names))

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        tensor = self._tensors[place.tensor]
        if place.expert is None:
            return tensor
        return tensor[place.expert].chunk(place.num_parts)[place.part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
