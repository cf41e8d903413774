"""A mixture of experts, as operators of a graph.

OpenVINO runs a product of several tokens with their experts as one product of a row and a matrix
for each token and expert. So bits do not depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino.opset15 as op
import openvino.opset17 as op17

from smartspec_py.engines.checkpoints.experts import expert_names
from smartspec_py.engines.runtimes.openvino.operators import int_, ints, parameter
from smartspec_py.engines.runtimes.openvino.products import Products

NUM_TOKENS = "num_tokens"
"""A vector of one number, int64: how many tokens a pass has without its padding. Experts of padding
would be read for nothing. Graphs without experts have no such input."""


def has_experts(mlp: Any) -> bool:
    return hasattr(mlp, "experts")


def has_shared(mlp: Any) -> bool:
    """Whether a mixture has an expert of all tokens."""
    return hasattr(mlp, "shared_expert")


class Experts:
    """The mixtures of all layers of a graph. inputs: those that they add to the graph's."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._num_tokens = parameter(NUM_TOKENS, [1], np.int64)
        self.inputs = {NUM_TOKENS: self._num_tokens}

    def mixed(self, name: str, mlp: Any, normed: Any, activated: Callable[[Any], Any]) -> Any:
        """What the experts give for the tokens, [1, N, hidden_size], and for padding anything.
        name: of the MLP. normed: the MLP's input. activated: of the gate."""
        states = op.squeeze(normed, int_(0))
        shares, experts = self._route(name, mlp.gate, states)
        num_chosen, width = mlp.gate.top_k, mlp.gate.hidden_dim
        order, places, ends = _sorted(experts, mlp.gate.num_experts)
        given = op.gather(states, op.divide(order, ints(num_chosen)), int_(0))
        both = op17.grouped_matmul(given, self._matrices(name, mlp, "gate_up_proj"), ends)
        gate, up = op.split(both, int_(1), 2).outputs()
        inner = op.multiply(op.multiply(activated(gate), up), op.gather(shares, order, int_(0)))
        out = op17.grouped_matmul(inner, self._matrices(name, mlp, "down_proj"), ends)
        by_token = ints(-1, num_chosen, width)
        out = op.reshape(op.gather(out, places, int_(0)), by_token, special_zero=False)
        return self._padded(op.reduce_sum(out, ints(1), keep_dims=False), states)

    def _route(self, name: str, gate: Any, states: Any) -> tuple[Any, Any]:
        """For each token without padding one after the other, the shares of its experts, [n, 1],
        and their numbers, [n]. Their weights are never rounded."""
        weight = self._products.stored(self._products.weights.stored(f"{name}.gate.weight"))
        odds = op.softmax(op.matmul(states, weight, False, True), 1)
        odds = op.slice(odds, ints(0), self._num_tokens, ints(1), ints(0))
        shares, experts = op.topk(odds, int_(gate.top_k), 1, "max", "value").outputs()
        if getattr(gate, "norm_topk_prob", True):
            shares = op.divide(shares, op.reduce_sum(shares, ints(1), keep_dims=True))
        flat = op.reshape(experts, ints(-1), special_zero=False)
        return op.reshape(shares, ints(-1, 1), special_zero=False), flat

    def _matrices(self, name: str, mlp: Any, part: str) -> Any:
        """[num_experts, out, in]"""
        num_experts = mlp.gate.num_experts
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
