"""The weights of a graph: read from the files of a checkpoint one at a time, and compressed.

A model is never in memory as a whole in its original precision, nor is a matrix that is compressed:
parts of it are read and compressed by several threads.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import torch

from smartspec_py.engines.checkpoints.quantized import Integers
from smartspec_py.engines.checkpoints.rows import Rows, TensorRows, for_parts
from smartspec_py.engines.runtimes.openvino.weights_file import WeightsFile

KEPT_GROUPS = (128, 64)
"""Sizes of groups with which 4 bits take less time than 8 in passes of 1 to 32 tokens: 0.56 to 0.90
of it (AMD EPYC Zen 4). With groups of 32, passes of 8 tokens and more take longer."""


EVEN_COLUMNS = 32
"""Columns of a part of a product come in whole groups of so many. In other parts that are wider
than 1,152, OpenVINO 2026.4 sums in another order in passes of 5 to 80 tokens (AVX512)."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """A weight [out, in] of integers: weight = (values - zero) * scale.

    8 bits: values int8 [out, in], scale float32 [out, 1], zero 0. 4 bits: values of 0 to 15 in
    groups along `in`, two in a byte, the first in the low half: uint8 [out, in / 2]; scale float32
    [out, groups, 1]; zero [out, groups, 1], of uint8 or float32. MXFP4: as 8 bits, but with the
    scales of 4.
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


class Weights:
    """The weights of a model for its graph, by the names of its parameters.

    Several graphs may use the same object. Each matrix is compressed only once.
    """

    def __init__(
        self,
        files: Mapping[str, torch.Tensor],
        num_threads: int = 1,
        added: Mapping[str, torch.Tensor] = MappingProxyType({}),
        file: WeightsFile | None = None,
    ) -> None:
        """num_threads: that compress. added: tensors beside those of the files. file: where
        compressed matrices are kept, if nothing is added; None keeps none."""
        self.tensors: Mapping[str, torch.Tensor] = ChainMap(dict(added), files)  # type: ignore[arg-type]
        self._files, self._added, self._num_threads = files, added, num_threads
        self._file = file
        self._compressed: dict[str, list[Compressed]] = {}

    def int8(self, *names: str, most_width: int | None = None, block: int = 1) -> list[Compressed]:
        """The matrices of these names in 8 bits, as one, in parts; see `by_columns`. block: see
        `rotation`."""

        def compress(rows: Rows) -> Compressed:
            return to_int8(rows, self._num_threads, block)

        columns = self._columns(names[0], most_width, EVEN_COLUMNS)
        return self._once(compress, names, columns, f"int8, rotated by {block}")

    def int4(self, group: int, *names: str, most_width: int | None = None) -> list[Compressed]:
        """The matrices of these names in 4 bits, in groups of this size, as one, in parts."""

        def compress(rows: Rows) -> Compressed:
            return to_int4(rows, group, self._num_threads)

        columns = self._columns(names[0], most_width, group)
        return self._once(compress, names, columns, f"int4, groups of {group}")

    def _once(
        self,
        compress: Callable[[Rows], Compressed],
        names: Sequence[str],
        columns: Sequence[slice],
        kind: str,
    ) -> list[Compressed]:
        def make() -> list[torch.Tensor]:
            whole = joined([compress(self._rows(name)) for name in names])
            parts = by_columns(whole, columns)
            return [t for part in parts for t in (part.values, part.scale, part.zero)]

        key = json.dumps([kind, [part.stop for part in columns], *names])
        if key not in self._compressed:
            numbers = self._file.get(key, make) if self._file else make()
            self._compressed[key] = [
                Compressed(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)
            ]
        return self._compressed[key]

    def _columns(self, name: str, most_width: int | None, group: int) -> list[slice]:
        """See `columns_of`. Does not read a matrix of a file, which may not be needed."""
        shapes = getattr(self._files, "shapes", {})
        return columns_of((shapes.get(name) or self.tensors[name].shape)[1], most_width, group)

    @property
    def kept_group(self) -> int:
        """Columns with one scale in matrices of 4 bits that `kept` can return; 0 for none."""
        group = getattr(self._files, "group", 0)
        return group if group in KEPT_GROUPS else 0

    def kept(self, name: str) -> Compressed | None:
        """The matrix with the file's own integers, zeros and scales, if the file has it in 4 bits
        and in groups of `kept_group`; else None."""
        matrix = self._integers(name)
        if matrix is None or matrix.num_bits != 4 or matrix.group != self.kept_group:
            return None
        if not 0 <= matrix.zeros.min() <= matrix.zeros.max() <= 15:  # of old files, in 8 bits
            return None
        return _packed(replace(matrix, zeros=matrix.zeros.to(torch.uint8)))

    def kept_of_experts(self, *names: str) -> Compressed | None:
        """The matrices of these names as one, each with the file's own integers, zeros and scales;
        None if the file has not 4 bits, or MXFP4, in adjacent groups of the same size for all."""
        key = json.dumps(["as in the file", *names])
        if key not in self._compressed:
            found = self._file.found(key) if self._file else None
            if found is None:
                if (whole := self._joined_integers(names)) is None:
                    return None
                numbers = [whole.values, whole.scale, whole.zero]
                found = self._file.get(key, lambda: numbers) if self._file else numbers
            self._compressed[key] = [Compressed(*found)]
        return self._compressed[key][0]

    def _joined_integers(self, names: Sequence[str]) -> Compressed | None:
        """See `kept_of_experts`. The matrices have the same shape."""
        if (first := _as_in_file(self._integers(names[0]))) is None:
            return None
        num_rows, num = len(first.values), len(names)
        whole = Compressed(
            *(
                each.new_empty(num * num_rows, *each.shape[1:]) if each.ndim else each
                for each in (first.values, first.scale, first.zero)
            )
        )

        def read(i: int) -> bool:
            part = _as_in_file(self._integers(names[i])) if i else first
            if part is None or not _is_like(part, first):
                return False
            rows = slice(i * num_rows, (i + 1) * num_rows)
            whole.values[rows], whole.scale[rows] = part.values, part.scale
            if whole.zero.ndim:
                whole.zero[rows] = part.zero
            return True

        with ThreadPoolExecutor(self._num_threads) as threads:
            return whole if all(threads.map(read, range(num))) else None

    def _integers(self, name: str) -> Integers | None:
        read: Callable[[str], Integers | None] | None = getattr(self._files, "integers", None)
        return read(name) if read is not None and name not in self._added else None

    def with_added(self, added: Mapping[str, torch.Tensor]) -> Weights:
        """The same with these tensors too."""
        return Weights(self._files, self._num_threads, {**self._added, **added})

    def finish(self) -> None:
        """No graph asks for more."""
        if self._file is not None:
            self._file.finish()

    def stored(self, *names: str) -> torch.Tensor:
        """The tensors of these names, joined by their first dimension."""
        tensors = [self.tensors[name].detach() for name in names]
        return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor of this name."""
        read: Callable[[str], torch.dtype] | None = getattr(self._files, "dtype", None)
        if read is None or name in self._added:
            return self.tensors[name].dtype
        return read(name)

    def _rows(self, name: str) -> Rows:
        read: Callable[[str], Rows] | None = getattr(self._files, "rows", None)
        if read is None or name in self._added:
            return TensorRows(self.tensors[name].detach())
        return read(name)


def _as_in_file(matrix: Integers | None) -> Compressed | None:
    """See `Weights.kept_of_experts`."""
    if matrix is None or matrix.num_bits != 4 or not matrix.group:
        return None
    if matrix.values.dtype == torch.int8:  # of MXFP4, without zeros
        none = torch.zeros((), dtype=torch.uint8)
        return Compressed(matrix.values, matrix.scales[:, :, None], none)
    return _packed(replace(matrix, zeros=matrix.zeros.float()))


def _is_like(part: Compressed, first: Compressed) -> bool:
    """Whether it has as many bits and groups. Both have as many rows and columns."""
    return part.values.shape == first.values.shape and part.scale.shape == first.scale.shape


def _packed(matrix: Integers) -> Compressed:
    """Of 4 bits."""
    first, second = matrix.values.view(len(matrix.values), -1, 2).unbind(-1)
    scale = matrix.scales.float()
    return Compressed(first | second << 4, scale[:, :, None], matrix.zeros[:, :, None])


def joined(parts: list[Compressed]) -> Compressed:
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero for part in parts]
    return Compressed(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zeros) if zeros[0].ndim else zeros[0],
    )


def by_columns(weight: Compressed, columns: Sequence[slice]) -> list[Compressed]:
    """Its parts, which together have all columns; see `columns_of`."""
    if len(columns) == 1:
        return [weight]
    if not weight.zero.ndim:
        parts = [weight.values[:, part].contiguous() for part in columns]
        return [Compressed(part, weight.scale, weight.zero) for part in parts]
    group = 2 * weight.values.shape[1] // weight.scale.shape[1]
    return [
        Compressed(
            weight.values[:, part.start // 2 : part.stop // 2].contiguous(),
            weight.scale[:, part.start // group : part.stop // group].contiguous(),
            weight.zero[:, part.start // group : part.stop // group].contiguous(),
        )
        for part in columns
    ]


def columns_of(width: int, most: int | None, group: int) -> list[slice]:
    """Columns of the parts of a matrix: as few as possible with at most so many columns each, of
    about equal width, in whole groups. Columns after the last whole group are a part of their own.
    """
    if most is None:
        return [slice(0, width)]
    grouped = width - width % group
    num_parts = max(1, -(-grouped // most))
    step = max(1, -(-grouped // (num_parts * group))) * group
    bounds = sorted({*range(0, grouped, step), grouped, width})
    return [slice(*pair) for pair in pairwise(bounds)]


def rows_of(
    layer: torch.Tensor | Sequence[Compressed], block: int, numbers: torch.Tensor
) -> torch.Tensor:
    """Rows [n, in] of a weight [out, in], in float32. layer: the weight, or its parts by columns in
    8 bits. block: above 1, the parts are rotated in blocks of so many columns. numbers: [n]."""
    if isinstance(layer, torch.Tensor):
        return layer[numbers].float()
    rows = torch.cat([part.values[numbers].float() * part.scale[numbers] for part in layer], 1)
    return (rows.view(-1, block) @ rotation(block)).view(rows.shape) if block > 1 else rows


def rotation(block: int) -> torch.Tensor:
    """A matrix of Hadamard [block, block], of 1 and -1. Its square is block times the identity.
    block: a power of 2.

    It spreads each number over its block, so that a few large ones, which states of many models
    have, no longer decide how all others are rounded (QuaRot, arXiv 2404.00456).
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def to_int8(weight: Rows, num_threads: int = 1, block: int = 1) -> Compressed:
    """Round each row of a weight [out, in], rotated in blocks, to 255 levels around 0."""
    matrix = rotation(block) / block
    values = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0], 1)

    def compress(rows: slice, numbers: torch.Tensor) -> None:
        if block > 1:
            numbers = (numbers.view(-1, block) @ matrix).view(numbers.shape)
        largest = torch.maximum(numbers.amax(1, keepdim=True), -numbers.amin(1, keepdim=True))
        scale[rows] = torch.where(largest > 0, largest / 127, torch.ones(()))
        values[rows] = numbers.div_(scale[rows]).round_()

    for_parts(weight, compress, num_threads)
    return Compressed(values, scale, torch.zeros((), dtype=torch.uint8))


def to_int4(weight: Rows, group: int, num_threads: int = 1) -> Compressed:
    """Round each group of a row of a weight [out, in] to 16 levels between its least and its
    largest number; 0 is one of them."""
    num_out, num_in = weight.shape
    values = torch.empty(num_out, num_in // 2, dtype=torch.uint8)
    scale = torch.empty(num_out, num_in // group, 1)
    zero = torch.empty(num_out, num_in // group, 1, dtype=torch.uint8)

    def compress(rows: slice, numbers: torch.Tensor) -> None:
        numbers = numbers.view(-1, num_in // group, group)
        least = numbers.amin(-1, keepdim=True).clamp_(max=0)
        width = numbers.amax(-1, keepdim=True).clamp_(min=0) - least
        scale[rows] = torch.where(width > 0, width / 15, torch.ones(()))
        offset = (-least / scale[rows]).round_()
        zero[rows] = offset.to(torch.uint8)
        levels = numbers.div_(scale[rows]).round_().add_(offset).clamp_(0, 15).to(torch.uint8)
        first, second = levels.view(-1, num_in // 2, 2).unbind(-1)
        values[rows] = first | second << 4

    for_parts(weight, compress, num_threads)
    return Compressed(values, scale, zero)
