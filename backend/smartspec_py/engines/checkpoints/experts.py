"""The matrices of experts by their names in files.

A file has each matrix of each expert. Transformers has those of a layer in one tensor for all
experts, with gate and up of an expert one after the other. It can write files of that form too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from smartspec_py.engines.checkpoints.checks import GRANITE_4, GRANITE_MOE, ModelError

TYPES = (
    *("gpt_oss", GRANITE_MOE, "lfm2_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text"),
    "qwen3_moe",
)
"""Types of models with experts whose files have these names."""


def has_experts(hf_config: Any) -> bool:
    """Whether a model with this config has experts. Of Gemma 4 and Granite 4, some have."""
    if hf_config.model_type == GRANITE_4:
        return bool(hf_config.num_local_experts)
    return hf_config.model_type in TYPES or bool(getattr(hf_config, "enable_moe_block", False))


EXPERTS = ".experts."
"""In the names of the tensors of experts."""

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of an expert in a tensor of Transformers."""

SHARED_MLP = ".shared_mlp."
OF_SHARED = {
    "input_linear.weight": ("gate_proj", "up_proj"),
    "output_linear.weight": ("down_proj",),
}
"""The matrices of the MLP of all tokens in a tensor of Granite 4."""

OF_MIXTRAL = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}
"""Parts of names in files of Mixtral and LFM2, and what they are in the other models."""

BIAS = "_bias"
ENDS = {BIAS: ".bias", "_blocks": ".blocks", "_scales": ".scales", "": ".weight"}
"""How the names of tensors end behind a name in PARTS, and those of their parts. All but the last
are of gpt-oss. There, rows of gate and up take turns, and a matrix with a bias is transposed."""

NUM_DIMENSIONS = {BIAS: 2, "_blocks": 4, "_scales": 3, "": 3}
"""Of these tensors, by the ends of their names. The first one is that of the experts."""

EXPERT_BIAS = ".expert_bias"
"""How the name of what is added to the scores of experts of LFM2 ends. It is no parameter."""


def usual_name(name: str) -> str:
    """The name of a tensor of Mixtral or LFM2 as other models would have it."""
    if ".block_sparse_moe." in name or ".feed_forward.experts." in name:
        for part, usual in OF_MIXTRAL.items():
            name = name.replace(part, usual)
    return name


def expert_names(mlp: str, expert: int, part: str, end: str = "") -> list[str]:
    """Names of the matrices of an expert, or of what they are made of. mlp: name of the layer's
    MLP. part: see PARTS. end: see ENDS."""
    return [f"{mlp}{EXPERTS}{expert}.{matrix}{ENDS[end]}" for matrix in PARTS[part]]


def bias_names(mlp: str, part: str) -> list[str]:
    """Names of the biases [num_experts, out] of this part of all experts, as gpt-oss has them."""
    return [f"{mlp}{EXPERTS}{matrix}.bias" for matrix in PARTS[part]]


class _Place(NamedTuple):
    """Where a tensor is in one of the files: of all experts or of one, and of which part. The rows
    of parts may take turns."""

    tensor: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1
    takes_turns: bool = False
    is_transposed: bool = False


class ByExpert(Mapping[str, torch.Tensor]):
    """Tensors of a model of Transformers, or of files, by their names in files with a tensor for
    each matrix. Those of experts share the memory of the given ones."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ModelError if one of them has too few or too many dimensions."""
        self._tensors = tensors
        self._places: dict[str, _Place] = {}
        for name in tensors:
            mlp, _, part = name.rpartition(SHARED_MLP)
            if part in OF_SHARED:
                names = [f"{mlp}{SHARED_MLP}{matrix}.weight" for matrix in OF_SHARED[part]]
                self._add(names, _Place(name))
                continue
            mlp, _, part = name.rpartition(EXPERTS)
            end = next(end for end in ENDS if part.endswith(end))
            part = part.removesuffix(end)
            if not mlp or part not in PARTS:
                self._places[name] = _Place(name)
                continue
            _check_dimensions(name, tensors[name].shape, NUM_DIMENSIONS[end])
            if end == BIAS:
                self._add(bias_names(mlp, part), _Place(name, takes_turns=True))
                continue
            is_transposed = not end and name + BIAS in tensors
            takes_turns = is_transposed or end != ""
            place = _Place(name, takes_turns=takes_turns, is_transposed=is_transposed)
            for expert in range(len(tensors[name])):
                names = expert_names(mlp, expert, part, end)
                self._add(names, place._replace(expert=expert))

    def _add(self, names: list[str], place: _Place) -> None:
        """names: of the parts of what is at the place."""
        for part, name in enumerate(names):
            self._places[name] = place._replace(part=part, num_parts=len(names))

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        tensor = self._tensors[place.tensor]
        if place.expert is None:
            if place.takes_turns:
                return tensor[:, place.part :: place.num_parts]
            return tensor if place.num_parts == 1 else tensor.chunk(place.num_parts)[place.part]
        rows = tensor[place.expert].T if place.is_transposed else tensor[place.expert]
        if place.takes_turns:
            return rows[place.part :: place.num_parts]
        return rows.chunk(place.num_parts)[place.part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Names and shapes [out, in] of the linear layers of a model of Transformers, with the names of
    `ByExpert`."""
    weights = {
        f"{name}.weight": layer.weight
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    shapes = {name: weight.shape for name, weight in ByExpert(weights).items()}
    return {name.removesuffix(".weight"): (num, width) for name, (num, width) in shapes.items()}


def _check_dimensions(name: str, shape: Sequence[int], num: int) -> None:
    if len(shape) != num:
        raise ModelError(
            f"the weight files have the tensor {name} of the shape {tuple(shape)}, which must have "
            f"{num} dimensions: copy the whole checkpoint again"
        )
