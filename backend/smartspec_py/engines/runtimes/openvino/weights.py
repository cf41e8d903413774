"""The weights of a graph: read from the files of a checkpoint one at a time, and compressed.

A model is never in memory as a whole in its original precision: each tensor is read, compressed if
asked for, and given to the graph before the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

CHUNK = 1 << 18
"""Numbers that are compressed at once. The float32 copy stays in the processor's caches: with 64
times as many, it took nine times as long."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """A weight [out, in] of integers: weight = (values - zero) * scale.

    8 bits: values int8 [out, in], scale float32 [out, 1], zero 0. 4 bits: values of 0 to 15 in
    groups along `in`, two in a byte, the first in the low half: uint8 [out, in / 2]; scale float32
    [out, groups, 1]; zero uint8 [out, groups, 1].
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


class Weights:
    """The weights of a model for its graph, by the names of its parameters.

    Several graphs may use the same object. Each matrix is compressed only once.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.int8 = cache(lambda *names: _joined([to_int8(self.stored(name)) for name in names]))
        """The matrices of these names in 8 bits, as one."""
        self.int4 = cache(
            lambda group, *names: _joined([to_int4(self.stored(name), group) for name in names])
        )
        """The matrices of these names in 4 bits, in groups of this size, as one."""

    def stored(self, *names: str) -> torch.Tensor:
        """The tensors of these names, joined by their first dimension."""
        tensors = [self.tensors[name].detach() for name in names]
        return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)


def _joined(parts: list[Compressed]) -> Compressed:
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero for part in parts]
    return Compressed(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zeros) if zeros[0].ndim else zeros[0],
    )


def to_int8(weight: torch.Tensor) -> Compressed:
    """Round each row of a weight [out, in] to 255 levels around 0."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), 1)
    for part in _parts(weight):
        numbers = weight[part].float()
        largest = numbers.abs().amax(1, keepdim=True)
        scale[part] = torch.where(largest > 0, largest / 127, torch.ones(()))
        values[part] = (numbers / scale[part]).round_().to(torch.int8)
    return Compressed(values, scale, torch.zeros((), dtype=torch.uint8))


def to_int4(weight: torch.Tensor, group: int) -> Compressed:
    """Round each group of a row of a weight [out, in] to 16 levels between its least and its
    largest number; 0 is one of them."""
    num_out, num_in = weight.shape
    values = torch.empty(num_out, num_in // 2, dtype=torch.uint8)
    scale = torch.empty(num_out, num_in // group, 1)
    zero = torch.empty(num_out, num_in // group, 1, dtype=torch.uint8)
    for part in _parts(weight):
        numbers = weight[part].float().view(-1, num_in // group, group)
        least = numbers.amin(-1, keepdim=True).clamp_(max=0)
        width = numbers.amax(-1, keepdim=True).clamp_(min=0) - least
        scale[part] = torch.where(width > 0, width / 15, torch.ones(()))
        offset = (-least / scale[part]).round_()
        zero[part] = offset.to(torch.uint8)
        levels = (numbers / scale[part]).round_().add_(offset).clamp_(0, 15).to(torch.uint8)
        first, second = levels.view(-1, num_in // 2, 2).unbind(-1)
        values[part] = first | second << 4
    return Compressed(values, scale, zero)


def _parts(weight: torch.Tensor) -> list[slice]:
    """Rows of at most CHUNK numbers."""
    num_rows = max(1, CHUNK // weight.shape[1])
    return [slice(first, first + num_rows) for first in range(0, len(weight), num_rows)]
