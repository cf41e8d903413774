"""A mixture of experts, as operators of a graph.

OpenVINO runs a product of several tokens with their experts as one product of a row and a matrix
for each token and expert. So bits do not depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import openvino.opset15 as op
import openvino.opset17 as op17

from smartspec_py.engines.checkpoints.experts import PARTS, bias_names, expert_names
from smartspec_py.engines.runtimes.openvino.operators import float_, int_, ints, parameter
from smartspec_py.engines.runtimes.openvino.products import Products

NUM_TOKENS = "num_tokens"
"""A vector of one number, int64: how many tokens a pass has without its padding. Experts of padding
would be read for nothing. Graphs without experts have no such input."""

EPS = 1e-6


def has_shared(mlp: Any) -> bool:
    """Whether a mixture has an expert of all tokens."""
    return hasattr(mlp, "shared_expert")


class Routed(NamedTuple):
    """The experts of each token without padding, one token after the other. experts: their numbers,
    [n]. shares: of each expert in what the token gets, [n, 1]. num_chosen: of each token."""

    experts: Any
    shares: Any
    num_experts: int
    num_chosen: int


class Experts:
    """The mixtures of all layers of a graph. inputs: those that they add to the graph's."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._num_tokens = parameter(NUM_TOKENS, [1], np.int64)
        self.inputs = {NUM_TOKENS: self._num_tokens}

    def mixed(
        self, name: str, normed: Any, routed: Routed, gated: Callable[[Any, Any], Any]
    ) -> Any:
        """What the experts give for the tokens, [1, N, hidden_size], and for padding anything.
        name: of what has the experts. normed: their input. gated: of gate and up, what they are
        together."""
        states = op.squeeze(normed, int_(0))
        num_chosen, width = routed.num_chosen, states.get_output_partial_shape(0)[1].get_length()
        order, places, ends = _sorted(routed.experts, routed.num_experts)
        given = op.gather(states, op.divide(order, ints(num_chosen)), int_(0))
        experts, shares = (op.gather(each, order, int_(0)) for each in routed[:2])
        of_input, of_inner = (self._matrices(name, routed.num_experts, part) for part in PARTS)
        both = op17.grouped_matmul(given, of_input, ends)
        if (bias := self._biases(name, "gate_up_proj", experts)) is not None:
            both = op.add(both, bias)
        inner = op.multiply(gated(*op.split(both, int_(1), 2).outputs()), shares)
        out = op17.grouped_matmul(inner, of_inner, ends)
        if (bias := self._biases(name, "down_proj", experts)) is not None:
            out = op.add(out, op.multiply(bias, shares))
        by_token = ints(-1, num_chosen, width)
        out = op.reshape(op.gather(out, places, int_(0)), by_token, special_zero=False)
        return self._padded(op.reduce_sum(out, ints(1), keep_dims=False), states)

    def routed(
        self,
        name: str,
        states: Any,
        num_experts: int,
        num_chosen: int,
        *,
        is_normed: bool = True,
        factors: str | None = None,
        bias: str | None = None,
        is_sigmoid: bool = False,
    ) -> Routed:
        """name: of the weight [num_experts, hidden_size], which is never rounded. states: [1, N,
        hidden_size]. is_normed: whether the shares of a token are divided by their sum. factors:
        name of a vector by which they are multiplied then, one number for each expert. bias: of a
        vector that is added to the scores for the choice alone. is_sigmoid: whether the scores do
        not depend on each other, as those of LFM2, which divides by a little more than the sum."""
        odds = op.matmul(op.squeeze(states, int_(0)), self._stored(name), False, True)
        of_router = name.removesuffix("weight") + "bias"
        if of_router in self._products.weights.tensors:
            odds = op.add(odds, self._stored(of_router))
        odds = op.sigmoid(odds) if is_sigmoid else op.softmax(odds, 1)
        odds = op.slice(odds, ints(0), self._num_tokens, ints(1), ints(0))
        scores = odds if bias is None else op.add(odds, self._stored(bias))
        shares, experts = op.topk(scores, int_(num_chosen), 1, "max", "value").outputs()
        if bias is not None:
            # From the scores: with a second use of the odds, OpenVINO 2026.4 leaves out the slice.
            shares = op.subtract(shares, op.gather(self._stored(bias), experts, int_(0)))
        if is_normed:
            total = op.reduce_sum(shares, ints(1), keep_dims=True)
            shares = op.divide(shares, op.add(total, float_(EPS)) if is_sigmoid else total)
        flat = op.reshape(experts, ints(-1), special_zero=False)
        if factors is not None:
            shares = op.multiply(shares, op.gather(self._stored(factors), experts, int_(0)))
        shares = op.reshape(shares, ints(-1, 1), special_zero=False)
        return Routed(flat, shares, num_experts, num_chosen)

    def _biases(self, name: str, part: str, experts: Any) -> Any:
        """Of this part of these experts, [n, out]; None if there are none."""
        names = bias_names(name, part)
        if names[0] not in self._products.weights.tensors:
            return None
        biases = [op.gather(self._stored(each), experts, int_(0)) for each in names]
        return biases[0] if len(biases) == 1 else op.concat(biases, 1)

    def _stored(self, name: str) -> Any:
        return self._products.stored(self._products.weights.stored(name))

    def _matrices(self, name: str, num_experts: int, part: str) -> Any:
        """[num_experts, out, in]"""
        names = [each for i in range(num_experts) for each in expert_names(name, i, part)]
        return self._products.stacked(names, num_experts)

    def _padded(self, states: Any, like: Any) -> Any:
        """states: of the tokens without padding, [n, hidden_size]. like: of all, [N, ...]. Returns
        [1, N, hidden_size], where padding has the last token's."""
        all_tokens = op.range(
            int_(0), op.gather(op.shape_of(like), int_(0), int_(0)), int_(1), "i64"
        )
        rows = op.minimum(all_tokens, op.subtract(self._num_tokens, ints(1)))
        return op.unsqueeze(op.gather(states, rows, int_(0)), int_(0))


def _sorted(experts: Any, num_experts: int) -> tuple[Any, Any, Any]:
    """experts: [n]. The order in which they are sorted, the place of each in it, and the end of
    each expert's part. By counting: OpenVINO's sorting takes n^2 steps."""
    is_one = op.one_hot(experts, int_(num_experts), int_(1), int_(0), -1)
    counts = op.reduce_sum(is_one, ints(0), keep_dims=False)
    ends = op.cum_sum(counts, int_(0))
    first = op.gather(op.subtract(ends, counts), experts, int_(0))
    before = op.cum_sum(is_one, int_(0), exclusive=True)
    places = op.add(first, op.reduce_sum(op.multiply(is_one, before), ints(1), keep_dims=False))
    numbers = op.range(int_(0), op.squeeze(op.shape_of(experts), int_(0)), int_(1), "i64")
    order = op.scatter_elements_update(numbers, places, numbers, int_(0))
    return order, places, op.convert(ends, "i32")
