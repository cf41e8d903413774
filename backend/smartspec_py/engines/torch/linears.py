"""How linear layers are multiplied by their weights on a CPU.

PyTorch has several kernels, and which is fastest depends on the processor, the precision and the
number of rows: a plain product of few rows brings the weights into its kernel's own order anew in
every call, where packed weights are in it already. A verification is a product of few rows, so
this decides what speculation brings. `kernel_choice` measures the kernels; docs/performance.md has
figures of three processors.

For `batch_invariant` the bits of a row must not depend on how many rows share the product. Whether
they do is a matter of the kernel and the processor, and is found by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""[.., n, in_features] -> [.., n, out_features]."""

Shape = tuple[int, int]
"""Of a layer's weights: out_features, in_features."""

MKL_ROWS = 128
"""MKL chooses the order of the weights for a number of rows, and computes with any. Packed for 128,
products of 1 to 256 rows take within 5 % of the best choice for each."""

ONEDNN_ROWS = 32
"""The same for oneDNN."""

MAX_INVARIANT_ROWS = 256
"""Products of more rows are cut where bits must not depend on their number."""

INVARIANT_BLOCK = 16
"""Rows of each product where no other way keeps the bits."""

TRIED_ROWS = (*range(1, 34), *range(40, MAX_INVARIANT_ROWS, 8), 63, 65, 127, 129, 255)
"""Numbers of rows for which bits are compared with those of MAX_INVARIANT_ROWS."""


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return partial(F.linear, weight=weight, bias=bias)


def _mkl(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    multiply = torch.ops.mkl._mkl_linear.default
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_ROWS)
    shape = weight.new_empty(1).expand(weight.shape)

    def product(inputs: torch.Tensor) -> torch.Tensor:
        # The operator goes back to the plain weights where the last argument is not the number of
        # rows. MKL itself asks no such thing.
        out: torch.Tensor = multiply(inputs, packed, shape, bias, inputs.shape[-2])
        return out

    return product


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    multiply = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)

    def product(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.shape[-2] == 0:
            return inputs.new_empty((*inputs.shape[:-1], weight_rows))
        out: torch.Tensor = multiply(inputs, packed, bias, "none", [], "")
        return out

    weight_rows = weight.shape[0]
    return product


KERNELS: Mapping[str, Callable[[torch.Tensor, torch.Tensor | None], Product]] = {
    "plain": _plain,
    "mkl": _mkl,
    "onednn": _onednn,
}
"""Each takes [out_features, in_features] and the bias, and may raise RuntimeError or AttributeError
where it cannot be used. A new one is a function and a line here."""

PLAIN = "plain"


def linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The head included."""
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def shape_of(layer: torch.nn.Linear) -> Shape:
    return layer.out_features, layer.in_features


def product_of(layer: torch.nn.Linear, kernel: str, batch_invariant: bool = False) -> Product:
    """Raises RuntimeError or AttributeError where the kernel cannot be used here."""
    weight = layer.weight.detach()
    product = KERNELS[kernel](weight, None if layer.bias is None else layer.bias.detach())
    if not batch_invariant:
        return product
    least = _least_rows(kernel, shape_of(layer), weight.dtype, torch.get_num_threads())
    if least is None:
        return partial(_in_parts, product, INVARIANT_BLOCK, INVARIANT_BLOCK)
    return partial(_in_parts, product, least, MAX_INVARIANT_ROWS)


def use_kernels(
    model: torch.nn.Module, kernels: Mapping[Shape, str], batch_invariant: bool = False
) -> None:
    """Compute every linear layer by the kernel of its shape, plainly where there is none.

    Packed weights take the place of the plain ones: what stays there has their shape and no
    memory. Tied embeddings keep theirs.
    """
    for layer in linears(model):
        kernel = kernels.get(shape_of(layer), PLAIN)
        if kernel == PLAIN and not batch_invariant:
            continue
        product = product_of(layer, kernel, batch_invariant)
        if kernel != PLAIN:
            weight = layer.weight.detach()
            shape = weight.new_empty(1).expand(weight.shape)
            layer.weight = torch.nn.Parameter(shape, requires_grad=False)
        layer.forward = product  # type: ignore[method-assign, assignment]


@cache
@torch.inference_mode()
def _least_rows(kernel: str, shape: Shape, dtype: torch.dtype, num_threads: int) -> int | None:
    """From how many rows on a row has the same bits in products of any number, up to
    MAX_INVARIANT_ROWS; None where that is never so. num_threads: the number that is set."""
    generator = torch.Generator().manual_seed(0)
    product = KERNELS[kernel](torch.randn(shape, generator=generator).to(dtype), None)
    inputs = torch.randn(MAX_INVARIANT_ROWS, shape[1], generator=generator).to(dtype)
    expected = product(inputs)

    def keeps_bits(num_rows: int) -> bool:
        first, last = slice(num_rows), slice(-num_rows, None)
        return all(torch.equal(product(inputs[rows]), expected[rows]) for rows in (first, last))

    least = None
    for num_rows in sorted(TRIED_ROWS, reverse=True):
        if not keeps_bits(num_rows):
            break
        least = num_rows
    return least if least is not None and least <= INVARIANT_BLOCK else None


def _in_parts(product: Product, least: int, size: int, inputs: torch.Tensor) -> torch.Tensor:
    """By products of at most `size` rows, each padded to `least`."""
    num_rows = inputs.shape[-2]
    if least <= num_rows <= size or num_rows == 0:
        return product(inputs)
    parts = []
    for part in torch.split(inputs, size, dim=-2):
        missing = max(0, least - part.shape[-2])
        padded = F.pad(part, (0, 0, 0, missing)) if missing else part
        parts.append(product(padded)[..., : part.shape[-2], :])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
