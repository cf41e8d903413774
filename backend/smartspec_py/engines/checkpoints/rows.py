"""Matrices that are read in parts: none is in memory as a whole in its original precision."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

PART = 1 << 18
"""Numbers that are read at once. In float32, they stay in the processor's caches: with 64 times as
many, rounding took nine times as long. With fewer, calls of PyTorch take longer than their work."""


class Rows(Protocol):
    """A matrix of which rows can be read."""

    @property
    def shape(self) -> torch.Size:
        """[rows, width]"""
        ...

    def read(self, rows: slice, numbers: torch.Tensor) -> None:
        """Write these rows to `numbers`, float32 [rows, width]. Raises ModelError."""
        ...


class TensorRows:
    """Those of a tensor. See `Rows`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self._tensor = tensor.shape, tensor

    def read(self, rows: slice, numbers: torch.Tensor) -> None:
        numbers.copy_(self._tensor[rows])


def whole(matrix: Rows) -> torch.Tensor:
    """All rows."""
    numbers = torch.empty(matrix.shape)
    for rows in _parts(matrix.shape):
        matrix.read(rows, numbers[rows])
    return numbers


def for_parts(
    matrix: Rows, use: Callable[[slice, torch.Tensor], None], num_threads: int = 1
) -> None:
    """Read all parts, and call `use` with the rows of each and their numbers, which it may change.
    Each thread has its own memory for them: new memory for each part would take as long as the
    work. PyTorch's operators do not hold Python's lock."""
    parts = iter(_parts(matrix.shape))

    def work(_: int) -> None:
        memory = None
        for rows in parts:  # the threads share the iterator
            num_rows = rows.stop - rows.start
            memory = torch.empty(num_rows, matrix.shape[1]) if memory is None else memory
            numbers = memory[:num_rows]
            matrix.read(rows, numbers)
            use(rows, numbers)

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, range(num_threads)))


def _parts(shape: torch.Size) -> list[slice]:
    """Rows of at most PART numbers, or single ones."""
    step = max(1, PART // shape[1])
    return [slice(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]
