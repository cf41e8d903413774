"""Small operators of a model, compiled by PyTorch for a GPU: norms, rotation and the gate of MLPs.

Transformers computes them as about 28 kernels per layer, each of which takes 1 to 3 us however
small it is. Compiled, they are five.
"""

from __future__ import annotations

import logging
import sys
from types import MethodType
from typing import Any

import torch

logger = logging.getLogger(__name__)

COMPILED = ("RMSNorm", "MLP")
"""How the names of the compiled modules' classes end."""

ROTATION = "apply_rotary_pos_emb"
"""The function that rotates queries and keys, in the file of each family."""


def compile_parts(model: Any) -> None:
    """Compile these parts of a model of Transformers, or of a head, in its first passes. Without a
    compiler, the model stays as it is."""
    try:
        torch.compile(torch.neg)(torch.ones(2, device="cuda"))
    except Exception as error:  # whatever the compiler raises
        logger.warning("operators cannot be compiled, so passes are slower: %s", error)
        return
    compiled: dict[type, Any] = {}
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith(COMPILED):
            forward = compiled.setdefault(kind, torch.compile(kind.forward))
            module.forward = MethodType(forward, module)
        family = sys.modules[kind.__module__]
        rotation = getattr(family, ROTATION, None)
        if rotation is not None and not hasattr(rotation, "_torchdynamo_orig_callable"):
            setattr(family, ROTATION, torch.compile(rotation))
