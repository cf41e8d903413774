"""Products of states with weights, as operators of a graph: for each kind of weights, and with
adapters.

OpenVINO recognises compressed weights by the form of the graph: a constant of integers, converted
and multiplied by its scale. It then multiplies integers, if the processor can: activations are
rounded to 8 bits in groups, see `runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
import torch
from openvino._offline_transformations import compress_model_transformation

from smartspec_py.engines.checkpoints.adapters import NO_ADAPTERS, Adapters
from smartspec_py.engines.checkpoints.experts import linear_shapes
from smartspec_py.engines.runtimes.openvino.operators import float_, int_, ints, parameter
from smartspec_py.engines.runtimes.openvino.weights import (
    Compressed,
    Weights,
    by_columns,
    columns_of,
    joined,
    rotation,
)

OWN_ADAPTERS = "own_adapters"
"""A vector, int64: the adapter of each token, see `Adapters`. There is none without adapters."""

TYPES = {torch.bfloat16: ov.Type.bf16, torch.float16: ov.Type.f16}

LAYERS = "model.layers."
"""How the names of the layers' weights begin. Only these may have 4 bits."""

MOST, SHIFT, LEVELS = 63, 64, (-64.0, 191.0)
"""Activations are rounded to -63 to 63, and 64 is added, so that OpenVINO holds them in a byte
without sign. Without VNNI, processors add two products of such a byte and a weight in 16 bits: at
most 2 x 127 x 127, which fits. What the 64 adds to a sum is known, and subtracted at once: if the
graph says that 64 stands for zero, OpenVINO computes the same, but takes 9 s for 1.5 billion
weights."""

TINY = 1e-30
"""Least largest activation of a token, so that none is divided by 0."""

MATRIX_A = ".lora_A"
"""How the names of the adapters' matrices A end among the weights, behind the layer's name."""


class Products:
    """The products of one graph. The graph, compiled or not, reads the memory of the weights: keep
    `memory` as long as the graph."""

    def __init__(
        self,
        model: Any,
        weights: Weights,
        *,
        num_bits: int,
        group: int,
        block: int,
        is_half: bool,
        has_half_attention: bool = False,
        most_width: int | None = None,
        keeps_4_bits: bool = False,
        keeps_experts: bool = False,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        """model: of Transformers; only its structure is used. num_bits: of the weights of products,
        8 or 4; 0 keeps their type. With 4 bits, in groups of this size, embeddings and output layer
        have 8. block: above 0, products are of whole numbers on any processor, see `_of_integers`,
        and weights are rotated in blocks of so many columns. is_half: whether products have half
        precision. has_half_attention: whether queries, keys and values are rounded to bfloat16.
        most_width: products with compressed weights are computed in parts of at most
        this width; None computes each as a whole. keeps_4_bits: use the matrices of layers that
        `Weights.kept` gives. keeps_experts: the same of experts. adapters: whose matrices A are
        among the weights, see MATRIX_A.
        """
        self.weights, self.num_bits, self.group, self.is_half = weights, num_bits, group, is_half
        self.block, self.has_half_attention = block, has_half_attention
        self.most_width, self.keeps_4_bits = most_width, keeps_4_bits
        self._keeps_experts = keeps_experts
        self.has_kept_experts = False
        self.adapters = adapters
        self.memory: list[Any] = []
        self.inputs: dict[str, Any] = {}
        """Those that the products add to the graph's."""
        self._marked = _marked()
        if adapters.names:
            self.inputs[OWN_ADAPTERS] = parameter(OWN_ADAPTERS, [-1], np.int64)
            columns = op.constant(adapters.columns.numpy())
            own = op.gather(columns, self.inputs[OWN_ADAPTERS], int_(0))
            self._own_columns = op.unsqueeze(own, int_(0))  # bool [1, N, rank]
        self._widths = {name: num_rows for name, (num_rows, _) in linear_shapes(model).items()}

    def linear(self, names: Sequence[str], states: Any, num_rows: int | None = None) -> Any:
        """The product with the first num_rows rows of the joined weights, with what the adapters
        add to it, and the bias if there is one."""
        adapted = [name for name in names if name in self.adapters.layers]
        weights = [f"{name}.weight" for name in names] + [name + MATRIX_A for name in adapted]
        if self.block:
            [weight] = self.weights.int8(*weights, block=self.block)
            out = self._of_integers(states, weight, num_rows)
        else:
            products = [_product(states, parts) for parts in self._matrices(weights, num_rows)]
            out = products[0] if len(products) == 1 else op.concat(products, -1)
        if adapted:
            out = self._with_adapters(out, names, adapted)
        biases = [f"{name}.bias" for name in names]
        if biases[0] not in self.weights.tensors:
            return out
        return op.add(out, self.stored(self.weights.stored(*biases)))

    def take_tokens(self, numbers: Any) -> None:
        """From now on, states are of these tokens only."""
        if self.adapters.names:
            self._own_columns = op.gather(self._own_columns, numbers, int_(1))

    def _of_integers(self, states: Any, weight: Compressed, num_rows: int | None) -> Any:
        """The product of whole numbers, as a convolution of width 1: without VNNI, OpenVINO has
        kernels of 8 bits for convolutions only. They take 0.4 to 0.6 of the time of a product that
        converts weights to float32 (AMD EPYC Zen 3, 165 million weights). Sums of whole numbers are
        exact, so a token has the same bits in every pass.

        states: [1, N, in]. The activations of a token are rotated as the weight is, and rounded
        with one scale.
        """
        values = weight.values[:num_rows]
        num_out, width = values.shape
        turned = self._rotated(states)
        largest = op.reduce_max(op.abs(turned), int_(-1), keep_dims=True)
        scale = op.multiply(op.maximum(largest, float_(TINY)), float_(1 / MOST))
        limits = [op.constant(np.full((1, 1, 1), end, np.float32)) for end in LEVELS]
        shifted = [op.constant(np.full((1, 1, 1), end + SHIFT, np.float32)) for end in LEVELS]
        whole = op.fake_quantize(op.divide(turned, scale), *limits, *shifted, levels=256)
        integers = self._constant(values, (num_out, width, 1), ov.Type.i8)
        of_rows = weight.scale[:num_rows].numpy()[:, :, None]
        kernel = op.multiply(op.convert(integers, np.float32), op.constant(of_rows))
        out = op.convolution(op.transpose(whole, ints(0, 2, 1)), kernel, [1], [0], [0], [1])
        sums = SHIFT * values.numpy().sum(1, dtype=np.int32)[None, :, None]
        out = op.subtract(out, op.constant(sums.astype(np.float32) * of_rows[None, :, 0]))
        return op.multiply(op.transpose(out, ints(0, 2, 1)), scale)

    def _rotated(self, states: Any) -> Any:
        """Each block of the last dimension times `rotation`. states: [1, N, width]."""
        output = states if isinstance(states, ov.Output) else states.output(0)
        width = output.get_partial_shape()[-1].get_length()
        matrix = op.constant(rotation(self.block).numpy())
        blocks = op.reshape(states, ints(-1, self.block), False)
        return op.reshape(op.matmul(blocks, matrix, False, False), ints(1, -1, width), False)

    def _with_adapters(self, out: Any, names: Sequence[str], adapted: Sequence[str]) -> Any:
        """out: W x of these layers and then A x of the adapted ones, [1, N, width]. Returns
        W x + B A x, with the A of each token's own adapter."""
        ranks = [self.adapters.rank] * len(adapted)
        widths = [self._widths[name] for name in names]
        parts = op.variadic_split(out, int_(-1), ints(*widths, *ranks)).outputs()
        inner = dict(zip(adapted, parts[len(names) :], strict=True))
        whole = []
        for name, part in zip(names, parts, strict=False):
            if name in inner:
                # Selected and not multiplied: infinity of another adapter becomes 0.
                own = op.select(self._own_columns, inner[name], float_(0.0))
                matrix_b = self.stored(self.adapters.joined(name)[1])
                part = op.add(part, op.matmul(own, matrix_b, False, True))
            whole.append(part)
        return whole[0] if len(whole) == 1 else op.concat(whole, -1)

    def rows(self, name: str, numbers: Any) -> Any:
        """Rows of the weight [out, in] of this name, as states [1, N, in]. numbers: [N]."""
        rows = op.unsqueeze(self._rows(name, numbers), int_(0))
        return self._rotated(rows) if self.block else rows

    def of_rows(self, name: str, numbers: Any, states: Any) -> Any:
        """The product of each token's state with rows of its own, [1, N, n]. name: of the weight
        [out, in]. numbers: [N, n]. states: [1, N, in]."""
        if self.block:  # as the rows are
            states = self._rotated(states)
        each = op.unsqueeze(op.squeeze(states, int_(0)), int_(1))
        products = op.matmul(each, self._rows(name, numbers), False, True)
        return op.unsqueeze(op.squeeze(products, int_(1)), int_(0))

    def _rows(self, name: str, numbers: Any) -> Any:
        """Rows of the weight of this name, rotated if the weights are."""
        if not self.block:
            [matrix] = self._matrix([name])
            return op.gather(matrix, numbers, int_(0))
        # Beside rounded activations, OpenVINO would keep the whole matrix in float32.
        [weight] = self.weights.int8(name, block=self.block)
        integers = self._constant(weight.values, weight.values.shape, ov.Type.i8)
        scale = op.gather(op.constant(weight.scale.numpy()), numbers, int_(0))
        return op.multiply(op.convert(op.gather(integers, numbers, int_(0)), np.float32), scale)

    def stacked(self, names: Sequence[str], num: int) -> Any:
        """The weights [out, in] of these names as num matrices of the same size, one after another:
        [num, rows, in]. They are for products with activations that are not rounded."""
        if not self.num_bits:
            weight = self.weights.stored(*names)
            return self.stored(weight.view(num, -1, weight.shape[1]))
        kept = self.weights.kept_of_experts(*names) if self._keeps_experts else None
        if kept is not None:
            self.has_kept_experts = True
            is_8_bits = kept.values.dtype == torch.int8
            [weight] = self._int8([kept], None, num) if is_8_bits else self._int4([kept], num)
        elif self.num_bits == 8:
            [weight] = self._int8(self.weights.int8(*names), None, num)
        else:
            [weight] = self._int4(self.weights.int4(self.group, *names), num)
        return weight

    def _matrices(self, names: Sequence[str], num_rows: int | None) -> list[list[Any]]:
        """The parts of the weights of these names: of neighbours as one matrix, where the files'
        own 4 bits are kept for all of them or for none."""
        kept = {name: self._kept(name) for name in names}
        matrices = []
        for is_kept, run in groupby(names, key=lambda name: kept[name] is not None):
            if is_kept:
                weight = joined([weight for name in run if (weight := kept[name]) is not None])
                columns = columns_of(2 * weight.values.shape[1], self.most_width, self.group)
                matrices.append(self._int4(by_columns(weight, columns)))
            else:
                matrices.append(self._matrix(list(run), num_rows, self.most_width))
        return matrices

    def _kept(self, name: str) -> Compressed | None:
        if not self.keeps_4_bits or not name.startswith(LAYERS):
            return None
        return self.weights.kept(name)

    def _matrix(
        self, names: Sequence[str], num_rows: int | None = None, most_width: int | None = None
    ) -> list[Any]:
        """The joined weights [out, in] of these names, as float32 in the graph; one after another,
        their parts by columns if they are wider than most_width."""
        if not self.num_bits:
            return [self.stored(self.weights.stored(*names)[:num_rows])]
        if self.num_bits == 8 or not names[0].startswith(LAYERS):
            return self._int8(self.weights.int8(*names, most_width=most_width), num_rows)
        return self._int4(self.weights.int4(self.group, *names, most_width=most_width))

    def _int8(
        self, parts: Sequence[Compressed], num_rows: int | None, num: int | None = None
    ) -> list[Any]:
        """num: matrices that are one after another, see `stacked`."""
        made = []
        for part in parts:
            values, scale = part.values[:num_rows], part.scale[:num_rows]
            whole = shape = _stacked(values.shape, num)
            if scale.ndim == 3:
                num_groups = scale.shape[1]
                shape = *whole[:-1], num_groups, whole[-1] // num_groups
            integers = self._constant(values, shape, ov.Type.i8)
            of_groups = self._constant(scale, (*shape[:-1], 1), ov.Type.f32)
            weight = op.multiply(op.convert(integers, np.float32), of_groups)
            if shape != whole:
                weight = op.reshape(weight, ints(*whole), special_zero=False)
            made.append(weight)
        return made

    def _int4(self, parts: Sequence[Compressed], num: int | None = None) -> list[Any]:
        """num: matrices that are one after another, see `stacked`."""
        made = []
        for part in parts:
            num_out, num_groups, _ = part.scale.shape
            width = 2 * part.values.shape[1]
            whole = _stacked((num_out, width), num)
            shape = *whole[:-1], num_groups, width // num_groups
            integers = self._constant(part.values, shape, ov.Type.u4)
            of_groups = *shape[:-1], 1
            scale = self._constant(part.scale, of_groups, ov.Type.f32)
            is_whole = part.zero.dtype == torch.uint8
            zero = self._constant(part.zero, of_groups, ov.Type.u8 if is_whole else ov.Type.f32)
            if is_whole:
                zero = op.convert(zero, np.float32)
            shifted = op.subtract(op.convert(integers, np.float32), zero)
            made.append(op.reshape(op.multiply(shifted, scale), ints(*whole), special_zero=False))
        return made

    @property
    def num_bytes(self) -> int:
        """Of the weights. A tied embedding is on the same memory twice."""
        arrays = (array for array in self.memory if isinstance(array, np.ndarray))
        return sum({array.ctypes.data: array.nbytes for array in arrays}.values())

    def _constant(self, numbers: torch.Tensor, shape: Sequence[int], dtype: ov.Type) -> Any:
        """A constant on the memory of the numbers, which may hold several values in a byte."""
        array = np.ascontiguousarray(numbers.numpy())
        tensor = ov.Tensor(array, ov.Shape(list(shape)), dtype)
        self.memory += [array, tensor]
        return op.constant(tensor, shared_memory=True)

    def stored(self, weight: torch.Tensor) -> Any:
        """The weight as float32 in the graph, on its own memory.

        Products in half precision keep weights of half precision. Those in float32 get them as
        float32: otherwise OpenVINO 2026.4 converts them in each pass, and sums in another order in
        passes of up to 4 tokens (with two threads) and of 256 and more, if a product is 4,096 wide.
        """
        if weight.dtype == torch.float32 or not self.is_half:
            weight = weight.float()
            return self._constant(weight, weight.shape, ov.Type.f32)
        stored = self._constant(weight.view(torch.int16), weight.shape, TYPES[weight.dtype])
        converted = _conversion(self._marked.clone())
        converted.input(0).replace_source_output(stored.output(0))
        converted.constructor_validate_and_infer_types()
        return converted


def _stacked(shape: Sequence[int], num: int | None) -> tuple[int, ...]:
    """The shape [rows, width] as that of num matrices; None for one without that dimension."""
    rows, width = shape
    return (rows, width) if num is None else (num, rows // num, width)


def _product(states: Any, parts: Sequence[Any]) -> Any:
    """With a weight of which these are the parts by columns."""
    widths = [part.get_output_shape(0)[1] for part in parts]
    inputs = [states]
    if len(parts) > 1:
        inputs = op.variadic_split(states, int_(-1), ints(*widths)).outputs()
    products = [
        op.matmul(given, weight, transpose_a=False, transpose_b=True)
        for given, weight in zip(inputs, parts, strict=True)
    ]
    return reduce(op.add, products)


def _marked() -> ov.Model:
    """A model with one marked conversion. The mark makes OpenVINO keep weights in their stored
    precision instead of converting them once. The Python API cannot set this mark."""
    inputs = op.parameter([1, 64], np.float32)
    made = op.matmul(inputs, op.constant(np.ones((64, 64), np.float32)), False, True)
    model = ov.Model([op.result(made)], [inputs], "compressed")
    compress_model_transformation(model)
    return model


def _conversion(model: ov.Model) -> Any:
    return next(
        operator for operator in model.get_ordered_ops() if operator.get_type_name() == "Convert"
    )
