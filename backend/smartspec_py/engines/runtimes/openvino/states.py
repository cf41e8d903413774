"""The states of layers that have them, see `recurrent`: which a pass reads, and which it leaves.

Of each row, the states at the last whole tiles are kept, and inputs of the convolution for the last
tokens. So drafts can be taken back: the next pass computes from an earlier tile on again.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from smartspec_py.engines.checkpoints.recurrent import TILE, StateShapes
from smartspec_py.engines.runtimes.openvino.recurrent import (
    ALONE,
    ALONE_SLOTS,
    INPUTS,
    KEPT,
    LOOPED,
    PAST,
    PLACES,
    SLOTS,
    TAPS,
    TILE_ENDS,
    TILE_TOKENS,
    input_names,
)
from smartspec_py.engines.runtimes.runner import RowInput

ZEROS = 0
"""The slot of the state before the first token."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a row in a pass. base: tokens before its first tile. end: tokens after the pass."""

    row: RowInput
    base: int
    end: int

    @property
    def num_tiles(self) -> int:
        return -(-(self.end - self.base) // TILE)

    @property
    def new_base(self) -> int:
        return self.end // TILE * TILE

    @property
    def changes_state(self) -> bool:
        return self.new_base > self.base


class States:
    """States and inputs of convolutions of all rows, and those behind cached prefixes: see
    `StateStore`. Not thread-safe."""

    step = TILE

    def __init__(self, shapes: StateShapes, num_rows: int, num_back: int, num_kept: int) -> None:
        """num_back: tokens that can be taken back. num_kept: prefixes."""
        self._history = shapes.num_before
        self._num_bases, self._num_past = shapes.num_bases(num_back), shapes.num_past(num_back)
        first = 1 + num_rows * self._num_bases
        self.free_slots = range(first, first + num_kept)
        self._first_kept = num_rows * self._num_past
        self._bases: list[dict[int, int]] = [{} for _ in range(num_rows)]
        """Of each row, slots of states by the number of tokens before them."""
        self._ends = [0] * num_rows
        """The end of what was written last of each row."""

        self._maps: list[mmap.mmap] = []
        self.tensors: dict[str, ov.Tensor] = {}
        num_past = self._first_kept + num_kept * self._history
        sizes = [(first + num_kept, *shapes.delta), (num_past, shapes.width)]
        names = input_names(shapes.num_layers)
        for name, size in zip(names, sizes * shapes.num_layers, strict=True):
            # The system gives each page when it is written, and it has zeros.
            num_bytes = math.prod(size) * np.dtype(np.float32).itemsize
            self._maps.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            memory = np.frombuffer(self._maps[-1], np.float32)
            self.tensors[name] = ov.Tensor(memory, ov.Shape(list(size)), ov.Type.f32)
        self._states = [self.tensors[name].data for name in names[::2]]
        self._past = [self.tensors[name].data for name in names[1::2]]
        self._parts: list[_Part] = []
        self._kept: list[int] = []

    def release(self) -> None:
        """Give the memory back to the system. All states are lost."""
        self._bases = [{} for _ in self._bases]
        for memory in self._maps:
            memory.madvise(mmap.MADV_DONTNEED)

    def pretend(self, num_rows: int, num_tokens: int) -> None:
        """Let the first rows have some state behind so many tokens, for passes that are timed."""
        for row in range(num_rows):
            self._bases[row] = {num_tokens // TILE * TILE: self._slots(row)[0]}
            self._ends[row] = num_tokens

    def is_behind(self, row: RowInput) -> bool:
        """Whether the row should read its first token alone, so that it gets a newer state: if all
        drafts of a pass over several tiles are rejected, it keeps the one before them."""
        bases = [num for num in self._bases[row.row] if num <= row.position]
        return row.position - max(bases, default=0) >= TILE

    def load(self, slot: int, row: int, num_tokens: int) -> None:
        """See `StateStore`."""
        own = self._slots(row)[0]
        self._bases[row], self._ends[row] = {num_tokens: own}, num_tokens
        self._copy(slot, own)
        places = self._places(row, np.arange(num_tokens - self._history, num_tokens))
        for past in self._past:
            past[places] = past[self._tail(slot)]

    def begin(
        self, rows: Sequence[RowInput], lens: Sequence[int], num_tokens: int
    ) -> dict[str, NDArray[Any]]:
        """The inputs of a pass. lens: tokens of each row in the pass; one more than the row has if
        the last is a copy, see `parts.with_copy`. num_tokens: of the pass, with padding."""
        self._parts = parts = [self._part(row) for row in rows]
        looped = [part for part in parts if part.changes_state]
        alone = [part for part in parts if not part.changes_state]
        empty = sum(part.num_tiles for part in parts)
        # OpenVINO 2026.4 gives wrong numbers where a loop has no tile; one of no rows is right.
        num_loops = max((part.num_tiles for part in looped), default=1)
        of_looped = np.full((num_loops, len(looped)), empty)
        past = [np.arange(max(0, part.base - self._history), part.row.position) for part in parts]
        places_of_past = [
            self._places(part.row.row, own) for part, own in zip(parts, past, strict=True)
        ]
        num_past = sum(map(len, past))
        nothing = num_past + num_tokens
        taps = np.full((self._history + 1, empty + 1, TILE), nothing)
        is_there = np.zeros((empty + 1, 1, TILE, 1), np.float32)
        ends = np.zeros((empty + 1, 1, 1, 1), np.float32)
        places = np.zeros(num_tokens, np.int64)
        of_alone: list[int] = []
        self._kept, first_past, first, tile, column = [], 0, 0, 0, 0
        for part, own, num in zip(parts, past, lens, strict=True):
            start, base, end = part.row.position, part.base, part.end
            numbers = np.arange(base - self._history, base + part.num_tiles * TILE)
            sources = np.where(
                numbers < start,
                first_past + numbers - (start - len(own)),
                first + num_past + numbers - start,
            )
            sources[(numbers < 0) | (numbers >= end)] = nothing
            windows = sliding_window_view(sources, self._history + 1).T
            tiles = slice(tile, tile + part.num_tiles)
            taps[:, tiles] = windows.reshape(self._history + 1, -1, TILE)
            # No tap of a token that is not there.
            there = (numbers[self._history :] < end).reshape(-1, TILE)
            taps[:, tiles][:, ~there] = nothing
            is_there[tiles, 0, :, 0] = there
            ends[tile : tile + (part.new_base - base) // TILE] = 1.0
            inside = np.minimum(np.arange(start, start + num), end - 1) - base
            if part.changes_state:
                of_looped[: part.num_tiles, column] = range(tile, tile + part.num_tiles)
                tile_of_output = inside // TILE * len(looped) + column
                column += 1
            else:
                tile_of_output = np.full(num, of_looped.size + len(of_alone))
                of_alone.append(tile)
            places[first : first + num] = tile_of_output * TILE + inside % TILE
            least = max(start, end - self._num_past)
            self._kept += range(first + least - start, first + end - start)
            first_past, first = first_past + len(own), first + num
            tile += part.num_tiles
        given = {
            SLOTS: [self._bases[part.row.row][part.base] for part in looped],
            LOOPED: of_looped,
            ALONE_SLOTS: [self._bases[part.row.row][part.base] for part in alone],
            ALONE: of_alone,
            PAST: np.concatenate(places_of_past),
            TAPS: taps,
            PLACES: places,
            KEPT: self._kept,
            TILE_TOKENS: is_there,
            TILE_ENDS: ends,
        }
        return {name: np.asarray(given[name], dtype) for name, (_, dtype) in INPUTS.items()}

    def finish(self, results: Sequence[NDArray[Any]]) -> None:
        """Keep what a pass gave: see `recurrent.TiledNets`."""
        ends = [(part, max(part.row.position, part.end - self._num_past)) for part in self._parts]
        places = np.concatenate(
            [self._places(part.row.row, np.arange(least, part.end)) for part, least in ends]
        )
        for past, given in zip(self._past, results[::2], strict=True):
            past[places] = given
        column = 0
        for part in self._parts:
            if part.changes_state:
                slot = self._new_slot(part)
                for states, given in zip(self._states, results[1::2], strict=True):
                    states[slot] = given[column]
                column += 1
            if part.row.kept_state is not None:
                self._keep(part.row.row, *part.row.kept_state)

    def _part(self, row: RowInput) -> _Part:
        bases = self._bases[row.row]
        if row.position == 0:
            bases = {0: ZEROS}
        bases = {num: slot for num, slot in bases.items() if num <= row.position}
        assert bases, f"row {row.row} has no state before token {row.position}"
        part = _Part(row, max(bases), row.position + len(row.tokens))
        first, least = part.base - self._history, self._ends[row.row] - self._num_past
        assert row.position == 0 or first >= least, f"row {row.row} has lost token {first}"
        self._bases[row.row], self._ends[row.row] = bases, part.end
        return part

    def _new_slot(self, part: _Part) -> int:
        """For the state at the part's new base: a free one of the row, or the oldest."""
        bases, slots = self._bases[part.row.row], self._slots(part.row.row)
        free = set(slots) - set(bases.values())
        if not free and bases.get(0) == ZEROS:
            del bases[0]
        bases[part.new_base] = slot = min(free) if free else bases.pop(min(bases))
        return slot

    def _keep(self, row: int, num_tokens: int, slot: int) -> None:
        self._copy(self._bases[row][num_tokens], slot)
        places = self._places(row, np.arange(num_tokens - self._history, num_tokens))
        for past in self._past:
            past[self._tail(slot)] = past[places]

    def _copy(self, source: int, destination: int) -> None:
        for states in self._states:
            states[destination] = states[source]

    def _slots(self, row: int) -> range:
        return range(1 + row * self._num_bases, 1 + (row + 1) * self._num_bases)

    def _places(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of inputs of the convolution for these tokens of a row."""
        return row * self._num_past + tokens % self._num_past

    def _tail(self, slot: int) -> slice:
        """Places of the inputs of the convolution for the last tokens of a prefix."""
        first = self._first_kept + (slot - self.free_slots.start) * self._history
        return slice(first, first + self._history)
