"""The layout of a captured pass.

A captured pass has fixed shapes. The tokens of all inputs follow each other without padding, and
padding tokens follow them up to the next of `SIZES`. A padding token writes its keys to the scratch
slot after the last row, and its results are not used. So it changes nothing that others read.

The attention kernel works on tiles: some tokens of one input. An input of up to SHORT tokens, which
decodes, has short tiles; a longer one, which reads a prompt, has long tiles. So the kernel that
attends an input depends on this input only.

This file only computes layouts. It uses no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
from numpy.typing import NDArray

from smartspec_py.engines.runtimes.runner import RowInput

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
"""Tokens of a captured pass. Larger passes are launched kernel by kernel: their kernels take longer
than the launches."""

SHORT = 16
"""Most tokens of an input that has short tiles."""

SPLIT_KEYS = 1024
"""Keys that are attended together: see `attention`. Rows with at most so many have graphs of their
own."""

SHORT_LINES, LONG_LINES = 16, 64
"""Queries of a tile, of all heads that share a key head. Tensor cores multiply 16 rows or more."""


class Line(IntEnum):
    """The numbers of a pass, each [num_tokens]; those of tiles are by tile. Slots are those of
    `RowCache`, counted over all rows."""

    TOKEN_ID = 0
    POSITION = auto()
    SLOT = auto()
    """Where the key is written. A token sees no key after it."""
    FIRST_SLOT = auto()
    """The first slot of the row that has a key."""
    INPUT_SLOT = auto()
    """The slot of the first token of the same input."""
    SEEN = auto()
    """Bit j is set if this token attends to token j of its input. Bit 63 stands for token 63 and
    all after it. Earlier tokens of the row are always seen, later ones never."""
    ADAPTER = auto()
    """See `Adapters`; 0 is none."""
    SHORT_TILE = auto()
    """The first token of a tile."""
    SHORT_COUNT = auto()
    """Its number of tokens; 0 for tiles that are not used."""
    LONG_TILE = auto()
    LONG_COUNT = auto()


@dataclass(frozen=True, slots=True)
class Tiling:
    """num_rows: of the cache. short, long: most tokens of a tile."""

    num_rows: int
    short: int
    long: int

    @classmethod
    def of(cls, num_rows: int, num_shared: int) -> Tiling:
        """num_shared: query heads that share a key head."""
        padded = 1 << (num_shared - 1).bit_length()
        return cls(num_rows, max(1, SHORT_LINES // padded), max(1, LONG_LINES // padded))

    def num_short(self, num_tokens: int) -> int:
        """The most short tiles of a pass over so many tokens."""
        num_inputs = min(self.num_rows, num_tokens)
        return (num_tokens + num_inputs * (self.short - 1)) // self.short

    def num_long(self, num_tokens: int) -> int:
        """The most long tiles."""
        num_inputs = min(self.num_rows, num_tokens // (SHORT + 1))
        if not num_inputs:
            return 0
        return (num_tokens + num_inputs * (self.long - 1)) // self.long


def size_of(inputs: Sequence[RowInput]) -> int | None:
    """The size that a pass is padded to; None if it is larger than all."""
    num_tokens = sum(len(item.tokens) for item in inputs)
    return next((size for size in SIZES if size >= num_tokens), None)


def lay_out(
    inputs: Sequence[RowInput], size: int, tiling: Tiling, max_len: int, scratch_slot: int
) -> tuple[NDArray[np.int64], list[int]]:
    """The numbers of a pass, [len(Line), size], and of each input the index of its first token.
    Without inputs, the pass has only padding. max_len: slots of a row."""
    made = np.zeros((len(Line), size), np.int64)
    made[Line.SLOT], made[Line.SEEN] = scratch_slot, -1  # in a chain, all that is not later
    lines: dict[Line, list[int]] = {line: [] for line in Line if line is not Line.SEEN}
    firsts, first = [], 0
    for item in inputs:
        num_tokens, row_slot = len(item.tokens), item.row * max_len
        slot = row_slot + item.position
        lines[Line.TOKEN_ID] += item.tokens
        lines[Line.POSITION] += item.positions
        lines[Line.SLOT] += range(slot, slot + num_tokens)
        lines[Line.FIRST_SLOT] += [row_slot + item.first] * num_tokens
        lines[Line.INPUT_SLOT] += [slot] * num_tokens
        lines[Line.ADAPTER] += [item.adapter] * num_tokens
        is_short = num_tokens <= SHORT
        step = tiling.short if is_short else tiling.long
        tiles = range(first, first + num_tokens, step)
        lines[Line.SHORT_TILE if is_short else Line.LONG_TILE] += tiles
        counts = [min(step, first + num_tokens - tile) for tile in tiles]
        lines[Line.SHORT_COUNT if is_short else Line.LONG_COUNT] += counts
        if item.tree:
            made[Line.SEEN, first : first + num_tokens] = item.seen
        firsts.append(first)
        first += num_tokens
    for line, values in lines.items():
        made[line, : len(values)] = values
    return made, firsts
