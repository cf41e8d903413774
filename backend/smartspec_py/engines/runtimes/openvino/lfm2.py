"""What layers of LFM2 have beside those of the other models: other names, convolutions in place of
some attentions, see `short_convs`, and another way to choose experts."""

from __future__ import annotations

from typing import Any

from smartspec_py.engines.checkpoints.experts import EXPERT_BIAS
from smartspec_py.engines.checkpoints.recurrent import StateShapes
from smartspec_py.engines.runtimes.openvino.experts import Routed
from smartspec_py.engines.runtimes.openvino.graph import DecoderGraph, scaled
from smartspec_py.engines.runtimes.openvino.short_convs import ShortConvs


class Lfm2Graph(DecoderGraph):
    """Builds the graph of an LFM2."""

    nets: ShortConvs
    _names = {  # noqa: RUF012
        "norm": "embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }

    def _nets(self, shapes: StateShapes) -> ShortConvs:
        return ShortConvs(self.products, shapes)

    def _mixed(self, index: int, name: str, layer: Any, normed: Any) -> Any:
        return self.nets.mixed(self._places[index], f"{name}.conv", layer.conv, normed)

    def _routed(self, name: str, mlp: Any, normed: Any) -> Routed:
        gate = mlp.gate
        routed = self.experts.routed(
            f"{name}.gate.weight",
            normed,
            gate.num_experts,
            gate.top_k,
            is_normed=gate.norm_topk_prob,
            bias=f"{name}{EXPERT_BIAS}" if gate.use_expert_bias else None,
            is_sigmoid=True,
        )
        return routed._replace(shares=scaled(routed.shares, gate.routed_scaling_factor))
