"""Matrix products of linear layers on a CPU.

A plain product of few rows reorders the weights for its kernel in every call. So the weights are
packed once, with oneDNN if PyTorch has it. With `batch_invariant`, every product has the same
number of rows. Then the bits of a row do not depend on the number of other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""[.., n, in_features] -> [.., n, out_features]."""

PACKED_ROWS = 32
"""oneDNN orders the weights for this number of rows. The result works for any number."""

INVARIANT_ROWS = 16
"""Rows of each product if bits must not depend on the batch."""


def pack_linears(model: torch.nn.Module, batch_invariant: bool = False) -> None:
    """Replace the weights of all linear layers by packed ones. `weight` keeps its shape but uses no
    memory. Tied embeddings keep their weights."""
    for layer in [one for one in model.modules() if isinstance(one, torch.nn.Linear)]:
        weight = layer.weight.detach()
        product = _product(weight, None if layer.bias is None else layer.bias.detach())
        if batch_invariant:
            product = partial(_in_blocks, product)
        shape = weight.new_empty(1).expand(weight.shape)
        layer.weight = torch.nn.Parameter(shape, requires_grad=False)
        layer.forward = product  # type: ignore[method-assign, assignment]


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise.default
    except (RuntimeError, AttributeError):  # PyTorch or the processor lacks oneDNN
        return partial(F.linear, weight=weight, bias=bias)
    num_outputs = len(weight)

    def product(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.shape[-2] == 0:
            return inputs.new_empty((*inputs.shape[:-1], num_outputs))
        out: torch.Tensor = multiply(inputs, packed, bias, "none", [], "")
        return out

    return product


def _in_blocks(product: Product, inputs: torch.Tensor) -> torch.Tensor:
    num_rows = inputs.shape[-2]
    padded = F.pad(inputs, (0, 0, 0, -num_rows % INVARIANT_ROWS))
    parts = [product(part) for part in torch.split(padded, INVARIANT_ROWS, dim=-2)]
    return torch.cat(parts, dim=-2)[..., :num_rows, :]
