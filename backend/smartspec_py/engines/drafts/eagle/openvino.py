"""Runs heads that read states of the target with OpenVINO on a CPU, and EAGLE-3 heads among them:
the same drafts as `EagleRunner`.

The head's layer is that of the decoder's graph, with twice the width at its input. Weights are
rounded to 8 bits if those of the target are: this changes drafts a little, and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
import torch
from numpy.typing import NDArray

from smartspec_py.engines.drafts.eagle.head import EagleHead
from smartspec_py.engines.runtimes.openvino.graph import DecoderGraph
from smartspec_py.engines.runtimes.openvino.operators import int_, parameter
from smartspec_py.engines.runtimes.openvino.precision import Numbers
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.openvino.weights import Weights
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput, RunnerConfig

Floats = NDArray[np.float32]

TARGET_STATES, OWN_STATES = "target_states", "own_states"
"""The inputs of states: the target's [N, states_width], or the head's own [N, hidden_size]. The
other one has no rows."""


class HeadGraph(DecoderGraph):
    """The results, for the wanted tokens, are logits of the head's vocabulary, and the states to
    feed back."""

    def _given_states(self, states_width: int) -> tuple[Any, Any]:
        """The target's states and the head's own, as inputs of the graph."""
        widths = {TARGET_STATES: states_width, OWN_STATES: self.config.hidden_size}
        for each, width in widths.items():
            self.inputs[each] = parameter(each, [-1, width], np.float32)
        return self.inputs[TARGET_STATES], self.inputs[OWN_STATES]


class _EagleGraph(HeadGraph):
    def build(self, model: EagleHead, config: RunnerConfig) -> ov.Model:
        parts, layer, name = model.parts, model.parts.layers[0], "layers.0"
        of_target, own = self._given_states(parts.fc.in_features)
        states = op.concat([self._fused(model, of_target), op.unsqueeze(own, int_(0))], 1)
        embedded = self.products.rows("embed_tokens.weight", self.inputs["token_ids"])
        normed = self._norm(f"{name}.hidden_norm", layer.hidden_norm, states)
        both = [self._norm(f"{name}.input_layernorm", layer.input_layernorm, embedded), normed]
        attended = self._attention(0, name, layer, op.concat(both, -1))
        states_out = op.add(normed if model.of.norm_before_residual else states, attended)
        states_out = op.gather(states_out, self.inputs["wanted"], int_(1))
        before_mlp = self._norm(
            f"{name}.post_attention_layernorm", layer.post_attention_layernorm, states_out
        )
        states_out = op.add(states_out, self._mlp(f"{name}.mlp", layer.mlp, before_mlp))
        normed = self._norm("norm", parts.norm, states_out)
        logits = self.products.linear(["lm_head"], normed)
        return self._model([logits, normed if model.of.norm_output else states_out])

    def _fused(self, model: EagleHead, states: Any) -> Any:
        """`EagleHead.fuse`: [N, states_width] -> [1, N, hidden_size]."""
        parts, of = model.parts, model.of
        if of.norm_before_fc:
            states = self._norm("input_norm", parts.input_norm, states)
        if of.fc_norm:
            each = op.split(states, int_(-1), len(parts.fc_norm)).outputs()
            pairs = zip(parts.fc_norm, each, strict=True)
            normed = [self._norm(f"fc_norm.{i}", *pair) for i, pair in enumerate(pairs)]
            states = op.concat(normed, -1)
        return self.products.linear(["fc"], op.unsqueeze(states, int_(0)))


class OpenVinoHeadRunner(OpenVinoRunner):
    """A head that OpenVINO compiled, and its cache. See `EagleRunner` for its inputs.

    Slots of the cache begin at each row's first key, because OpenVINO's attention sees all slots.
    All tokens of a row are attended together; bits of drafts may depend on the pass.

    A pass of a small head takes 1 ms, and PyTorch's operators 0.1 ms each after a pass of the
    target, so NumPy does the rest.
    """

    first_key = 1

    def __init__(
        self,
        model: Any,
        config: RunnerConfig,
        weights: Weights,
        *,
        states_width: int,
        num_drafted: int,
        numbers: Numbers | None = None,
    ) -> None:
        """model, numbers: see `OpenVinoRunner`. states_width: of the target's states. num_drafted:
        rows of the output layer in the graph."""
        super().__init__(model, config, weights, most_copies=1, numbers=numbers)
        self._own = np.zeros((config.num_rows, self._hidden_size), np.float32)
        """The states that the head returned last, by row."""
        self._states_width, self._num_drafted = states_width, num_drafted

    def forward(
        self, inputs: Sequence[RowInput], token_ids: torch.Tensor | None = None
    ) -> PassOutput:
        assert token_ids is None, "tokens are on the host"
        request = self._copies[0].request
        own, target = self._none(self._hidden_size), self._none(self._states_width)
        if given := [row.states.float().numpy() for row in inputs if row.states is not None]:
            target = np.concatenate(given)
        else:
            own = self._own[[row.row for row in inputs for _ in row.tokens]]
        request.set_tensor(TARGET_STATES, ov.Tensor(target))
        request.set_tensor(OWN_STATES, ov.Tensor(own))
        ends = np.cumsum([len(row.tokens) for row in inputs]).tolist()
        wanted = [
            token
            for row, end in zip(inputs, ends, strict=True)
            for token in range(end - row.num_logits, end)
        ]
        self._set_inputs(request, inputs, wanted or [0])  # some operators fail with no rows
        num = max(1, len(wanted))
        drafted = np.empty((num, self._num_drafted), np.float32)
        states = np.empty((num, self._hidden_size), np.float32)
        for i, result in enumerate((drafted, states)):
            request.set_output_tensor(i, ov.Tensor(result, shared_memory=True))
        request.infer(share_outputs=True)
        if wanted:
            self._own[[row.row for row in inputs for _ in range(row.num_logits)]] = states
        logits = self._all_logits(drafted[: len(wanted)], states[: len(wanted)])
        return PassOutput(torch.from_numpy(logits))

    def _none(self, width: int) -> Floats:
        return np.empty((0, width), np.float32)

    def _all_logits(self, drafted: Floats, _: Floats) -> Floats:
        """Logits of the target's vocabulary, -inf for tokens that are not drafted. drafted: the
        graph's. _: the states that they come from."""
        return drafted


class OpenVinoEagleRunner(OpenVinoHeadRunner):
    """An EAGLE-3 head."""

    _graph_class = _EagleGraph

    def __init__(self, head: EagleHead, config: RunnerConfig) -> None:
        """config.weights: those of the target."""
        if config.weights != "stored":
            config = replace(config, weights="int8")
        super().__init__(
            head,
            config,
            Weights(head.parts.state_dict()),
            states_width=head.parts.fc.in_features,
            num_drafted=head.parts.lm_head.out_features,
        )
        self._token_ids = None if head.token_ids is None else head.token_ids.numpy()

    def _all_logits(self, drafted: Floats, _: Floats) -> Floats:
        if self._token_ids is None:
            return drafted
        logits = np.full((len(drafted), self.config.vocab_size), -np.inf, np.float32)
        logits[:, self._token_ids] = drafted
        return logits
