"""Fewer and larger kernels for a GPU.

Products with the same input are joined: q, k and v, and gate and up. PyTorch's compiler joins small
operators: norms, rotation and the gate of MLPs. Transformers computes them as about 28 kernels per
layer, each of which takes 1 to 3 us however small it is. Compiled, they are five. Compiling a whole
layer was tried on a CPU: hooks of Transformers break the graph, and each layer is compiled anew.
"""

from __future__ import annotations

import logging
import sys
from types import MethodType
from typing import Any

import torch

from smartspec_py.engines.runtimes.pytorch.float8 import Float8Linear, rounded, scaled

logger = logging.getLogger(__name__)

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of a module that read the same input, in the order of their calls."""

COMPILED = ("RMSNorm", "MLP")
"""How the names of the compiled modules' classes end."""

ROTATION = "apply_rotary_pos_emb"
"""The function that rotates queries and keys, in the file of each family."""


class _First(torch.nn.Module):
    """The first of some linear layers with the same input. It computes all of them."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        super().__init__()
        first = layers[0]
        self.sizes = [layer.out_features for layer in layers]
        with torch.device("meta"):
            self.all = torch.nn.Linear(first.in_features, sum(self.sizes), first.bias is not None)
        weights = torch.cat([layer.weight.detach() for layer in layers])
        self.all.weight = torch.nn.Parameter(weights, requires_grad=False)
        if first.bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in layers])
            self.all.bias = torch.nn.Parameter(bias, requires_grad=False)
        self.parts: tuple[torch.Tensor, ...] = ()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.parts = self.all(tokens).split(self.sizes, -1)
        return self.parts[0]


class _Next(torch.nn.Module):
    """One of the others: the part that the first one computed."""

    def __init__(self, first: _First, index: int) -> None:
        super().__init__()
        self._first, self._index = (first,), index  # in a tuple, it is no module of this one

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._first[0].parts[self._index]


def merge_products(model: torch.nn.Module) -> None:
    """Join linear layers with the same input, in place."""
    for module in list(model.modules()):
        for names in SAME_INPUT:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            is_linear = all(type(layer) is torch.nn.Linear for layer in layers)
            if not is_linear or len({layer.bias is None for layer in layers}) > 1:
                continue
            first = _First(layers)
            setattr(module, names[0], first)
            for index, name in enumerate(names[1:], 1):
                setattr(module, name, _Next(first, index))


def compile_parts(model: Any) -> None:
    """Compile these parts of a model of Transformers, or of a head, in its first passes. Without a
    compiler, the model stays as it is."""
    try:
        torch.compile(torch.neg)(torch.ones(2, device="cuda"))
    except Exception as error:  # whatever the compiler raises
        logger.warning("operators cannot be compiled, so passes are slower: %s", error)
        return
    compiled: dict[type, Any] = {}
    of_float8 = torch.compile(rounded), torch.compile(scaled)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.rounded, module.scaled = of_float8
        kind = type(module)
        if kind.__name__.endswith(COMPILED):
            forward = compiled.setdefault(kind, torch.compile(kind.forward))
            module.forward = MethodType(forward, module)
        family = sys.modules[kind.__module__]
        rotation = getattr(family, ROTATION, None)
        if rotation is not None and not hasattr(rotation, "_torchdynamo_orig_callable"):
            setattr(family, ROTATION, torch.compile(rotation))
