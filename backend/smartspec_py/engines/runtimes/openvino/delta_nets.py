"""Gated delta nets (Yang et al., arXiv 2412.06464): layers with a recurrent state, see `recurrent`,
with

    S <- exp(g) S,  S <- S + beta (v - S k) k^T,  output = S q

of a token's key k, value v, query q, decay g and step beta. Section 3.2 there has the products of a
tile. Tiles longer than 8 would lose precision: 32 equal tokens gave errors of 10^6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino.opset15 as op

from smartspec_py.engines.checkpoints.recurrent import TILE, StateShapes
from smartspec_py.engines.runtimes.openvino.operators import float_, int_, ints
from smartspec_py.engines.runtimes.openvino.products import Products
from smartspec_py.engines.runtimes.openvino.recurrent import TILE_TOKENS, Decays, TiledNets

EPS = 1e-6
"""Of the norms of queries and keys, as in Transformers."""


class DeltaNets(TiledNets):
    """The gated delta nets of all layers of a graph."""

    def __init__(self, products: Products, shapes: StateShapes, is_tiled: bool) -> None:
        """is_tiled: see `_repeated`."""
        super().__init__(products, shapes)
        self._is_tiled = is_tiled

    def _given(self, name: str, net: Any, normed: Any) -> Sequence[Any]:
        parts = [f"{name}.in_proj_{part}" for part in ("qkv", "b", "a", "z")]
        joined = op.squeeze(self._products.linear(parts, normed), int_(0))
        widths = ints(self._shapes.width, net.value_dim)
        return op.variadic_split(joined, int_(1), widths).outputs()  # type: ignore[no-any-return]

    def _through_tiles(
        self, name: str, net: Any, convolved: Any, rest: Any, states: Any
    ) -> tuple[Any, Any]:
        """Of a tile with the state S before it: token t adds u_t k_t^T, and u_t depends on those
        before it. With the decay d_st from token s to t, and c_t from the tile's begin to t,

            u_t = beta_t (v_t - c_t S k_t - sum over s < t of d_st (k_t k_s) u_s)

        is a triangular system, whose inverse (1 + A)^-1 = (1 + A^4) (1 + A^2) (1 - A) does not
        depend on S.
        """
        queries, keys, values, beta, decays = self._heads(name, net, convolved, rest)
        by_keys = op.multiply(op.matmul(keys, keys, False, True), decays.between)
        below = op.constant(-np.tril(np.ones((TILE, TILE), np.float32), -1))
        power = op.multiply(op.multiply(by_keys, beta), below)
        both = op.multiply(op.concat([values, op.multiply(keys, decays.since_begin)], -1), beta)
        num = 1
        while True:
            both = op.add(both, op.matmul(power, both, False, False))
            if (num := 2 * num) == TILE:
                break
            power = op.matmul(power, power, False, False)
        widths = ints(*reversed(self._shapes.delta[1:]))
        own, by_state = op.variadic_split(both, int_(-1), widths).outputs()
        by_queries = op.multiply(op.matmul(queries, keys, False, True), decays.between)
        readers = op.concat([by_state, op.multiply(queries, decays.since_begin)], 2)
        until_end = op.multiply(keys, decays.until_end)
        of_tiles = [readers, own, by_queries, until_end, decays.whole]
        heads, key_width, value_width = self._shapes.delta
        shapes = [
            (heads, 2 * TILE, key_width),
            (heads, TILE, value_width),
            (heads, TILE, TILE),
            (heads, TILE, key_width),
            (heads, 1, 1),
        ]
        return self._outputs(states, of_tiles, shapes, _of_tile)

    def _heads(
        self, name: str, net: Any, states: Any, rest: Any
    ) -> tuple[Any, Any, Any, Any, Decays]:
        """Queries, keys and values by head, [T, heads, 8, width] each, the step beta of each head,
        [T, heads, 8, 1], and decays. states, rest: see `_convolved`."""
        num, each = net.num_v_heads, net.num_v_heads // net.num_k_heads
        widths = ints(net.key_dim, net.key_dim, net.value_dim)
        parts = op.variadic_split(states, int_(-1), widths).outputs()
        queries, keys = (
            self._repeated(_unit(self._by_head(part, net.num_k_heads, net.head_k_dim)), each)
            for part in parts[:2]
        )
        queries = op.multiply(queries, float_(net.head_k_dim**-0.5))
        values = self._by_head(parts[2], num, net.head_v_dim)
        beta, step = op.split(self._by_head(rest, 2 * num, 1), int_(1), 2).outputs()
        is_there = self.inputs[TILE_TOKENS]
        decays = self._decays(name, op.multiply(self._steps(name, step), is_there))
        return queries, keys, values, op.multiply(op.sigmoid(beta), is_there), decays

    def _repeated(self, states: Any, num: int) -> Any:
        """[T, heads, 8, width] -> [T, heads * num, 8, width]: for each head of values. Those
        of GGUF files take the heads of keys in turns."""
        if num == 1:
            return states
        heads = np.arange(states.get_output_partial_shape(0)[1].get_length())
        numbers = np.tile(heads, num) if self._is_tiled else np.repeat(heads, num)
        return op.gather(states, op.constant(numbers), int_(1))

    def _gated(self, name: str, net: Any, out: Any, gate: Any, silu: Any) -> Any:
        mean = op.reduce_mean(op.power(out, float_(2.0)), ints(-1), keep_dims=True)
        inverse = op.divide(float_(1.0), op.sqrt(op.add(mean, float_(net.layer_norm_epsilon))))
        weight = self._products.stored(self._products.weights.stored(f"{name}.norm.weight"))
        normed = op.multiply(op.multiply(out, inverse), weight)
        flat = op.reshape(normed, ints(0, net.value_dim), special_zero=True)
        return op.multiply(flat, silu(gate))


def _of_tile(
    before: Any, readers: Any, own: Any, by_queries: Any, keys: Any, decay: Any
) -> tuple[Any, Any]:
    """See `TiledNets._outputs`. readers: of the state, for u and for the outputs. own: of u, what
    does not depend on the state. by_queries: what outputs take of u. keys: times the decay until
    the tile's end. decay: of the tile."""
    read = op.matmul(readers, before, False, False)
    of_state, of_queries = op.split(read, int_(2), 2).outputs()
    added = op.subtract(own, of_state)
    out = op.add(of_queries, op.matmul(by_queries, added, False, False))
    return op.add(op.multiply(before, decay), op.matmul(keys, added, True, False)), out


def _unit(states: Any) -> Any:
    """Each vector with length 1."""
    length = op.sqrt(
        op.add(op.reduce_sum(op.multiply(states, states), ints(-1), True), float_(EPS))
    )
    return op.divide(states, length)
