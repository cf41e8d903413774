"""The state layers of Mamba 2 (Dao and Gu, arXiv 2405.21060), see `recurrent`, with

    S <- exp(g) S,  S <- S + dt x B^T,  output = S C + D x

of a token's x, B, C, step dt and decay g = dt A. Section 6 there has the products of a tile. B and
C are those of a group of heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino.opset15 as op

from smartspec_py.engines.checkpoints.recurrent import TILE
from smartspec_py.engines.runtimes.openvino.operators import float_, int_, ints
from smartspec_py.engines.runtimes.openvino.recurrent import TILE_TOKENS, TiledNets


class Mamba2(TiledNets):
    """The layers of Mamba 2 of a graph."""

    def _given(self, name: str, net: Any, normed: Any) -> Sequence[Any]:
        joined = op.squeeze(self._products.linear([f"{name}.in_proj"], normed), int_(0))
        widths = ints(net.intermediate_size, self._shapes.width)
        gate, given = op.variadic_split(joined, int_(1), widths).outputs()
        return given, gate

    def _through_tiles(
        self, name: str, net: Any, convolved: Any, rest: Any, states: Any
    ) -> tuple[Any, Any]:
        heads, key_width, width = self._shapes.delta
        of_group = net.n_groups * key_width
        widths = ints(net.intermediate_size, of_group, of_group)
        given, *of_groups = op.variadic_split(convolved, int_(-1), widths).outputs()
        values = self._by_head(given, heads, width)
        keys, queries = (self._of_groups(each, net.n_groups) for each in of_groups)
        steps = self._steps(name, self._by_head(rest, heads, 1))
        least, most = net.time_step_limit or (0.0, math.inf)
        if least > 0 or most < math.inf:
            steps = op.clamp(steps, least, min(most, float(np.finfo(np.float32).max)))
        steps = op.multiply(steps, self.inputs[TILE_TOKENS])
        decays = self._decays(name, steps)
        added = op.multiply(values, steps)
        by_queries = op.multiply(op.matmul(queries, keys, False, True), decays.between)
        own = op.matmul(by_queries, added, False, False)
        skipped = op.multiply(values, self._of_heads(self._float(f"{name}.D")))
        num_keys = 1 if net.n_groups == 1 else heads
        until_end = op.multiply(added, decays.until_end)
        of_tiles = [
            queries,
            keys,
            until_end,
            decays.whole,
            decays.since_begin,
            op.add(own, skipped),
        ]
        shapes = [
            (num_keys, TILE, key_width),
            (num_keys, TILE, key_width),
            (heads, TILE, width),
            (heads, 1, 1),
            (heads, TILE, 1),
            (heads, TILE, width),
        ]
        return self._outputs(states, of_tiles, shapes, _of_tile)

    def _of_groups(self, states: Any, num_groups: int) -> Any:
        """[T, 8, groups * width] -> [T, heads, 8, width]; of one group only once, because products
        repeat it."""
        heads, width, _ = self._shapes.delta
        by_group = self._by_head(states, num_groups, width)
        if num_groups == 1:
            return by_group
        numbers = np.repeat(np.arange(num_groups), heads // num_groups)
        return op.gather(by_group, op.constant(numbers), int_(1))

    def _gated(self, name: str, net: Any, out: Any, gate: Any, silu: Any) -> Any:
        """The norm is that of a group of heads."""
        width = net.intermediate_size
        flat = op.reshape(out, ints(-1, width), special_zero=False)
        gated = op.reshape(
            op.multiply(flat, silu(gate)), ints(-1, net.n_groups, width // net.n_groups), False
        )
        mean = op.reduce_mean(op.power(gated, float_(2.0)), ints(-1), keep_dims=True)
        inverse = op.divide(float_(1.0), op.sqrt(op.add(mean, float_(net.norm.variance_epsilon))))
        normed = op.reshape(op.multiply(gated, inverse), ints(-1, width), special_zero=False)
        return op.multiply(normed, op.constant(self._float(f"{name}.norm.weight").numpy()))


def _of_tile(
    before: Any, queries: Any, keys: Any, added: Any, decay: Any, since_begin: Any, own: Any
) -> tuple[Any, Any]:
    """See `TiledNets._outputs`. added: times the decay until the tile's end. decay: of the tile.
    since_begin: decay until each token. own: of the outputs, what does not depend on the state."""
    read = op.multiply(op.matmul(queries, before, False, False), since_begin)
    after = op.add(op.multiply(before, decay), op.matmul(keys, added, True, False))
    return after, op.add(read, own)
