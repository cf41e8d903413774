"""What layers of Gemma 4 have beside those of the other models, as operators of a graph.

- Layers with and without a window have heads of other sizes.
- The last layers have no keys and values of their own. They attend to those of the last layer of
  their kind that has. So tokens whose logits are not wanted need not go through them: in E2B, 20 of
  35 layers, with the wider MLPs.
- Values are normed. In some models, they are the product of the keys.
- Small models add an input of each layer, which depends on the token and its embedding (per-layer
  embeddings).
- Some models have experts beside the MLP.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op

from smartspec_py.engines.checkpoints.experts import has_experts
from smartspec_py.engines.runtimes.openvino.attention import INPUTS
from smartspec_py.engines.runtimes.openvino.graph import DecoderGraph, scaled
from smartspec_py.engines.runtimes.openvino.model_types import layers_with_keys
from smartspec_py.engines.runtimes.openvino.operators import int_, ints, parameter
from smartspec_py.engines.runtimes.openvino.products import Products
from smartspec_py.engines.runtimes.runner import RunnerConfig

LAST = "last_tokens"
OF_SEQUENCES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
LAST_INPUTS = {LAST: np.int64, **{f"last_{name}": INPUTS[name] for name in OF_SEQUENCES}}
"""The tokens that go through the last layers, among those of the pass, and the sequences of these
tokens, as in INPUTS. `wanted` is among them. A token of a prompt is there twice if it is alone: the
copy's key goes to the slot behind it, which the next pass overwrites."""


class Gemma4Graph(DecoderGraph):
    """Builds the graph of a Gemma 4."""

    def __init__(self, model: Any, products: Products, *, max_len: int, num_threads: int) -> None:
        super().__init__(model, products, max_len=max_len, num_threads=num_threads)
        self._last: dict[str, int] = {}
        """By type, the last layer with keys of its own until now."""
        self._kept: dict[int, tuple[Any, Any]] = {}
        """The keys and values of these layers, by their number."""
        self._layer_inputs: list[Any] = []
        self._num_own = len(layers_with_keys(model))
        self._is_cut = False

    def build(self, model: Any, config: RunnerConfig) -> ov.Model:
        # States of all tokens are wanted with state_layers, and experts get no other tokens.
        is_whole = bool(config.state_layers) or has_experts(self.config)
        self._is_cut = self._num_own < self.config.num_hidden_layers and not is_whole
        if self._is_cut:
            self.inputs |= {
                name: parameter(name, [-1], dtype) for name, dtype in LAST_INPUTS.items()
            }
        return super().build(model, config)

    def _embedded(self, model: Any) -> Any:
        states = super()._embedded(model)
        if width := getattr(self.config, "hidden_size_per_layer_input", 0):
            self._layer_inputs = self._inputs_of_layers(model.model, states, width)
        return states

    def _embedding_scale(self) -> float:
        return self._root("model.embed_tokens.weight", self.config.hidden_size)

    def _given(self, states: Any, config: RunnerConfig) -> Any:
        if not config.gives_keys:
            return states
        last = [self._kept[self._last[kind]] for kind in sorted(self._last)]
        keys = op.concat([each for both in last for each in both], -1)
        of_wanted = op.gather(keys, self.inputs["wanted"], int_(0))
        return op.concat([states, op.unsqueeze(of_wanted, int_(0))], -1)

    def _inputs_of_layers(self, inner: Any, embedded: Any, width: int) -> list[Any]:
        """[1, N, width] each."""
        name, num_layers = "model.embed_tokens_per_layer.weight", self.config.num_hidden_layers
        of_tokens = scaled(
            self.products.rows(name, self.inputs["token_ids"]), self._root(name, width)
        )
        projected = self.products.linear(["model.per_layer_model_projection"], embedded)
        by_layer = op.reshape(
            scaled(projected, self.config.hidden_size**-0.5),
            ints(0, 0, num_layers, width),
            special_zero=True,
        )
        normed = self._norm(
            "model.per_layer_projection_norm", inner.per_layer_projection_norm, by_layer
        )
        flat = op.reshape(normed, ints(0, 0, -1), special_zero=True)
        both = scaled(op.add(flat, of_tokens), 2**-0.5)
        if not self._is_cut:
            return list(op.split(both, int_(-1), num_layers).outputs())
        nums = self._num_own, num_layers - self._num_own
        parts = op.variadic_split(both, int_(-1), ints(*(num * width for num in nums))).outputs()
        parts = parts[0], self._of_last(parts[1], 1)
        return [
            layer
            for part, num in zip(parts, nums, strict=True)
            for layer in op.split(part, int_(-1), num).outputs()
        ]

    def _of_last(self, states: Any, axis: int) -> Any:
        """The states of the tokens that go through the last layers."""
        return op.gather(states, self.inputs[LAST], int_(axis))

    def _cut(self, states: Any) -> Any:
        """Before the first of the last layers."""
        self._sequences = {name: self.inputs[f"last_{name}"] for name in OF_SEQUENCES}
        self._kept = {
            index: (self._of_last(keys, 0), self._of_last(values, 0))
            for index, (keys, values) in self._kept.items()
        }
        self.rotations = {
            kind: (half, self._of_last(cos, 0), self._of_last(sin, 0))
            for kind, (half, cos, sin) in self.rotations.items()
        }
        self.products.take_tokens(self.inputs[LAST])
        return self._of_last(states, 1)

    def _layer(self, index: int, layer: Any, states: Any) -> Any:
        name = f"{self._part}.layers.{index}"
        if self._is_cut and index == self._num_own:
            states = self._cut(states)
        states = super()._layer(index, layer, states)
        if self._layer_inputs:
            gate = self.products.linear([f"{name}.per_layer_input_gate"], states)
            given = op.multiply(self._activated(gate), self._layer_inputs[index])
            out = self.products.linear([f"{name}.per_layer_projection"], given)
            norm = layer.post_per_layer_input_norm
            states = op.add(states, self._norm(f"{name}.post_per_layer_input_norm", norm, out))
        scalar = f"{name}.layer_scalar"
        if scalar not in self.products.weights.tensors:
            return states
        return op.multiply(states, self.products.stored(self.products.weights.stored(scalar)))

    def _heads(self, index: int, name: str, attention: Any, normed: Any) -> tuple[Any, ...]:
        layer_type, head_dim = self.config.layer_types[index], attention.head_dim
        if attention.is_kv_shared_layer:
            queries = self.products.linear([f"{name}.q_proj"], normed)
            last = self._last[layer_type]
            self._places[index] = self._places[last]
            keys, values = self._kept[last]
        else:
            parts = [part for part in "qkv" if getattr(attention, f"{part}_proj") is not None]
            widths = [getattr(attention, f"{part}_proj").out_features for part in parts]
            names = [f"{part}_proj" for part in parts]
            queries, given, *rest = self._split(name, names, normed, widths)
            keys = self._rotated_in(index, name, attention, "k", given)
            values = self._normed_values(rest[0] if rest else given, attention.v_norm, head_dim)
            self._last[layer_type], self._kept[index] = index, (keys, values)
        return self._rotated_in(index, name, attention, "q", queries), keys, values, None

    def _normed_values(self, states: Any, norm: Any, head_dim: int) -> Any:
        """[1, N, heads * D] -> [N, heads * D]. The norm has no weight."""
        by_head = op.reshape(states, ints(0, 0, -1, head_dim), special_zero=True)
        flat = op.reshape(self._norm("", norm, by_head), ints(0, 0, -1), special_zero=True)
        return op.squeeze(flat, int_(0))

    def _feed_forward(self, name: str, layer: Any, states: Any, normed: Any) -> Any:
        out = super()._feed_forward(name, layer, states, normed)
        if not has_experts(self.config):
            return out
        config, router = self.config, layer.router
        scale = self.products.weights.stored(f"{name}.router.scale").float()
        given = op.multiply(
            self._norm("", router.norm, states),
            self.products.stored(scale * config.hidden_size**-0.5),
        )
        routed = self.experts.routed(
            f"{name}.router.proj.weight",
            given,
            config.num_experts,
            config.top_k_experts,
            factors=f"{name}.router.per_expert_scale",
        )
        before = self._layer_norm(name, layer, "pre_feedforward_layernorm_2", states)
        mixed = self.experts.mixed(name, before, routed, self._gated)
        return op.add(
            self._layer_norm(name, layer, "post_feedforward_layernorm_1", out),
            self._layer_norm(name, layer, "post_feedforward_layernorm_2", mixed),
        )
