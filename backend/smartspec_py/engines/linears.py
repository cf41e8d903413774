"""How a CPU multiplies by the weights of linear layers, where PyTorch's way does not fit.

Packed: a plain product of few rows brings the weights into its kernel's own order anew in every
call. Brought into it once, at load, a pass over 4 tokens of one sequence takes 36 ms instead of 52,
over 8 tokens 42 instead of 68 (88 M parameters, float32, one core; docs/performance.md). A
verification is a product of few rows: this decides what speculation brings on a CPU.

Padded: for `batch_invariant`, whose bits must not depend on the number of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

PACKED_FOR_ROWS = 128
"""MKL chooses the order for a number of rows, and computes with any. Packed for 128, products of 1
to 256 rows take within 5 % of the best choice for each; packed for 8, those of 64 take 1.7 times as
long."""

MIN_INVARIANT_ROWS = 2
"""A plain product of one bfloat16 row that sums more than 1024 products takes another kernel on a
CPU, and that one sums in another order."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Only what was measured: oneDNN's packed weights, which also come in bfloat16, are slower than
    plain ones for one row."""
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return has_mkl and device.type == "cpu" and dtype == torch.float32


def pack_linears(model: torch.nn.Module) -> None:
    """Pack every linear layer, the head included. The plain weights are given up: what stays in
    their place has their shape and no memory. Tied embeddings keep theirs."""
    multiply = torch.ops.mkl._mkl_linear.default
    for module in _linears(model):
        plain = module.weight.detach()
        packed = torch.ops.mkl._mkl_reorder_linear_weight(plain, PACKED_FOR_ROWS)
        shape = plain.new_empty(1).expand(plain.shape)
        module.weight = torch.nn.Parameter(shape, requires_grad=False)
        module.forward = partial(_packed_linear, multiply, packed, shape, module.bias)  # type: ignore[method-assign]


def pad_linears(model: torch.nn.Module) -> None:
    """Let every linear layer see at least MIN_INVARIANT_ROWS rows, the head included."""
    for module in _linears(model):
        module.forward = partial(padded_linear, module)  # type: ignore[method-assign]


def padded_linear(module: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """inputs [1, n, in_features] -> [1, n, out_features]."""
    num_rows = inputs.shape[1]
    if num_rows == 0 or num_rows >= MIN_INVARIANT_ROWS:
        return F.linear(inputs, module.weight, module.bias)
    padded = F.pad(inputs, (0, 0, 0, MIN_INVARIANT_ROWS - num_rows))
    return F.linear(padded, module.weight, module.bias)[:, :num_rows]


def _packed_linear(
    multiply: Any,
    packed: torch.Tensor,
    shape: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
) -> torch.Tensor:
    """inputs [n, in_features] or [1, n, in_features] -> the same with out_features.

    The last argument is the number of rows that the weights were packed for; the operator goes back
    to the plain weights where it is not the number there are. MKL itself asks no such thing.
    """
    out: torch.Tensor = multiply(inputs, packed, shape, bias, inputs.shape[-2])
    return out


def _linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
