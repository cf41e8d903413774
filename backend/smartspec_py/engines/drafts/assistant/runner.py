"""Runs an assistant of Gemma 4 with OpenVINO on a CPU, on the keys and values of the target.

OpenVINO's attention writes keys of the token that asks. So an assistant asks as the last token that
the target has read, with this token's own keys and values: it writes the same numbers to the same
place again, and sees all keys of the text. The target gives them with the token's state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
import torch
from numpy.typing import NDArray

from smartspec_py.engines.checkpoints.adapters import NO_ADAPTERS
from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.tensors import file_tensors
from smartspec_py.engines.drafts.assistant.model import ORDERING, AssistantConfig, assistant_model
from smartspec_py.engines.runtimes.openvino.attention import cache_names
from smartspec_py.engines.runtimes.openvino.cache import BlockCache
from smartspec_py.engines.runtimes.openvino.gemma4 import Gemma4Graph
from smartspec_py.engines.runtimes.openvino.graph import root
from smartspec_py.engines.runtimes.openvino.load import checked_files
from smartspec_py.engines.runtimes.openvino.operators import int_, ints, parameter
from smartspec_py.engines.runtimes.openvino.products import Products
from smartspec_py.engines.runtimes.openvino.runner import OpenVinoRunner
from smartspec_py.engines.runtimes.openvino.weights import Weights, rows_of
from smartspec_py.engines.runtimes.runner import STRIDE, PassOutput, RowInput, RunnerConfig

EMBEDDING = "model.embed_tokens.weight"

GIVEN, KEYS = "given", "keys"
"""Inputs of the graph: embeddings and states, [N, 2 * backbone], and the keys and values of the
tokens that the rows ask as, [N, numbers], in the order of `AssistantConfig.keys`."""


class _AssistantGraph(Gemma4Graph):
    """The results are logits, states to feed back, [N, backbone], and with clusters the tokens that
    the logits are of, [N, n]."""

    def __init__(self, model: Any, products: Products, *, max_len: int, num_threads: int) -> None:
        super().__init__(model, products, max_len=max_len, num_threads=num_threads)
        of: AssistantConfig = model.of
        self._of, self._clusters = of, model.clusters
        for unused in ("token_ids", "wanted"):
            del self.inputs[unused]
        self.inputs[GIVEN] = parameter(GIVEN, [-1, 2 * of.backbone], np.float32)
        self.inputs[KEYS] = parameter(KEYS, [-1, of.states_width - of.backbone], np.float32)
        widths = [width for _, width in of.keys.values() for _ in range(2)]
        parts = op.variadic_split(self.inputs[KEYS], int_(-1), ints(*widths)).outputs()
        for place, (kind, (index, _)) in enumerate(of.keys.items()):
            own = -1 - place  # no layer of the assistant has this number
            self._last[kind], self._places[own] = own, place
            self._kept[own] = parts[2 * place], parts[2 * place + 1]
            names = cache_names(index + 1)[-2:]
            self.caches += [parameter(n, [-1, -1, -1, -1], ov.Type.dynamic) for n in names]

    def build(self, model: Any, config: RunnerConfig) -> ov.Model:
        given = op.unsqueeze(self.inputs[GIVEN], int_(0))
        states = self.products.linear(["pre_projection"], given)
        for index, layer in enumerate(model.model.layers):
            states = self._layer(index, layer, states)
        states = self._norm("model.norm", model.model.norm, states)
        projected = self.products.linear(["post_projection"], states)
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        if self._clusters is None:
            return self._model([self.products.linear([head], states, config.vocab_size), projected])
        logits, tokens = self._of_clusters(head, states)
        return self._model([logits, projected, tokens])

    def _of_clusters(self, head: str, states: Any) -> tuple[Any, Any]:
        """Logits of the tokens of the best clusters, and these tokens, [1, N, n] each."""
        of_clusters = self.products.linear(["masked_embedding.centroids"], states)
        _, best = op.topk(of_clusters, int_(self._of.num_chosen), 2, "max", "none").outputs()
        members = op.gather(op.constant(self._clusters), best, int_(0))
        num = self._of.num_chosen * self._clusters.shape[1]
        tokens = op.reshape(members, ints(-1, num), special_zero=False)
        logits = self.products.of_rows(f"{head}.weight", tokens, states)
        return logits, op.unsqueeze(tokens, int_(0))


class AssistantRunner(OpenVinoRunner):
    """An assistant, and the cache of its target. An input has one token and is at its position. Its
    states are one vector: the state that is read with it, and then the keys and values of the token
    before it. The states of the output take the place of the first part."""

    _graph_class = _AssistantGraph
    cache: BlockCache

    def __init__(self, assistant: AssistantConfig, target: OpenVinoRunner) -> None:
        """target: loaded with `RunnerConfig.keeps_weights`. Raises ModelError."""
        weights, block = target.weights, max(1, target.numbers.block)
        assert weights is not None, "the target was loaded without keeping its weights"
        target.weights = None
        self._target_cache, self._of = target.cache, assistant
        is_stored = not target.numbers.num_bits
        embedding = weights.stored(EMBEDDING) if is_stored else weights.int8(EMBEDDING, block=block)
        self._embedding, self._block = embedding, block
        self._scale = root(assistant.backbone, weights.dtype(EMBEDDING))
        weights.finish()
        model, of = assistant_model(assistant), target.config
        config = replace(
            of,
            path=assistant.folder,
            weights="stored" if is_stored else "int8",
            gives_hidden=False,
            gives_keys=False,
            keeps_weights=False,
            keeps_4_bits=False,
            adapters=NO_ADAPTERS,
        )
        model.of, model.clusters = assistant, _clusters(assistant)
        if assistant.num_clusters:
            model.masked_embedding.token_ordering = torch.nn.Buffer(
                torch.empty(assistant.text.vocab_size, dtype=torch.long, device="meta")
            )
        files = checked_files(model, assistant.text, config)
        super().__init__(model, config, Weights(files, config.num_threads), most_copies=1)

    def _own_cache(self, model: Any) -> BlockCache:
        return self._target_cache

    @property
    def bytes_per_token(self) -> int:
        return 0

    def forward(
        self, inputs: Sequence[RowInput], token_ids: torch.Tensor | None = None
    ) -> PassOutput:
        assert token_ids is None, "tokens are on the host"
        request, backbone = self._copies[0].request, self._of.backbone
        given = np.concatenate([row.states.numpy() for row in inputs if row.states is not None])
        tokens = torch.tensor([row.tokens[0] for row in inputs])
        embedded = rows_of(self._embedding, self._block, tokens).numpy() * self._scale
        states = np.concatenate([embedded, given[:, :backbone]], 1)
        request.set_tensor(GIVEN, ov.Tensor(states))
        request.set_tensor(KEYS, ov.Tensor(np.ascontiguousarray(given[:, backbone:])))
        self._set_inputs(request, [replace(row, first=1) for row in inputs], ())
        request.infer(share_outputs=True)
        logits, projected, *drafted = (
            request.get_output_tensor(i).data.copy() for i in range(len(self.compiled.outputs))
        )
        if drafted:
            drafted_logits, size = logits, (len(inputs), self._of.text.vocab_size)
            logits = np.full(size, -math.inf, np.float32)
            np.put_along_axis(logits, drafted[0], drafted_logits, 1)
            logits = logits[:, : self.config.vocab_size]
        return PassOutput(torch.from_numpy(logits), torch.split(torch.from_numpy(projected), 1))

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Several tokens of a row are several rows."""
        position = min(max(1, context_len), self.config.max_len - 1)
        self.cache.occupy(batch_size, position)
        states = torch.zeros(1, self._of.states_width)
        inputs = [
            RowInput(row, position, (row * STRIDE % self.config.vocab_size,), 1, states=states)
            for row in range(batch_size)
            for _ in range(tokens_per_row)
        ]
        start = time.perf_counter()
        self.forward(inputs).logits.argmax(-1).tolist()
        return time.perf_counter() - start


def _clusters(assistant: AssistantConfig) -> NDArray[np.int64] | None:
    """The tokens of each cluster, [clusters, tokens]; None if there are none. Raises ModelError."""
    if not assistant.num_clusters:
        return None
    num_tokens = assistant.text.vocab_size
    ordering = file_tensors(assistant.folder).get(ORDERING)
    if ordering is None or sorted(ordering.flatten().tolist()) != list(range(num_tokens)):
        raise ModelError(
            f"{assistant.folder}: {ORDERING} must have each of the {num_tokens} tokens once: "
            "copy the whole checkpoint"
        )
    return ordering.long().view(assistant.num_clusters, -1).numpy()
