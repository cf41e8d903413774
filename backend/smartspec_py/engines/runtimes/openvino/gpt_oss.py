"""What layers of gpt-oss have beside those of the other models: a linear layer with a bias that
chooses experts, and another way to join gate and up. Its experts have biases, see `experts`, and
its heads sinks, see `attention`."""

from __future__ import annotations

from typing import Any

import openvino.opset15 as op

from smartspec_py.engines.runtimes.openvino.experts import Routed
from smartspec_py.engines.runtimes.openvino.graph import DecoderGraph, scaled
from smartspec_py.engines.runtimes.openvino.operators import float_


class GptOssGraph(DecoderGraph):
    """Builds the graph of a gpt-oss."""

    def _routed(self, name: str, mlp: Any, normed: Any) -> Routed:
        router = mlp.router
        weight = f"{name}.router.weight"
        return self.experts.routed(weight, normed, router.num_experts, router.top_k)

    def _gated(self, gate: Any, up: Any) -> Any:
        limit = self.config.swiglu_limit
        gate, up = op.minimum(gate, float_(limit)), op.clamp(up, -limit, limit)
        chosen = op.sigmoid(scaled(gate, self.config.swiglu_alpha))
        return op.multiply(op.multiply(gate, chosen), op.add(up, float_(1.0)))
