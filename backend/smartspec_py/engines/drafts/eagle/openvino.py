"""Runs an EAGLE-3 head with OpenVINO on a CPU: the same drafts as `EagleRunner`.

The head's layer is that of the decoder's graph, with twice the width at its input. Weights are
rounded to 8 bits if those of the target are: this changes drafts a little, and no text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import openvino as ov
import openvino.opset15 as op
import torch

from smartspec_py.engines.drafts.eagle.head import EagleHead
from smartspec_py.engines.drafts.eagle.runner import OwnStates
from smartspec_py.engines.runtimes.openvino.graph import DecoderGraph
from smartspec_py.engines.runtimes.openvino.operators import int_, parameter
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.openvino.weights import Weights
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput, RunnerConfig

STATES = "states"
"""The input of states, [N, hidden_size]: fused ones of the target, or the head's own."""


class _HeadGraph(DecoderGraph):
    def build(
        self, model: EagleHead, vocab_size: int, gives_hidden: bool, state_layers: Sequence[int]
    ) -> ov.Model:
        """The results, for the wanted tokens, are logits of the head's vocabulary and the states to
        feed back."""
        self.inputs[STATES] = parameter(STATES, [-1, self.config.hidden_size], np.float32)
        parts, layer, name = model.parts, model.parts.layers[0], "layers.0"
        states = op.unsqueeze(self.inputs[STATES], int_(0))
        embedded = self.products.rows("embed_tokens.weight", self.inputs["token_ids"])
        normed = self._norm(f"{name}.hidden_norm", layer.hidden_norm, states)
        both = [self._norm(f"{name}.input_layernorm", layer.input_layernorm, embedded), normed]
        attended = self._attention(0, name, layer, op.concat(both, -1))
        states_out = op.add(normed if model.of.norm_before_residual else states, attended)
        states_out = op.gather(states_out, self.inputs["wanted"], int_(1))
        before_mlp = self._norm(
            f"{name}.post_attention_layernorm", layer.post_attention_layernorm, states_out
        )
        states_out = op.add(states_out, self._mlp(name, layer.mlp, before_mlp))
        normed = self._norm("norm", parts.norm, states_out)
        logits = self.products.linear(["lm_head"], normed)
        return self._model([logits, normed if model.of.norm_output else states_out])

    def fusion(self, model: EagleHead) -> ov.Model:
        """`EagleHead.fuse`."""
        parts, of = model.parts, model.of
        given = states = parameter(STATES, [-1, parts.fc.in_features], np.float32)
        if of.norm_before_fc:
            states = self._norm("input_norm", parts.input_norm, states)
        if of.fc_norm:
            each = op.split(states, int_(-1), len(parts.fc_norm)).outputs()
            pairs = zip(parts.fc_norm, each, strict=True)
            normed = [self._norm(f"fc_norm.{i}", *pair) for i, pair in enumerate(pairs)]
            states = op.concat(normed, -1)
        fused = self.products.linear(["fc"], op.unsqueeze(states, int_(0)))
        return ov.Model([op.result(op.squeeze(fused, int_(0)))], [given], "fusion")


class OpenVinoEagleRunner(OpenVinoRunner):
    """An EAGLE-3 head that OpenVINO compiled, and its cache.

    Slots of the cache begin at each row's first key, because OpenVINO's attention sees all slots.
    All tokens of a row are attended together; bits of drafts may depend on the pass.
    """

    _graph_class = _HeadGraph
    first_key = 1

    def __init__(self, head: EagleHead, config: RunnerConfig) -> None:
        """config.weights: those of the target."""
        if config.weights != "stored":
            config = replace(config, weights="int8")
        super().__init__(head, config, Weights(head.parts.state_dict()), most_copies=1)
        fusion = ov.Core().compile_model(self._fusion, "CPU", self._settings)
        self._fused = fusion.create_infer_request()
        self._head, self._states = head, OwnStates(self._fuse, head.config.hidden_size, config)
        self._num_drafted = head.parts.lm_head.out_features

    def _build(self, graph: DecoderGraph, model: EagleHead) -> ov.Model:
        assert isinstance(graph, _HeadGraph)
        self._fusion = graph.fusion(model)
        return super()._build(graph, model)

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        """On one core, PyTorch takes 0.2 ms for a few tokens, and 9 ms for 200 of SmolLM2-135M."""
        given = states.float().numpy()  # the request does not keep its memory
        self._fused.set_input_tensor(0, ov.Tensor(given, shared_memory=True))
        self._fused.infer(share_outputs=True)
        return torch.from_numpy(self._fused.get_output_tensor(0).data)

    @torch.inference_mode()
    def forward(
        self, inputs: Sequence[RowInput], token_ids: torch.Tensor | None = None
    ) -> PassOutput:
        assert token_ids is None, "tokens are on the host"
        start = time.perf_counter()
        given = self._states.given(inputs).float().numpy()
        request = self._copies[0].request
        request.set_tensor(STATES, ov.Tensor(given))
        ends = np.cumsum([len(row.tokens) for row in inputs]).tolist()
        wanted = [
            token
            for row, end in zip(inputs, ends, strict=True)
            for token in range(end - row.num_logits, end)
        ]
        num = len(wanted)
        self._set_inputs(request, inputs, wanted or [0])  # some operators fail with no rows
        drafted = torch.empty(max(1, num), self._num_drafted)
        states = torch.empty(max(1, num), self._hidden_size)
        for i, result in enumerate((drafted, states)):
            request.set_output_tensor(i, ov.Tensor(result.numpy(), shared_memory=True))
        request.infer(share_outputs=True)
        self._states.keep(inputs, states[:num])
        self.passes_s += time.perf_counter() - start
        return PassOutput(self._head.all_logits(drafted[:num]))
