"""Reads LoRA adapters in PEFT's format, and joins those of a server.

An adapter adds B A x to products W x of the target. A has `rank` rows, and B as many columns. A
server computes all its adapters in every pass, with the matrices A below each other, and the
matrices B beside each other. Of A x, each token keeps the numbers of its own adapter, and the
others become 0. So the shapes of a pass do not depend on the adapters of its tokens, and neither do
the bits of a token: to a sum, the other adapters add 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smartspec_py.engines.checkpoints.adapter_config import (
    MAX_TOTAL_RANK,
    WEIGHTS_FILE,
    read_adapter_config,
)
from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.config import model_without_weights
from smartspec_py.engines.checkpoints.experts import OF_SHARED, SHARED_MLP, linear_shapes
from smartspec_py.engines.checkpoints.head_files import load_tensors
from smartspec_py.engines.checkpoints.tensors import (
    LANGUAGE_MODEL,
    OF_IMAGES,
    check_finite,
    check_type,
)

PREFIX = "base_model.model."
MATRIX = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])(?:\.default)?\.weight")

Pair = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in] and B [out, rank], in float32. B has the adapter's scale."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """pairs: by the name of the adapted layer."""

    name: str
    rank: int
    pairs: Mapping[str, Pair]


class Adapters:
    """All adapters of a server. Adapter i of a pass is `names[i - 1]`, and 0 is none.

    layers: that at least one of them adapts.
    """

    def __init__(self, adapters: Sequence[Adapter] = ()) -> None:
        """Raises ModelError if their ranks together are too large."""
        self._adapters = adapters
        self.names = tuple(adapter.name for adapter in adapters)
        self.layers = frozenset(layer for adapter in adapters for layer in adapter.pairs)
        self.rank = sum(adapter.rank for adapter in adapters)
        if self.rank > MAX_TOTAL_RANK:
            raise ModelError(
                f"the LoRA adapters have a rank of {self.rank} together, which must be at most "
                f"{MAX_TOTAL_RANK}: serve fewer, or some of a lower rank"
            )

    @property
    def text(self) -> str:
        """What to say of them behind the name of the runtime."""
        return f", LoRA adapters: {', '.join(self.names)}" if self.names else ""

    @property
    def columns(self) -> torch.Tensor:
        """bool [1 + number of adapters, rank]: True at the columns of adapter i in row i."""
        ranks = torch.tensor([0] + [adapter.rank for adapter in self._adapters])
        owners = torch.repeat_interleave(torch.arange(len(ranks)), ranks)
        return owners == torch.arange(len(ranks))[:, None]

    def index(self, name: str) -> int:
        """The number of this adapter in a pass. name: empty for none."""
        return 1 + self.names.index(name) if name else 0

    def joined(self, layer: str) -> Pair:
        """The matrices of all adapters for one of `layers`: 0 for those that do not adapt it."""
        a, b = next(one.pairs[layer] for one in self._adapters if layer in one.pairs)
        joined_a, joined_b = torch.zeros(self.rank, a.shape[1]), torch.zeros(len(b), self.rank)
        for one, own in zip(self._adapters, self.columns[1:], strict=True):
            if layer in one.pairs:
                joined_a[own], joined_b[:, own] = one.pairs[layer]
        return joined_a, joined_b


NO_ADAPTERS = Adapters()

ROUTER = ".router.proj"
"""How the name of a layer ends that chooses experts, in Gemma 4. In the other models, it is no
linear layer."""


def linear_layers(hf_config: Any) -> dict[str, tuple[int, int]]:
    """Names and shapes [out, in] of the linear layers of a model that adapters can change: without
    its output layer, and those that choose experts."""
    model = model_without_weights(hf_config)
    output = model.get_output_embeddings()
    left_out = {name for name, layer in model.named_modules() if layer is output}
    return {
        name: shape
        for name, shape in linear_shapes(model).items()
        if name not in left_out and not name.endswith(ROUTER)
    }


def load_adapter(name: str, folder: Path, layers: Mapping[str, tuple[int, int]]) -> Adapter:
    """Load an adapter. layers: of the target, see `linear_layers`. Raises ModelError.

    In an adapter of a model that reads images, layers may have the names of that whole model. What
    changes how images are read is left out, as the model's own tensors for it are.
    """
    config = read_adapter_config(folder)
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_tensors(folder, [WEIGHTS_FILE], "weights").items():
        if OF_IMAGES.match(key.removeprefix(PREFIX)):
            continue
        found = MATRIX.fullmatch(key)
        layer = LANGUAGE_MODEL.sub(r"\1", found[1]) if found else ""
        parts = _as_served(layer, tensor, found[2], layers) if found else {}
        if found is None or not parts.keys() <= layers.keys():
            raise ModelError(
                f"{folder} has the tensor {key}, which is no matrix A or B of a linear layer of "
                "the target other than its output layer: use an adapter of such layers, trained "
                "for this target"
            )
        check_type(key, tensor.dtype, folder)
        check_finite(key, tensor, torch.float32, folder)
        for layer, part in parts.items():
            num_out, num_in = layers[layer]
            wanted = (config.rank, num_in) if found[2] == "A" else (num_out, config.rank)
            if part.shape != wanted:
                raise ModelError(
                    f"{folder} has the tensor {key} of the shape {tuple(tensor.shape)}, but with "
                    f"an r of {config.rank} the layer {layer} of this target needs {wanted}: use "
                    "an adapter that was trained for this target"
                )
            of_layer = matrices.setdefault(layer, {})
            if found[2] in of_layer:
                raise ModelError(
                    f"{folder} has the matrix {found[2]} of {layer} twice: save it again"
                )
            of_layer[found[2]] = part.float()
    for layer, found_of in matrices.items():
        if len(found_of) < 2:
            raise ModelError(
                f"{folder} has only one of the matrices A and B of {layer}: save the adapter again"
            )
    if not matrices:
        raise ModelError(f"{folder} adapts no layer of the language model: save the adapter again")
    pairs = {layer: (of["A"], of["B"] * config.scale) for layer, of in matrices.items()}
    return Adapter(name, config.rank, pairs)


def _as_served(
    layer: str, matrix: torch.Tensor, kind: str, layers: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The matrices of a layer, by the names that it has here. Granite 4 names its MLP otherwise,
    and has the rows of gate and up in one layer: see `tensors` and `experts`. layers: of the
    target."""
    begin, _, part = layer.rpartition(SHARED_MLP)
    parts = OF_SHARED.get(f"{part}.weight", ())
    if not parts or not matrix.ndim:
        return {layer: matrix}
    mlp = begin + SHARED_MLP if f"{begin}{SHARED_MLP}down_proj" in layers else f"{begin}.mlp."
    each = [matrix] * len(parts) if kind == "A" else matrix.tensor_split(len(parts))
    return {f"{mlp}{part}": rows for part, rows in zip(parts, each, strict=True)}
