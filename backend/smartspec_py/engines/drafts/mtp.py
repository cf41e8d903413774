"""Runs the layer of Qwen3.5 that drafts (multi-token prediction, see `checkpoints.mtp`) with
OpenVINO on a CPU.

It is a head like that of EAGLE, which reads the target's states after the last norm and then its
own. Its products are those of the target: they have the same kind of weights, and embedding and
output layer are on the same memory. Of a large output layer, the graph has a part, see
`vocabulary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openvino as ov
import openvino.opset15 as op
import torch

from smartspec_py.engines.checkpoints.adapters import NO_ADAPTERS
from smartspec_py.engines.checkpoints.config import load_config
from smartspec_py.engines.checkpoints.mtp import MTP, NORMS, SHARED, mtp_model
from smartspec_py.engines.drafts.eagle.openvino import Floats, HeadGraph, OpenVinoHeadRunner
from smartspec_py.engines.drafts.vocabulary import SeenTokens, num_in_graph
from smartspec_py.engines.runtimes.openvino.operators import int_
from smartspec_py.engines.runtimes.openvino.precision import MOST_WIDTH
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput, RunnerConfig


class _MtpGraph(HeadGraph):
    _part = MTP

    def build(self, model: Any, config: RunnerConfig) -> ov.Model:
        num = num_in_graph(config.vocab_size, self.products.num_bits)
        return super().build(model, replace(config, vocab_size=num))

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
        config, weights, numbers = target.config, target.weights, target.numbers
        assert weights is not None, "the target was loaded without the layer"
        target.weights = None
        hf_config = load_config(config.path, config.max_len)
        num_drafted = num_in_graph(config.vocab_size, numbers.num_bits)
        super().__init__(
            mtp_model(hf_config),
            replace(
                config, gives_hidden=True, state_layers=(), has_mtp=False, adapters=NO_ADAPTERS
            ),
            weights,
            states_width=hf_config.hidden_size,
            num_drafted=num_drafted,
            numbers=numbers,
        )
        self._seen = None
        if num_drafted < config.vocab_size:
            embedding, head = SHARED
            output_layer = weights.int8(
                embedding if hf_config.tie_word_embeddings else head,
                most_width=MOST_WIDTH if numbers.is_bounded else None,
                block=max(1, numbers.block),
            )
            self._seen = SeenTokens(output_layer, numbers.block)

    def forward(
        self, inputs: Sequence[RowInput], token_ids: torch.Tensor | None = None
    ) -> PassOutput:
        if self._seen is not None:
            known = [row.tokens for row in inputs if row.states is not None]
            self._seen.add(token for tokens in known for token in tokens)
        return super().forward(inputs, token_ids)

    def _all_logits(self, drafted: Floats, states: Floats) -> Floats:
        if self._seen is None:
            return drafted
        return self._seen.logits(drafted, states, self.config.vocab_size)
