"""The decoder of Llama and of models with a similar layout, as a graph of OpenVINO operators.

The graph is built from the weights of a checkpoint, without an export and without files. Attention
is OpenVINO's own operator for paged keys and values. It also writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
import torch

from smartspec_py.engines.checkpoints.experts import has_experts
from smartspec_py.engines.checkpoints.recurrent import (
    StateShapes,
    has_tiled_heads,
    state_shapes,
)
from smartspec_py.engines.runtimes.openvino.attention import (
    INPUTS,
    LONGEST,
    cache_names,
    paged_attention,
)
from smartspec_py.engines.runtimes.openvino.delta_nets import DeltaNets
from smartspec_py.engines.runtimes.openvino.experts import Experts, Routed, has_shared
from smartspec_py.engines.runtimes.openvino.model_types import (
    activation,
    attention_window,
    granite_factor,
    has_attention,
    has_output_gate,
    is_rotated,
    is_stored_less_one,
    layers_with_keys,
    query_factors,
    rotation_table,
)
from smartspec_py.engines.runtimes.openvino.operators import float_, int_, ints, parameter
from smartspec_py.engines.runtimes.openvino.products import Products
from smartspec_py.engines.runtimes.runner import RunnerConfig


class DecoderGraph:
    """Builds the graph of a decoder.

    OpenVINO computes the operators that lead to a result in float32. If hidden states are a result,
    these are all operators between the matrix products.
    """

    _part = "model"
    """How the names of the layers and of the last norm begin."""

    _names: Mapping[str, str] = MappingProxyType({})
    """Names of parts of the model, where they are not the usual ones."""

    def __init__(
        self,
        model: Any,
        products: Products,
        *,
        max_len: int,
        num_threads: int,
    ) -> None:
        """model: of Transformers; only its structure is used. max_len: number of positions.
        num_threads: threads that will run the graph."""
        self.config = config = model.config
        self.products = products
        self.max_len, self.num_threads = max_len, num_threads
        layers = model.model.layers
        attending = layers_with_keys(model)
        recurrent = [i for i, layer in enumerate(layers) if not has_attention(layer)]
        self._places = {
            index: place for kind in (attending, recurrent) for place, index in enumerate(kind)
        }
        """Of each layer, which one of its kind it is."""
        self.inputs = {name: parameter(name, [-1], dtype) for name, dtype in INPUTS.items()}
        self._sequences: Mapping[str, Any] = self.inputs
        """What the attention reads, by the names of INPUTS."""
        self.inputs |= products.inputs
        shapes = state_shapes(config)
        if has_experts(config):
            self.experts = Experts(products)
            self.inputs |= self.experts.inputs
        self.longest = parameter(LONGEST, [], np.int32)
        self.caches = [
            parameter(name, [-1, -1, -1, -1], ov.Type.dynamic)
            for name in cache_names(len(attending))
        ]
        self.nets = None if shapes is None else self._nets(shapes)
        if self.nets is not None:
            self.inputs |= self.nets.inputs
            self.caches += self.nets.layers
        self.rotations = self._rotations(model.model)
        factors = query_factors(config, max_len)
        self.query_factors = None if factors is None else self._of_tokens(factors[:, None])

    def _rotations(self, inner: Any) -> dict[str | None, Any]:
        """See `_rotated`, by the type of the layers; None: of all. inner: the model's layers."""
        own = getattr(inner, "rotary_emb", None) or getattr(inner, "pos_emb", None)
        if own is None:
            return {None: None}
        rotary = type(own)(self.config)  # on the CPU, wherever the model is
        is_by_type = isinstance(rotary.rope_type, dict)
        kinds: set[str | None] = set(self.config.layer_types) if is_by_type else {None}
        tables = {kind: rotation_table(rotary, self.max_len, kind) for kind in kinds}
        return {kind: self._by_position(table) for kind, table in tables.items()}

    def _named(self, part: str) -> str:
        return self._names.get(part, part)

    def _nets(self, shapes: StateShapes) -> Any:
        """Of the layers with states."""
        return DeltaNets(self.products, shapes, has_tiled_heads(self.config))

    def build(self, model: Any, config: RunnerConfig) -> ov.Model:
        """The results, for the wanted tokens, are logits [M, vocab_size] and, with gives_hidden,
        states [M, hidden_size] after the last norm. With state_layers, the second result is the
        inputs of these layers for all tokens; see `RunnerConfig`."""
        state_layers = config.state_layers
        inner = model.model
        states, inputs = self._embedded(model), []
        for index, layer in enumerate(inner.layers):
            inputs.append(states)
            states = self._layer(index, layer, states)
        wanted_states = op.gather(states, self.inputs["wanted"], int_(1))
        if len(inner.layers) in state_layers:
            inputs.append(self._layer_norm(self._part, inner, "norm", states))
        states = self._layer_norm(self._part, inner, "norm", wanted_states)
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        logits = self.products.linear([head], states, config.vocab_size)
        if (divisor := granite_factor(self.config, "logits_scaling")) != 1.0:
            logits = op.divide(logits, float_(divisor))
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = scaled(op.tanh(scaled(logits, 1 / cap)), cap)
        wanted = [logits, self._given(states, config)] if config.gives_hidden else [logits]
        if state_layers:
            wanted = [logits, op.concat([inputs[i] for i in state_layers], -1)]
        return self._model(wanted)

    def _given(self, states: Any, config: RunnerConfig) -> Any:
        """What gives_hidden returns of these states of the wanted tokens."""
        return states

    def _embedded(self, model: Any) -> Any:
        """What the first layer reads, [1, N, hidden_size]."""
        states = self.products.rows("model.embed_tokens.weight", self.inputs["token_ids"])
        return scaled(states, self._embedding_scale())

    def _model(self, wanted: Sequence[Any]) -> ov.Model:
        """wanted: the results, [1, N, width] each."""
        results = [op.result(op.squeeze(result, int_(0))) for result in wanted]
        results += [op.result(result) for result in (self.nets.results if self.nets else [])]
        return ov.Model(results, [*self.inputs.values(), self.longest, *self.caches], "decoder")

    def _layer(self, index: int, layer: Any, states: Any) -> Any:
        name = f"{self._part}.layers.{index}"
        # With a norm behind the MLP, that behind the attention has the name of one before the MLP.
        has_outer_norms = hasattr(layer, "post_feedforward_layernorm")
        before_mlp = "pre_feedforward_layernorm" if has_outer_norms else "post_attention_layernorm"
        normed = self._layer_norm(name, layer, "input_layernorm", states)
        mixer = self._attention if has_attention(layer) else self._mixed
        out = mixer(index, name, layer, normed)
        if has_outer_norms:
            out = self._layer_norm(name, layer, "post_attention_layernorm", out)
        factor = granite_factor(self.config, "residual_multiplier")
        states = op.add(states, scaled(out, factor))
        normed = self._layer_norm(name, layer, before_mlp, states)
        out = self._feed_forward(name, layer, states, normed)
        if has_outer_norms:
            out = self._layer_norm(name, layer, "post_feedforward_layernorm", out)
        return op.add(states, scaled(out, factor))

    def _mixed(self, index: int, name: str, layer: Any, normed: Any) -> Any:
        """What a layer with a state has in place of attention, [1, N, hidden_size]. index: of the
        layer."""
        assert self.nets is not None
        name_of_net, place = f"{name}.linear_attn", self._places[index]
        return self.nets.mixed(place, name_of_net, layer.linear_attn, normed, self._silu)

    def _feed_forward(self, name: str, layer: Any, states: Any, normed: Any) -> Any:
        """Of the states, which are normed for the MLP."""
        part = self._named("mlp")
        return self._mlp(f"{name}.{part}", getattr(layer, part), normed)

    def _layer_norm(self, name: str, layer: Any, part: str, states: Any) -> Any:
        """The states, normed if the layer, or the model, has this norm."""
        part = self._named(part)
        if not hasattr(layer, part):
            return states
        return self._norm(f"{name}.{part}", getattr(layer, part), states)

    def _attention(self, index: int, name: str, layer: Any, normed: Any) -> Any:
        """[1, N, hidden_size]. index: of the layer."""
        attention = layer.self_attn
        *states, gate = self._heads(index, f"{name}.self_attn", attention, normed)
        if self.query_factors is not None:
            states[0] = op.multiply(states[0], self.query_factors)
        is_half = self.products.has_half_attention
        if is_half:
            states = [op.convert(each, ov.Type.bf16) for each in states]
        window = attention_window(layer, self.config, self.max_len)
        place = self._places[index]
        attended = paged_attention(
            self._sequences,
            self.longest,
            self.caches[2 * place : 2 * place + 2],
            states,
            num_key_heads=_width(states[1]) // attention.head_dim,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
            window=window or 0,
            sinks=self._sinks(f"{name}.self_attn", attention),
        )
        if is_half:
            attended = op.convert(attended, ov.Type.f32)
        attended = op.unsqueeze(attended, int_(0))
        if gate is not None:
            attended = op.multiply(attended, op.sigmoid(gate))
        return self.products.linear([f"{name}.self_attn.{self._named('o_proj')}"], attended)

    def _sinks(self, name: str, attention: Any) -> Any:
        """See `paged_attention`. name: of the attention."""
        if not hasattr(attention, "sinks"):
            return None
        of_heads = self.products.stored(self.products.weights.stored(f"{name}.sinks"))
        return op.reshape(of_heads, ints(1, -1, 1, 1), special_zero=False)

    def _heads(self, index: int, name: str, attention: Any, normed: Any) -> tuple[Any, ...]:
        """Queries, keys and values of the tokens, [N, heads * D] each, and the gate of the output,
        [1, N, heads * D], or None. index: of the layer. D: width of a head."""
        *both, values = self._attention_inputs(name, attention, normed)
        gate = None
        if has_output_gate(attention):
            both[0], gate = self._without_gate(both[0], attention.head_dim)
        queries, keys = (
            self._rotated_in(index, name, attention, part, heads)
            for part, heads in zip("qk", both, strict=True)
        )
        return queries, keys, op.squeeze(values, int_(0)), gate

    def _rotated_in(self, index: int, name: str, attention: Any, part: str, states: Any) -> Any:
        """part: q or k. states: [1, N, heads * D]. Returns [N, heads * D]."""
        layer_type = self.config.layer_types[index] if None not in self.rotations else None
        rotation = self.rotations[layer_type] if is_rotated(attention) else None
        name_of_norm = self._named(f"{part}_norm")
        norm = getattr(attention, name_of_norm, None)
        return self._rotated(states, f"{name}.{name_of_norm}", norm, rotation, attention.head_dim)

    def _mlp(self, name: str, mlp: Any, normed: Any) -> Any:
        """name, mlp: of the MLP, a mixture of experts or one of its parts."""
        if hasattr(mlp, "experts"):
            mixed = self.experts.mixed(name, normed, self._routed(name, mlp, normed), self._gated)
            return op.add(mixed, self._shared(name, mlp, normed)) if has_shared(mlp) else mixed
        inner = self._gated(*self._mlp_inputs(name, mlp, normed))
        return self.products.linear([f"{name}.{self._named('down_proj')}"], inner)

    def _routed(self, name: str, mlp: Any, normed: Any) -> Routed:
        gate = mlp.gate
        return self.experts.routed(
            f"{name}.gate.weight",
            normed,
            gate.num_experts,
            gate.top_k,
            is_normed=getattr(gate, "norm_topk_prob", True),
        )

    def _shared(self, name: str, mlp: Any, normed: Any) -> Any:
        """What the expert of all tokens gives."""
        share = op.sigmoid(self.products.linear([f"{name}.shared_expert_gate"], normed))
        return op.multiply(share, self._mlp(f"{name}.shared_expert", mlp.shared_expert, normed))

    def _attention_inputs(self, name: str, attention: Any, normed: Any) -> Sequence[Any]:
        """Queries, with the gates of the output if there are any, keys and values, [1, N, heads *
        D] each."""
        parts = (
            ["qkv_proj"]
            if hasattr(attention, "qkv_proj")
            else [f"{letter}_proj" for letter in "qkv"]
        )
        config = self.config
        num_queries = config.num_attention_heads * (1 + has_output_gate(attention))
        heads = (num_queries, *[config.num_key_value_heads] * 2)
        return self._split(name, parts, normed, [num * attention.head_dim for num in heads])

    def _without_gate(self, queries: Any, head_dim: int) -> Sequence[Any]:
        """Queries and gates, [1, N, heads * D] each. Those of a head follow each other."""
        width = self.config.num_attention_heads * head_dim
        by_head = op.reshape(queries, ints(0, 0, -1, 2 * head_dim), special_zero=True)
        parts = op.split(by_head, int_(-1), 2).outputs()
        flat = [op.reshape(part, ints(0, 0, width), special_zero=True) for part in parts]
        return [part.output(0) for part in flat]

    def _mlp_inputs(self, name: str, mlp: Any, normed: Any) -> Sequence[Any]:
        """Gate and the values that it multiplies, [1, N, width] each."""
        parts = ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]
        parts, down = list(map(self._named, parts)), getattr(mlp, self._named("down_proj"))
        return self._split(name, parts, normed, [down.in_features] * 2)

    def _split(
        self, name: str, parts: Sequence[str], states: Any, widths: Sequence[int]
    ) -> Sequence[Any]:
        """The parts of one product. A product costs microseconds of its own, so these are joined:
        with the 30 small layers of a model of 135 M parameters, a pass takes 0.92 of the time."""
        out = self.products.linear([f"{name}.{part}" for part in parts], states)
        return op.variadic_split(out, int_(-1), ints(*widths)).outputs()  # type: ignore[no-any-return]

    def _embedding_scale(self) -> float:
        if self.config.model_type != "gemma3_text":
            return granite_factor(self.config, "embedding_multiplier")
        return self._root("model.embed_tokens.weight", self.config.hidden_size)

    def _root(self, name: str, width: int) -> float:
        """The factor of an embedding of Gemma, in the type of the files, as in training. name: of
        the weight."""
        return root(width, self.products.weights.dtype(name))

    def _gated(self, gate: Any, up: Any) -> Any:
        """What the last product of an MLP gets. up: what the gate multiplies."""
        return op.multiply(self._activated(gate), up)

    def _activated(self, gate: Any) -> Any:
        if activation(self.config) == "silu":
            return self._silu(gate)
        return op.gelu(gate, "tanh")

    def _silu(self, states: Any) -> Any:
        """If SiLU is written with a sigmoid, OpenVINO runs the MLP as one operator on processors
        with AMX. A pass of up to 32 tokens then takes 0.90 to 0.95 of the time. With one thread,
        this operator of 2026.4 divides by zero. A swish with an explicit beta does not use it."""
        if self.num_threads == 1:
            return op.swish(states, float_(1.0))
        return op.multiply(states, op.sigmoid(states))

    def _rotated(self, states: Any, name: str, norm: Any, rotation: Any, head_dim: int) -> Any:
        """[1, N, heads * D] -> [N, heads * D]: the first part of each head is rotated. The norm of
        each head or of all together, if any, is applied first. rotation: half of the part's width,
        cosines, sines; None rotates nothing."""
        is_of_heads = norm is not None and norm.weight.shape[0] == head_dim
        if norm is not None and not is_of_heads:
            states = self._norm(name, norm, states)
        width = _width(states)
        by_head = ints(-1, width // head_dim, 1, head_dim)
        heads = op.reshape(states, by_head, special_zero=False)
        if is_of_heads:
            heads = self._norm(name, norm, heads)
        if rotation is None:
            return op.reshape(heads, ints(-1, width), special_zero=False)
        half, cos, sin = rotation

        def between(first: int, end: int) -> Any:
            return op.slice(heads, ints(first), ints(end), step=ints(1), axes=ints(3))

        part, rest = heads, []
        if 2 * half < head_dim:
            part, rest = between(0, 2 * half), [between(2 * half, head_dim)]
        turned = op.concat(
            [op.multiply(between(half, 2 * half), float_(-1.0)), between(0, half)], -1
        )
        rotated = op.add(op.multiply(part, cos), op.multiply(turned, sin))
        if rest:
            rotated = op.concat([rotated, *rest], -1)
        return op.reshape(rotated, ints(-1, width), special_zero=False)

    def _by_position(self, table: torch.Tensor) -> tuple[int, Any, Any]:
        """From [2, max_len, D / 2]: D / 2, and [N, 1, 1, D] cosines and sines of the tokens."""
        tables = [self._of_tokens(numbers) for numbers in torch.cat([table, table], dim=-1)]
        cos, sin = (op.unsqueeze(op.unsqueeze(table, int_(1)), int_(1)) for table in tables)
        return table.shape[-1], cos, sin

    def _of_tokens(self, by_position: torch.Tensor) -> Any:
        """[max_len, D] -> [N, D]"""
        numbers = op.constant(by_position.float().numpy())
        return op.gather(numbers, self.inputs["positions"], int_(0))

    def _norm(self, name: str, norm: Any, states: Any) -> Any:
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        mean = op.reduce_mean(op.power(states, float_(2.0)), ints(-1), keep_dims=True)
        inverse = op.divide(float_(1.0), op.sqrt(op.add(mean, float_(eps))))
        normed = op.multiply(states, inverse)
        if not getattr(norm, "with_scale", True):
            return normed
        weight = self.products.weights.stored(f"{name}.weight")
        if is_stored_less_one(norm):
            weight = weight.float() + 1.0
        return op.multiply(normed, self.products.stored(weight))


def root(width: int, dtype: torch.dtype) -> float:
    """The root of the width, rounded to this type."""
    return torch.tensor(width**0.5).to(dtype).item()


def _width(states: Any) -> int:
    """Of the last dimension."""
    output = states if isinstance(states, ov.Output) else states.output(0)
    return int(output.get_partial_shape()[-1].get_length())


def scaled(states: Any, factor: float) -> Any:
    """The states times the factor."""
    return states if factor == 1.0 else op.multiply(states, float_(factor))
