"""Layers of LFM2 that convolve in place of attention, as operators of a graph, and their states.

Such a layer adds up, for each channel, gated inputs of a token and the two before it. So its state
is the inputs of the last two tokens. Those of more tokens are kept, so that drafts can be taken
back. Each token is summed in the same order in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from smartspec_py.engines.checkpoints.recurrent import TILE, StateShapes
from smartspec_py.engines.runtimes.openvino.operators import int_, parameter
from smartspec_py.engines.runtimes.openvino.products import Products
from smartspec_py.engines.runtimes.runner import RowInput

PAST, TAPS, KEPT = "conv_past", "conv_taps", "conv_kept"
INPUTS = {PAST: [-1], TAPS: [-1, -1], KEPT: [-1]}
"""Shapes, of int64. A pass has N tokens.
- PAST: which inputs of the convolution are needed of earlier tokens.
- TAPS [kernel size, N]: of each token, the inputs of the convolution: among those of PAST, of the
  tokens of the pass, and zeros.
- KEPT: the tokens whose inputs are a result."""


def input_names(num_layers: int) -> list[str]:
    """Of the layers' inputs beside INPUTS: those of the convolution by token, [tokens, width]."""
    return [f"conv_inputs.{i}" for i in range(num_layers)]


class ShortConvs:
    """The convolutions of all layers of a graph. inputs: those that they add to the graph's.
    layers: see `input_names`. results: of each layer, the inputs of the convolution of the tokens
    KEPT."""

    def __init__(self, products: Products, shapes: StateShapes) -> None:
        self._products, self._shapes = products, shapes
        self.inputs = {name: parameter(name, shape, np.int64) for name, shape in INPUTS.items()}
        self.layers = [
            parameter(name, [-1, shapes.width], np.float32)
            for name in input_names(shapes.num_layers)
        ]
        self.results: list[Any] = []

    def mixed(self, index: int, name: str, conv: Any, normed: Any) -> Any:
        """[1, N, hidden_size]. index: of the layer among those that convolve. conv: of
        Transformers; only its structure is used."""
        joined = op.squeeze(self._products.linear([f"{name}.in_proj"], normed), int_(0))
        before, behind, states = op.split(joined, int_(1), 3).outputs()
        given = op.multiply(before, states)
        self.results.append(op.gather(given, self.inputs[KEPT], int_(0)))
        earlier = op.gather(self.layers[index], self.inputs[PAST], int_(0))
        nothing = op.constant(np.zeros((1, self._shapes.width), np.float32))
        known = op.concat([earlier, given, nothing], 0)
        kernel = self._products.weights.stored(f"{name}.conv.weight").float()
        of_taps = [
            op.multiply(
                op.gather(known, op.gather(self.inputs[TAPS], int_(i), int_(0)), int_(0)),
                op.constant(kernel[:, 0, i].contiguous().numpy()),
            )
            for i in range(self._shapes.kernel_size)
        ]
        out = reduce(op.add, of_taps)
        if conv.conv.bias is not None:
            bias = self._products.weights.stored(f"{name}.conv.bias")
            out = op.add(out, self._products.stored(bias))
        out = op.unsqueeze(op.multiply(behind, out), int_(0))
        return self._products.linear([f"{name}.out_proj"], out)


class ConvStates:
    """The last inputs of the convolutions of all rows, and those behind cached prefixes: see
    `StateStore`. Not thread-safe."""

    step = TILE

    def __init__(self, shapes: StateShapes, num_rows: int, num_back: int, num_kept: int) -> None:
        """num_back: tokens that can be taken back. num_kept: prefixes."""
        self._history, self._num_past = shapes.num_before, shapes.num_past(num_back)
        self.free_slots = range(num_kept)
        self._first_kept = num_rows * self._num_past
        size = self._first_kept + num_kept * self._history, shapes.width
        names = input_names(shapes.num_layers)
        self.tensors = {name: ov.Tensor(np.zeros(size, np.float32)) for name in names}
        self._past = [self.tensors[name].data for name in names]
        self._rows: Sequence[RowInput] = ()

    def release(self) -> None:
        """Nothing: they are small."""

    def pretend(self, num_rows: int, num_tokens: int) -> None:
        """Nothing: any inputs do for passes that are timed."""

    def load(self, slot: int, row: int, num_tokens: int) -> None:
        """See `StateStore`."""
        for past in self._past:
            past[self._last(row, num_tokens)] = past[self._tail(slot)]

    def begin(
        self, rows: Sequence[RowInput], lens: Sequence[int], num_tokens: int
    ) -> dict[str, NDArray[Any]]:
        """The inputs of a pass. lens: tokens of each row in the pass; one more than the row has if
        the last is a copy, see `parts.with_copy`. num_tokens: of the pass, with padding."""
        self._rows = rows
        past = [np.arange(max(0, row.position - self._history), row.position) for row in rows]
        num_past = sum(map(len, past))
        nothing = num_past + num_tokens
        taps = np.full((self._history + 1, num_tokens), nothing)
        first_past = first = 0
        kept: list[int] = []
        for row, own, num in zip(rows, past, lens, strict=True):
            sources = np.concatenate(
                [
                    np.full(self._history - len(own), nothing),
                    first_past + np.arange(len(own)),
                    num_past + first + np.arange(num),
                ]
            )
            taps[:, first : first + num] = sliding_window_view(sources, self._history + 1).T
            num_new = len(row.tokens)
            kept += range(first + max(0, num_new - self._num_past), first + num_new)
            first_past, first = first_past + len(own), first + num
        places = [self._places(row.row, own) for row, own in zip(rows, past, strict=True)]
        given = {PAST: np.concatenate(places), TAPS: taps, KEPT: kept}
        return {name: np.asarray(numbers, np.int64) for name, numbers in given.items()}

    def finish(self, results: Sequence[NDArray[Any]]) -> None:
        """Keep what a pass gave: see `ShortConvs`."""
        places = np.concatenate(
            [self._places(row.row, np.array(row.slots[-self._num_past :])) for row in self._rows]
        )
        for past, given in zip(self._past, results, strict=True):
            past[places] = given
        for row in self._rows:
            if row.kept_state is not None:
                num_tokens, slot = row.kept_state
                for past in self._past:
                    past[self._tail(slot)] = past[self._last(row.row, num_tokens)]

    def _last(self, row: int, num_tokens: int) -> NDArray[np.int64]:
        """Places of the inputs that the next token needs."""
        return self._places(row, np.arange(num_tokens - self._history, num_tokens))

    def _places(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the inputs for these tokens of a row."""
        return row * self._num_past + tokens % self._num_past

    def _tail(self, slot: int) -> slice:
        """Places of the inputs for the last tokens of a prefix."""
        first = self._first_kept + slot * self._history
        return slice(first, first + self._history)
