"""Layers with a recurrent state, as operators of a graph.

Such a layer has a matrix S for each head in place of the keys and values of all tokens. Each token
changes it, and reads its output from it: see `delta_nets` and `mamba2`. Token by token, this would
read and write each matrix for each token. So tokens are computed in tiles of 8, whose first token
is at a multiple of 8 in its text. Small products give the effect of the tokens of a tile on each
other, and S is read and written once for a tile. A pass computes each tile from its first token on,
also if tokens of it were in passes before: so bits do not depend on the pass.

What a layer reads comes from a convolution over a token and the three before it. `states` keeps its
inputs for the last tokens of a text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino.opset15 as op
import torch

from smartspec_py.engines.checkpoints.recurrent import TILE, StateShapes
from smartspec_py.engines.runtimes.openvino.operators import float_, int_, ints, parameter
from smartspec_py.engines.runtimes.openvino.products import Products

SLOTS, LOOPED, ALONE_SLOTS, ALONE = "state_slots", "looped_tiles", "alone_slots", "alone_tiles"
PAST, TAPS, PLACES, KEPT = "state_past", "state_taps", "state_places", "state_kept"
TILE_TOKENS, TILE_ENDS = "tile_tokens", "tile_ends"
INPUTS = {
    SLOTS: ([-1], np.int64),
    LOOPED: ([-1, -1], np.int64),
    ALONE_SLOTS: ([-1], np.int64),
    ALONE: ([-1], np.int64),
    PAST: ([-1], np.int64),
    TAPS: ([-1, -1, TILE], np.int64),
    PLACES: ([-1], np.int64),
    KEPT: ([-1], np.int64),
    TILE_TOKENS: ([-1, 1, TILE, 1], np.float32),
    TILE_ENDS: ([-1, 1, 1, 1], np.float32),
}
"""Shapes and types. A pass has T tiles, the last of which is empty. R rows have whole tiles. The
others have one tile each, which does not change their state: of 8 passes of one token, 7.
- SLOTS [R]: where the state before the first tile is.
- LOOPED [n, R]: the tiles of these rows, one after the other, and then the empty one.
- ALONE_SLOTS, ALONE: of each other row, where its state is, and its tile.
- PAST: which inputs of the convolution are needed of earlier tokens.
- TAPS [kernel size, T, 8]: of each token of a tile, the inputs of the convolution: among those of
  PAST, of the tokens of the pass, and zeros.
- PLACES: of each token of the pass, its place in the tiles of LOOPED, and those of ALONE after
  them.
- KEPT: the tokens whose inputs are a result.
- TILE_TOKENS [T, ..]: 1 for each token of a tile, and 0 where there is none.
- TILE_ENDS [T, ..]: 1 if a tile is whole, so that its state is used for the next one."""


def input_names(num_layers: int) -> list[str]:
    """Of the layers' inputs beside INPUTS: states [slots, heads, key width, value width], which are
    transposed because that is faster, and inputs of the convolution by token, [tokens, width]."""
    return [f"{name}.{i}" for i in range(num_layers) for name in ("states", "past")]


class Decays(NamedTuple):
    """By how much the state decays in a tile, by head. since_begin: until each token, [T, heads, 8,
    1]. between: until the token of a row after that of a column, [T, heads, 8, 8]; 0 if that comes
    later. until_end: of the tile, after each token; 0 if the tile is not whole. whole: in the
    tile, [T, heads, 1, 1]; 1 if it is not whole."""

    since_begin: Any
    between: Any
    until_end: Any
    whole: Any


class TiledNets(ABC):
    """The layers with states of a graph. inputs: those that they add to the graph's. layers: see
    `input_names`. results: of each layer, the inputs of the convolution of the tokens KEPT, and the
    states [R, heads, key width, value width] behind the last whole tile."""

    def __init__(self, products: Products, shapes: StateShapes) -> None:
        self._products, self._shapes = products, shapes
        self.inputs = {name: parameter(name, *kind) for name, kind in INPUTS.items()}
        names = iter(input_names(shapes.num_layers))
        self.layers = [
            parameter(next(names), [-1, *shape], np.float32)
            for _ in range(shapes.num_layers)
            for shape in (shapes.delta, (shapes.width,))
        ]
        self.results: list[Any] = []
        of_tiles = op.shape_of(self.inputs[LOOPED])
        self._loops = op.squeeze(op.slice(of_tiles, ints(0), ints(1), ints(1)), int_(0))

    def mixed(self, index: int, name: str, net: Any, normed: Any, silu: Any) -> Any:
        """[1, N, hidden_size]. index: of the layer among those with states. net: of Transformers;
        only its structure is used. silu: makes the operator."""
        states, past = self.layers[2 * index : 2 * index + 2]
        num_heads, _, width = self._shapes.delta
        given, gate = self._given(name, net, normed)
        given, not_finite = _finite(given)
        convolved, rest = self._convolved(name, net, given, past, silu)
        out, states_after = self._through_tiles(name, net, convolved, rest, states)
        self.results += [op.gather(given, self.inputs[KEPT], int_(0)), states_after]
        by_token = op.reshape(
            op.transpose(out, ints(0, 2, 1, 3)),
            ints(-1, num_heads, width),
            special_zero=False,
        )
        own = op.add(op.gather(by_token, self.inputs[PLACES], int_(0)), not_finite)
        return self._products.linear(
            [f"{name}.out_proj"], op.unsqueeze(self._gated(name, net, own, gate, silu), int_(0))
        )

    @abstractmethod
    def _given(self, name: str, net: Any, normed: Any) -> Sequence[Any]:
        """What is kept of each token, [N, width], of which the first part is convolved; and the
        gate of its output, [N, heads * value width]."""

    @abstractmethod
    def _through_tiles(
        self, name: str, net: Any, convolved: Any, rest: Any, states: Any
    ) -> tuple[Any, Any]:
        """The outputs of the tiles of LOOPED and ALONE, [n * R + .., heads, 8, value width], and
        the states behind the last whole tile. convolved, rest: see `_convolved`. states: of all
        slots."""

    @abstractmethod
    def _gated(self, name: str, net: Any, out: Any, gate: Any, silu: Any) -> Any:
        """[N, heads * value width]: the outputs of the heads, [N, heads, value width], normed and
        multiplied."""

    def _convolved(self, name: str, net: Any, given: Any, past: Any, silu: Any) -> tuple[Any, Any]:
        """Of all tokens of the tiles, [T, 8, width], and what is not convolved."""
        earlier = op.gather(past, self.inputs[PAST], int_(0))
        nothing = op.constant(np.zeros((1, self._shapes.width), np.float32))
        widths = ints(net.conv_dim, self._shapes.width - net.conv_dim)
        known = op.concat([earlier, given, nothing], 0)
        convolved, rest = op.variadic_split(known, int_(1), widths).outputs()
        kernel = self._float(f"{name}.conv1d.weight")
        numbers = [
            op.gather(self.inputs[TAPS], int_(i), int_(0)) for i in range(self._shapes.kernel_size)
        ]
        of_taps = [
            op.multiply(
                op.gather(convolved, tap, int_(0)),
                op.constant(kernel[:, 0, i].contiguous().numpy()),
            )
            for i, tap in enumerate(numbers)
        ]
        out = reduce(op.add, of_taps)
        if net.conv1d.bias is not None:
            out = op.add(out, op.constant(self._float(f"{name}.conv1d.bias").numpy()))
        return silu(out), op.gather(rest, numbers[-1], int_(0))

    def _decays(self, name: str, steps: Any) -> Decays:
        """steps: [T, heads, 8, 1], 0 where there is no token."""
        rates = self._of_heads(-self._float(f"{name}.A_log").exp())
        total = op.cum_sum(op.multiply(steps, rates), int_(2))
        along = op.transpose(total, ints(0, 1, 3, 2))
        between = op.exp(op.minimum(op.subtract(total, along), float_(0.0)))
        lower = np.tril(np.ones((TILE, TILE), np.float32))
        ends = self.inputs[TILE_ENDS]
        of_tile = op.multiply(op.slice(total, ints(TILE - 1), ints(TILE), ints(1), ints(2)), ends)
        remaining = op.minimum(op.subtract(of_tile, total), float_(0.0))
        return Decays(
            op.exp(total),
            op.multiply(between, op.constant(lower)),
            op.multiply(op.exp(remaining), ends),
            op.exp(of_tile),
        )

    def _steps(self, name: str, given: Any) -> Any:
        """given: [T, heads, 8, 1]. Returns the same shape."""
        return op.softplus(op.add(given, self._of_heads(self._float(f"{name}.dt_bias"))))

    def _float(self, name: str) -> torch.Tensor:
        return self._products.weights.stored(name).float()

    def _of_heads(self, numbers: torch.Tensor) -> Any:
        """[heads] -> [1, heads, 1, 1]"""
        return op.constant(numbers.view(1, -1, 1, 1).numpy())

    def _by_head(self, states: Any, num_heads: int, width: int) -> Any:
        """[T, 8, heads * width] -> [T, heads, 8, width]"""
        shape = ints(0, 0, num_heads, width)
        return op.transpose(op.reshape(states, shape, special_zero=True), ints(0, 2, 1, 3))

    def _outputs(
        self,
        states: Any,
        of_tiles: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
        of_tile: Callable[..., tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        """See `_through_tiles`. of_tiles: what a tile reads, [T, *shape] each. of_tile: takes the
        states before tiles of several rows and their part of these, and returns the states after
        them and the outputs of their tokens."""
        alone = [op.gather(each, self.inputs[ALONE], int_(0)) for each in of_tiles]
        of_alone = op.gather(states, self.inputs[ALONE_SLOTS], int_(0))
        _, out_alone = of_tile(of_alone, *alone)
        looped = [op.gather(each, self.inputs[LOOPED], int_(0)) for each in of_tiles]
        before = op.gather(states, self.inputs[SLOTS], int_(0))
        out, after = self._loop(before, looped, shapes, of_tile)
        heads, _, width = self._shapes.delta
        out = op.reshape(out, ints(-1, heads, TILE, width), special_zero=False)
        return op.concat([out, out_alone], 0), after

    def _loop(
        self,
        states: Any,
        looped: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
        of_tile: Callable[..., tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        """One tile of all rows after the other: the outputs, [n, R, ..], and the last states.
        states: before the first tile. looped: see `_outputs`, [n, R, *shape] each."""
        before = op.parameter([-1, *self._shapes.delta], np.float32)
        given = [op.parameter([1, -1, *shape], np.float32) for shape in shapes]
        after, out = of_tile(before, *(op.squeeze(each, int_(0)) for each in given))
        goes_on = op.constant(np.array(True))
        results = [op.result(each) for each in (goes_on, after, op.unsqueeze(out, int_(0)))]
        loop = op.loop(self._loops, goes_on)
        loop.set_function(ov.Model(results, [before, *given], "tile"))
        loop.set_special_body_ports([-1, 0])
        loop.set_merged_input(before, states.output(0), results[1].input_value(0))
        for inner, outer in zip(given, looped, strict=True):
            loop.set_sliced_input(inner, outer.output(0), 0, 1, 1, -1, 0)
        outputs = loop.get_concatenated_slices(results[2].input_value(0), 0, 1, 1, -1, 0)
        return outputs, loop.get_iter_value(results[1].input_value(0), -1)


def _finite(given: Any) -> tuple[Any, Any]:
    """given: [N, width]. The same with zeros for tokens that are not finite, because in products
    with masks one would make all tokens of its tile NaN; and [N, 1, 1]: NaN for such a token, and
    0 for others."""
    not_finite = op.reduce_sum(op.subtract(given, given), ints(1), keep_dims=True)
    kept = op.select(op.equal(not_finite, float_(0.0)), given, float_(0.0))
    return kept, op.unsqueeze(not_finite, int_(2))
