"""Runs the layer of Qwen3.5 that drafts (multi-token prediction, see `checkpoints.mtp`) with
OpenVINO on a CPU.

It is a head like that of EAGLE, which reads the target's states after the last norm and then its
own. Its products are those of the target: they have the same kind of weights, and embedding and
output layer are on the same memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openvino.opset15 as op

from smartspec_py.engines.checkpoints.adapters import NO_ADAPTERS
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.mtp import MTP, NORMS, mtp_model
from smartspec_py.engines.drafts.eagle.openvino import HeadGraph, OpenVinoHeadRunner
from smartspec_py.engines.runtimes.openvino.operators import int_
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner


class _MtpGraph(HeadGraph):
    _part = MTP

    def _embedded(self, model: Any) -> Any:
        """Embedding and state, each normed, as one."""
        states = op.unsqueeze(op.concat(self._given_states(self.config.hidden_size), 0), int_(0))
        both = [
            self._norm(f"{MTP}.{name}", getattr(model, name), given)
            for name, given in zip(NORMS, (super()._embedded(model), states), strict=True)
        ]
        return self.products.linear([f"{MTP}.fc"], op.concat(both, -1))


class OpenVinoMtpRunner(OpenVinoHeadRunner):
    """The layer of a target that was loaded with `RunnerConfig.has_mtp`."""

    _graph_class = _MtpGraph

    def __init__(self, target: OpenVinoRunner) -> None:
        config, weights = target.config, target.weights
        assert weights is not None, "the target was loaded without the layer"
        target.weights = None
        hf_config = load_config(config.path, config.max_len)
        super().__init__(
            mtp_model(hf_config),
            replace(
                config, gives_hidden=True, state_layers=(), has_mtp=False, adapters=NO_ADAPTERS
            ),
            weights,
            states_width=hf_config.hidden_size,
            token_ids=None,
            numbers=target.numbers,
        )
