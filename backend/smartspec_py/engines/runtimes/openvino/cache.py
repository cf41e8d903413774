"""The keys and values of a model that OpenVINO computes, in blocks."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from smartspec_py.engines.runtimes.openvino.attention import BLOCK_LEN, cache_names
from smartspec_py.engines.runtimes.openvino.model_types import layers_with_keys
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig


class BlockCache:
    """Keys and values in blocks of BLOCK_LEN tokens: as many as fit in `config.cache_bytes`, and
    one more for each row, but no more than all rows can fill."""

    block_len = BLOCK_LEN
    spreads_nan = False

    def __init__(self, compiled: ov.CompiledModel, model: Any, config: RunnerConfig) -> None:
        self._num_rows = config.num_rows
        inputs = [compiled.input(name) for name in cache_names(len(layers_with_keys(model)))]
        # In 8 bits, each row of a block begins with its scale and zero.
        shapes = [[width.get_length() for width in list(i.partial_shape)[1:]] for i in inputs]
        self._sizes = [
            math.prod(shape) * i.element_type.size for i, shape in zip(inputs, shapes, strict=True)
        ]
        self.block_bytes: int = sum(self._sizes)
        most = config.num_rows * -(-(config.max_len + 1) // BLOCK_LEN)  # with a copy of a token
        fitting = config.cache_bytes // self.block_bytes + config.num_rows
        self.num_blocks = int(min(most, fitting))
        self.padding = np.array([self.num_blocks], np.int32)
        """One block more, for padding."""

        self.tensors: dict[str, ov.Tensor] = {}
        self._maps: list[mmap.mmap] = []
        self._occupied = [0] * config.num_rows
        """Blocks of each row that `occupy` has written."""
        for node, shape, size in zip(inputs, shapes, self._sizes, strict=True):
            # The system gives each page when it is written, so unused blocks take no memory. Large
            # pages would: a few tokens of a row took 2 MiB of each layer, and no pass was faster.
            num_bytes = (self.num_blocks + 1) * size
            self._maps.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            with contextlib.suppress(OSError):  # some kernels have no large pages
                self._maps[-1].madvise(mmap.MADV_NOHUGEPAGE)
            memory = np.frombuffer(self._maps[-1], np.uint8)
            of_all = ov.Shape([self.num_blocks + 1, *shape])
            self.tensors[node.any_name] = ov.Tensor(memory, of_all, node.element_type)

    def blocks_of(self, row: RowInput, num_tokens: int) -> NDArray[np.int32]:
        """The blocks of the row's first num_tokens tokens."""
        num = -(-num_tokens // BLOCK_LEN)
        if row.blocks is not None:
            return row.blocks[:num]
        first = min(row.row * (self.num_blocks // self._num_rows), self.num_blocks - num)
        return np.arange(first, first + num, dtype=np.int32)

    def occupy(self, num_rows: int, num_tokens: int) -> None:
        """Write to this many tokens of the first rows. Reading pages that were never written takes
        no time: they are all the same page, which stays in the processor's caches."""
        for row in range(num_rows):
            blocks = self.blocks_of(RowInput(row, 0, (), 0), num_tokens)[self._occupied[row] :]
            for tensor in self.tensors.values() if len(blocks) else ():
                _bytes(tensor)[blocks[0] : blocks[-1] + 1] = 0
            self._occupied[row] += len(blocks)

    def release(self) -> None:
        """Give the memory of all blocks back to the system. Their contents are lost."""
        self._occupied = [0] * self._num_rows
        for memory in self._maps:
            memory.madvise(mmap.MADV_DONTNEED)

    def drop(self, blocks: Sequence[int]) -> None:
        """See `KeyStore`."""
        for first, end in _runs(blocks):
            for memory, size in zip(self._maps, self._sizes, strict=True):
                start_page = -(-first * size // mmap.PAGESIZE)
                end_page = end * size // mmap.PAGESIZE
                if start_page < end_page:
                    num_bytes = (end_page - start_page) * mmap.PAGESIZE
                    memory.madvise(mmap.MADV_DONTNEED, start_page * mmap.PAGESIZE, num_bytes)

    def copy_block(self, source: int, destination: int, num_tokens: int) -> None:
        """See `KeyStore`."""
        for tensor in self.tensors.values():
            by_block = _bytes(tensor)
            by_block[destination] = by_block[source]

    def clear(self, blocks: Sequence[int], first: int = 0) -> None:
        """See `KeyStore`. Whole blocks are cleared."""
        assert first == 0
        for tensor in self.tensors.values():
            _bytes(tensor)[list(blocks)] = 0


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """The bounds of adjacent blocks."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return runs


def _bytes(tensor: ov.Tensor) -> Any:
    """View [blocks, bytes] of the tensor's memory."""
    return tensor.data.view(np.uint8).reshape(tensor.shape[0], -1)
