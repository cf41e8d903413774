"""What layers of Granite have beside those of the other models, if they have experts or states of
Mamba 2: see `mamba2`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino.opset15 as op

from smartspec_py.engines.checkpoints.recurrent import StateShapes
from smartspec_py.engines.runtimes.openvino.graph import DecoderGraph
from smartspec_py.engines.runtimes.openvino.mamba2 import Mamba2


class GraniteGraph(DecoderGraph):
    """Builds the graph of a Granite with experts, or of a Granite 4."""

    nets: Mamba2 | None

    def _nets(self, shapes: StateShapes) -> Mamba2:
        return Mamba2(self.products, shapes)

    def _mixed(self, index: int, name: str, layer: Any, normed: Any) -> Any:
        assert self.nets is not None
        place = self._places[index]
        return self.nets.mixed(place, f"{name}.mamba", layer.mamba, normed, self._silu)

    def _feed_forward(self, name: str, layer: Any, states: Any, normed: Any) -> Any:
        """The experts, and those of all tokens."""
        outs = []
        if (mixture := layer.block_sparse_moe) is not None:
            part, router = f"{name}.block_sparse_moe", mixture.router
            weight = f"{part}.router.weight"
            routed = self.experts.routed(weight, normed, router.num_experts, router.top_k)
            outs.append(self.experts.mixed(part, normed, routed, self._gated))
        if hasattr(layer, "shared_mlp"):
            outs.append(self._mlp(f"{name}.shared_mlp", layer.shared_mlp, normed))
        return op.add(*outs) if len(outs) > 1 else outs[0]

    def _mlp_inputs(self, name: str, mlp: Any, normed: Any) -> Sequence[Any]:
        """Of the MLP of all tokens."""
        return self._split(name, ["gate_proj", "up_proj"], normed, [mlp.hidden_size] * 2)
