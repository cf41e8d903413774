"""Layers with a recurrent state: gated delta nets (Yang et al., arXiv 2412.06464), as operators of
a graph.

Such a layer has a matrix S for each head in place of the keys and values of all tokens:

    S <- exp(g) S,  S <- S + beta (v - S k) k^T,  output = S q

with the token's key k, value v, query q, decay g and step beta. Token by token, this would read and
write each matrix for each token. So tokens are computed in tiles of 8, whose first token is at a
multiple of 8 in its text. Small products give the effect of the tokens of a tile on each other
(section 3.2 there), and S is read and written once for a tile. A pass computes each tile from its
first token on, also if tokens of it were in passes before: so bits do not depend on the pass.
Longer tiles would lose precision: 32 equal tokens gave errors of 10^6.

Keys, values and queries come from a convolution over a token and the three before it. `states`
keeps its inputs for the last tokens of a text.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op

from smartspec_py.engines.checkpoints.recurrent import TILE, StateShapes
from smartspec_py.engines.runtimes.openvino.operators import float_, int_, ints, parameter
from smartspec_py.engines.runtimes.openvino.products import Products

SLOTS, PAST, TAPS, PLACES, KEPT = (
    "state_slots",
    "state_past",
    "state_taps",
    "state_places",
    "state_kept",
)
TILE_TOKENS, TILE_ENDS = "tile_tokens", "tile_ends"
INPUTS = {
    SLOTS: ([-1], np.int64),
    PAST: ([-1], np.int64),
    TAPS: ([-1, -1, -1, TILE], np.int64),
    PLACES: ([-1], np.int64),
    KEPT: ([-1], np.int64),
    TILE_TOKENS: ([-1, -1, 1, TILE, 1], np.float32),
    TILE_ENDS: ([-1, -1, 1, 1, 1], np.float32),
}
"""Shapes and types. A pass has n tiles of each of R rows; tiles that a row does not need are empty.
- SLOTS [R]: where the state before the first tile is.
- PAST: which inputs of the convolution are needed of earlier tokens.
- TAPS [kernel size, n, R, 8]: of each token of a tile, the inputs of the convolution: among those
  of PAST, of the tokens of the pass, and zeros.
- PLACES: of each token of the pass, its place in the tiles.
- KEPT: the tokens whose inputs are a result.
- TILE_TOKENS: 1 for each token of a tile, and 0 where there is none.
- TILE_ENDS: 1 if a tile is whole, so that its state is used for the next one."""

EPS = 1e-6
"""Of the norms of queries and keys, as in Transformers."""


def input_names(num_layers: int) -> list[str]:
    """Of the layers' inputs beside INPUTS: states [slots, heads, key width, value width], which are
    transposed because that is faster, and inputs of the convolution by token, [tokens, width]."""
    return [f"{name}.{i}" for i in range(num_layers) for name in ("states", "past")]


class DeltaNets:
    """The gated delta nets of all layers of a graph. inputs: those that they add to the graph's.
    layers: see `input_names`. results: of each layer, the inputs of the convolution of the tokens
    KEPT, and the states [R, heads, key width, value width] behind the last whole tile."""

    def __init__(self, products: Products, shapes: StateShapes, is_tiled: bool) -> None:
        """is_tiled: see `_repeated`."""
        self._products, self._shapes, self._is_tiled = products, shapes, is_tiled
        self.inputs = {name: parameter(name, *kind) for name, kind in INPUTS.items()}
        names = iter(input_names(shapes.num_layers))
        self.layers = [
            parameter(next(names), [-1, *shape], np.float32)
            for _ in range(shapes.num_layers)
            for shape in (shapes.delta, (shapes.width,))
        ]
        self.results: list[Any] = []
        of_tiles = op.shape_of(self.inputs[TILE_TOKENS])
        self._loops = op.squeeze(op.slice(of_tiles, ints(0), ints(1), ints(1)), int_(0))

    def mixed(self, index: int, name: str, net: Any, normed: Any, silu: Any) -> Any:
        """[1, N, hidden_size]. index: of the layer among those with states. net: of Transformers;
        only its structure is used. silu: makes the operator."""
        states, past = self.layers[2 * index : 2 * index + 2]
        parts = [f"{name}.in_proj_{part}" for part in ("qkv", "b", "a", "z")]
        joined = op.squeeze(self._products.linear(parts, normed), int_(0))
        widths = ints(self._shapes.width, net.value_dim)
        given, gate = op.variadic_split(joined, int_(1), widths).outputs()
        given, not_finite = _finite(given)
        of_tiles = self._heads(name, net, *self._convolved(name, net, given, past, silu))
        out, states_after = self._through_tiles(*of_tiles, states)
        self.results += [op.gather(given, self.inputs[KEPT], int_(0)), states_after]
        by_token = op.reshape(
            op.transpose(out, ints(0, 1, 3, 2, 4)),
            ints(-1, net.num_v_heads, net.head_v_dim),
            special_zero=False,
        )
        own = op.add(op.gather(by_token, self.inputs[PLACES], int_(0)), not_finite)
        return self._products.linear(
            [f"{name}.out_proj"], op.unsqueeze(self._gated(name, net, own, gate, silu), int_(0))
        )

    def _convolved(self, name: str, net: Any, given: Any, past: Any, silu: Any) -> Any:
        """Of all tokens of the tiles, [n, R, 8, width], and what is not convolved."""
        earlier = op.gather(past, self.inputs[PAST], int_(0))
        nothing = op.constant(np.zeros((1, self._shapes.width), np.float32))
        widths = ints(net.conv_dim, 2 * net.num_v_heads)
        known = op.concat([earlier, given, nothing], 0)
        convolved, rest = op.variadic_split(known, int_(1), widths).outputs()
        kernel = self._products.weights.stored(f"{name}.conv1d.weight").float()
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
        return silu(reduce(op.add, of_taps)), op.gather(rest, numbers[-1], int_(0))

    def _heads(self, name: str, net: Any, states: Any, rest: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Queries, keys and values by head, [n, R, heads, 8, width] each, and decay and step of
        each head, [n, R, heads, 8, 1]. states, rest: see `_convolved`."""
        num, each = net.num_v_heads, net.num_v_heads // net.num_k_heads
        widths = ints(net.key_dim, net.key_dim, net.value_dim)
        parts = op.variadic_split(states, int_(-1), widths).outputs()
        queries, keys = (
            self._repeated(_unit(self._by_head(part, net.num_k_heads, net.head_k_dim)), each)
            for part in parts[:2]
        )
        queries = op.multiply(queries, float_(net.head_k_dim**-0.5))
        values = self._by_head(parts[2], num, net.head_v_dim)
        beta, step = op.split(self._by_head(rest, 2 * num, 1), int_(2), 2).outputs()
        rate = -self._products.weights.stored(f"{name}.A_log").float().exp()
        bias = self._products.weights.stored(f"{name}.dt_bias").float()
        rate, bias = (op.constant(each.view(1, 1, num, 1, 1).numpy()) for each in (rate, bias))
        decay = op.multiply(op.softplus(op.add(step, bias)), rate)
        is_there = self.inputs[TILE_TOKENS]
        decay, beta = op.multiply(decay, is_there), op.multiply(op.sigmoid(beta), is_there)
        return queries, keys, values, decay, beta

    def _by_head(self, states: Any, num_heads: int, width: int) -> Any:
        """[n, R, 8, heads * width] -> [n, R, heads, 8, width]"""
        shape = ints(0, 0, 0, num_heads, width)
        return op.transpose(op.reshape(states, shape, special_zero=True), ints(0, 1, 3, 2, 4))

    def _repeated(self, states: Any, num: int) -> Any:
        """[n, R, heads, 8, width] -> [n, R, heads * num, 8, width]: for each head of values. Those
        of GGUF files take the heads of keys in turns."""
        if num == 1:
            return states
        heads = np.arange(states.get_output_partial_shape(0)[2].get_length())
        numbers = np.tile(heads, num) if self._is_tiled else np.repeat(heads, num)
        return op.gather(states, op.constant(numbers), int_(2))

    def _through_tiles(
        self, queries: Any, keys: Any, values: Any, decay: Any, beta: Any, states: Any
    ) -> tuple[Any, Any]:
        """The outputs of all tokens, [n, R, heads, 8, value width], and the states behind the last
        whole tile.

        Of a tile with the state S before it: token t adds u_t k_t^T, and u_t depends on those
        before it. With the decay d_st from token s to t, and c_t from the tile's begin to t,

            u_t = beta_t (v_t - c_t S k_t - sum over s < t of d_st (k_t k_s) u_s)

        is a triangular system, whose inverse (1 + A)^-1 = (1 + A^4) (1 + A^2) (1 - A) does not
        depend on S.
        """
        total = op.cum_sum(decay, int_(3))
        along = op.transpose(total, ints(0, 1, 2, 4, 3))
        between = op.exp(op.minimum(op.subtract(total, along), float_(0.0)))
        lower = np.tril(np.ones((TILE, TILE), np.float32))
        since_begin = op.exp(total)
        by_keys = op.multiply(op.matmul(keys, keys, False, True), between)
        power = op.multiply(
            op.multiply(by_keys, beta), op.constant(np.eye(TILE, dtype="f4") - lower)
        )
        both = op.multiply(op.concat([values, op.multiply(keys, since_begin)], -1), beta)
        num = 1
        while True:
            both = op.add(both, op.matmul(power, both, False, False))
            if (num := 2 * num) == TILE:
                break
            power = op.matmul(power, power, False, False)
        widths = ints(*reversed(self._shapes.delta[1:]))
        own, by_state = op.variadic_split(both, int_(-1), widths).outputs()
        by_queries = op.multiply(op.matmul(queries, keys, False, True), between)
        by_queries = op.multiply(by_queries, op.constant(lower))
        readers = op.concat([by_state, op.multiply(queries, since_begin)], 3)
        ends = self.inputs[TILE_ENDS]
        of_tile = op.multiply(op.slice(total, ints(TILE - 1), ints(TILE), ints(1), ints(3)), ends)
        remaining = op.minimum(op.subtract(of_tile, total), float_(0.0))
        until_end = op.multiply(op.exp(remaining), ends)
        sliced = [readers, own, by_queries, op.multiply(keys, until_end), op.exp(of_tile)]
        return self._loop(op.gather(states, self.inputs[SLOTS], int_(0)), sliced)

    def _loop(self, states: Any, sliced: list[Any]) -> tuple[Any, Any]:
        """One tile of all rows after the other. sliced: readers of the state [n, R, heads, 16, key
        width], the tokens' own u, what outputs take of them, keys times decay, and the tile's."""
        heads, key_width, value_width = self._shapes.delta
        shapes = [
            (2 * TILE, key_width),
            (TILE, value_width),
            (TILE, TILE),
            (TILE, key_width),
            (1, 1),
        ]
        before = op.parameter([-1, heads, key_width, value_width], np.float32)
        given = [op.parameter([1, -1, heads, *shape], np.float32) for shape in shapes]
        readers, own, by_queries, keys, decay = (op.squeeze(each, int_(0)) for each in given)
        read = op.matmul(readers, before, False, False)
        of_state, of_queries = op.split(read, int_(2), 2).outputs()
        added = op.subtract(own, of_state)
        out = op.add(of_queries, op.matmul(by_queries, added, False, False))
        after = op.add(op.multiply(before, decay), op.matmul(keys, added, True, False))
        goes_on = op.constant(np.array(True))
        results = [op.result(each) for each in (goes_on, after, op.unsqueeze(out, int_(0)))]
        loop = op.loop(self._loops, goes_on)
        loop.set_function(ov.Model(results, [before, *given], "tile"))
        loop.set_special_body_ports([-1, 0])
        loop.set_merged_input(before, states.output(0), results[1].input_value(0))
        for inner, outer in zip(given, sliced, strict=True):
            source = outer if isinstance(outer, ov.Output) else outer.output(0)
            loop.set_sliced_input(inner, source, 0, 1, 1, -1, 0)
        outputs = loop.get_concatenated_slices(results[2].input_value(0), 0, 1, 1, -1, 0)
        return outputs, loop.get_iter_value(results[1].input_value(0), -1)

    def _gated(self, name: str, net: Any, out: Any, gate: Any, silu: Any) -> Any:
        """[N, heads * width]: each head's output, [N, heads, width], normed and multiplied."""
        mean = op.reduce_mean(op.power(out, float_(2.0)), ints(-1), keep_dims=True)
        inverse = op.divide(float_(1.0), op.sqrt(op.add(mean, float_(net.layer_norm_epsilon))))
        weight = self._products.stored(self._products.weights.stored(f"{name}.norm.weight"))
        normed = op.multiply(op.multiply(out, inverse), weight)
        flat = op.reshape(normed, ints(0, net.value_dim), special_zero=True)
        return op.multiply(flat, silu(gate))


def _finite(given: Any) -> tuple[Any, Any]:
    """given: [N, width]. The same with zeros for tokens that are not finite, because in products
    with masks one would make all tokens of its tile NaN; and [N, 1, 1]: NaN for such a token, and
    0 for others."""
    not_finite = op.reduce_sum(op.subtract(given, given), ints(1), keep_dims=True)
    kept = op.select(op.equal(not_finite, float_(0.0)), given, float_(0.0))
    return kept, op.unsqueeze(not_finite, int_(2))


def _unit(states: Any) -> Any:
    """Each vector with length 1."""
    length = op.sqrt(
        op.add(op.reduce_sum(op.multiply(states, states), ints(-1), True), float_(EPS))
    )
    return op.divide(states, length)
