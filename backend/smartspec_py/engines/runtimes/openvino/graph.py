"""The decoder of Llama and of models with a similar layout, as a graph of OpenVINO operators.

The graph is built from the weights of a checkpoint, without an export and without files. Attention
is OpenVINO's own operator for paged keys and values. It also writes them. The operator has many
inputs that are not used here; these are empty.

OpenVINO recognises compressed weights by the form of the graph: a constant of integers, converted
and multiplied by its scale. It then multiplies integers, if the processor can: activations are
rounded to 8 bits in groups, see `runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
import torch
from openvino._offline_transformations import compress_model_transformation
from openvino.op import _PagedAttentionExtension

from smartspec_py.engines.checkpoints.adapters import NO_ADAPTERS, Adapters
from smartspec_py.engines.runtimes.openvino.supported import (
    activation,
    attention_window,
    rotation_table,
)
from smartspec_py.engines.runtimes.openvino.weights import (
    Compressed,
    Weights,
    by_columns,
    columns_of,
    joined,
)

BLOCK_LEN = 32
"""Tokens per block of keys and values, as OpenVINO's attention operator uses on a CPU."""

INPUTS = {
    "token_ids": np.int64,
    "positions": np.int64,
    "wanted": np.int64,
    "past_lens": np.int32,
    "subsequence_begins": np.int32,
    "block_indices": np.int32,
    "block_indices_begins": np.int32,
    "attended": np.int64,
    "kept": np.int64,
}
"""Vectors. Per token: its id and position. `wanted`: the tokens whose logits are needed. Per
sequence: cached tokens, index of its first attended token, its blocks, and where these begin.
`attended`: the tokens of all sequences in order, some twice. `kept`: for each token, the first
place where it is attended."""

TYPES = {torch.bfloat16: ov.Type.bf16, torch.float16: ov.Type.f16}

LONGEST = "max_context_len"
"""A scalar, int32."""

OWN_ADAPTERS = "own_adapters"
"""A vector, int64: the adapter of each token, see `Adapters`. There is none without adapters."""

LAYERS = "model.layers."
"""How the names of the layers' weights begin. Only these may have 4 bits."""

MATRIX_A = ".lora_A"
"""How the names of the adapters' matrices A end among the weights, behind the layer's name."""


def cache_names(num_layers: int) -> list[str]:
    """Names of the cache inputs [num_blocks, kv_heads, BLOCK_LEN, head_dim]; a pass writes them. In
    8 bits, the last dimension also holds a scale and a zero."""
    return [f"{name}_cache.{i}" for i in range(num_layers) for name in ("key", "value")]


class DecoderGraph:
    """Builds the graph of a decoder. The graph, compiled or not, reads the memory of the weights:
    keep `memory` as long as the graph.

    OpenVINO computes the operators that lead to a result in float32. If hidden states are a result,
    these are all operators between the matrix products.
    """

    def __init__(
        self,
        model: Any,
        weights: Weights,
        *,
        num_bits: int,
        group: int,
        max_len: int,
        num_threads: int,
        is_half: bool,
        most_width: int | None = None,
        keeps_4_bits: bool = False,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        """model: of Transformers; only its structure is used. num_bits: of the weights of products,
        8 or 4; 0 keeps their type. With 4 bits, in groups of this size, embeddings and output layer
        have 8. max_len: number of positions. num_threads: threads that will run the graph. is_half:
        whether products have half precision. most_width: products with compressed weights are
        computed in parts of at most this width; None computes each as a whole. keeps_4_bits: use
        the matrices of layers that `Weights.kept` gives. adapters: whose matrices A are among the
        weights, see MATRIX_A.
        """
        config = model.config
        self.weights, self.num_bits, self.group = weights, num_bits, group
        self.num_threads, self.is_half = num_threads, is_half
        self.most_width, self.keeps_4_bits = most_width, keeps_4_bits
        self.config = config
        self.max_len = max_len
        self.memory: list[Any] = []
        self.marked = _marked()
        self.head_dim: int = model.model.layers[0].self_attn.head_dim
        self.adapters = adapters
        types = INPUTS | ({OWN_ADAPTERS: np.int64} if adapters.names else {})
        self.inputs = {name: _parameter(name, [-1], dtype) for name, dtype in types.items()}
        self.longest = _parameter(LONGEST, [], np.int32)
        self.caches = [
            _parameter(name, [-1, -1, -1, -1], ov.Type.dynamic)
            for name in cache_names(len(model.model.layers))
        ]
        rotary = type(model.model.rotary_emb)(config)  # on the CPU, wherever the model is
        kinds = set(config.layer_types) if isinstance(rotary.rope_type, dict) else {None}
        self.rotations = {
            kind: self._by_position(rotation_table(rotary, max_len, kind)) for kind in kinds
        }
        if adapters.names:
            columns = op.constant(adapters.columns.numpy())
            own = op.gather(columns, self.inputs[OWN_ADAPTERS], _int(0))
            self.own_columns = op.unsqueeze(own, _int(1))  # bool [N, 1, rank]
        self.widths = {
            name: layer.out_features
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear)
        }

    def build(
        self, model: Any, vocab_size: int, gives_hidden: bool, state_layers: Sequence[int]
    ) -> ov.Model:
        """The results, for the wanted tokens, are logits [M, vocab_size] and, with gives_hidden,
        states [M, hidden_size] after the last norm. With state_layers, the second result is the
        inputs of these layers for all tokens."""
        inner = model.model
        [embedding] = self._matrix(["model.embed_tokens.weight"])
        tokens = op.gather(embedding, self.inputs["token_ids"], _int(0))
        if self.config.model_type == "gemma3_text":
            tokens = op.multiply(tokens, _float(self._embedding_scale()))
        states = op.unsqueeze(tokens, _int(1))  # [N, 1, hidden_size]
        inputs = []
        for index, layer in enumerate(inner.layers):
            inputs.append(states)
            states = self._layer(index, layer, states)
        wanted_states = op.gather(states, self.inputs["wanted"], _int(0))
        states = self._norm("model.norm", inner.norm, wanted_states)
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        logits = self._linear([head], states, vocab_size)
        wanted = [logits, states] if gives_hidden else [logits]
        if state_layers:
            wanted = [logits, op.concat([inputs[i] for i in state_layers], -1)]
        return self._model(wanted)

    def _model(self, wanted: Sequence[Any]) -> ov.Model:
        """wanted: the results, [N, 1, width] each."""
        results = [op.result(op.squeeze(result, _int(1))) for result in wanted]
        return ov.Model(results, [*self.inputs.values(), self.longest, *self.caches], "decoder")

    def _layer(self, index: int, layer: Any, states: Any) -> Any:
        name = f"model.layers.{index}"
        normed = self._norm(f"{name}.input_layernorm", layer.input_layernorm, states)
        out = self._attention(index, name, layer, normed)
        has_outer_norms = hasattr(layer, "pre_feedforward_layernorm")
        before_mlp = "post_attention_layernorm"
        if has_outer_norms:
            norm, before_mlp = layer.post_attention_layernorm, "pre_feedforward_layernorm"
            out = self._norm(f"{name}.post_attention_layernorm", norm, out)
        states = op.add(states, out)
        out = self._mlp(
            name, layer.mlp, self._norm(f"{name}.{before_mlp}", getattr(layer, before_mlp), states)
        )
        if has_outer_norms:
            norm = layer.post_feedforward_layernorm
            out = self._norm(f"{name}.post_feedforward_layernorm", norm, out)
        return op.add(states, out)

    def _attention(self, index: int, name: str, layer: Any, normed: Any) -> Any:
        """[N, 1, hidden_size]. index: of the layer's cache."""
        attention = layer.self_attn
        *both, values = self._attention_inputs(f"{name}.self_attn", attention, normed)
        layer_type = self.config.layer_types[index] if None not in self.rotations else None
        queries, keys = (
            self._rotated(
                heads,
                f"{name}.self_attn.{part}_norm",
                getattr(attention, f"{part}_norm", None),
                self.rotations[layer_type] if getattr(attention, "use_rope", True) else None,
            )
            for part, heads in zip("qk", both, strict=True)
        )
        values = op.squeeze(values, _int(1))
        window = attention_window(layer, self.config, self.max_len)
        attended = self._attend(
            index, queries, keys, values, scaling=attention.scaling, window=window or 0
        )
        return self._linear([f"{name}.self_attn.o_proj"], op.unsqueeze(attended, _int(1)))

    def _mlp(self, name: str, mlp: Any, normed: Any) -> Any:
        gate, up = self._mlp_inputs(name, mlp, normed)
        return self._linear([f"{name}.mlp.down_proj"], op.multiply(self._activated(gate), up))

    def _attention_inputs(self, name: str, attention: Any, normed: Any) -> Sequence[Any]:
        """Queries, keys and values, [N, 1, heads * D] each."""
        parts = (
            ["qkv_proj"]
            if hasattr(attention, "qkv_proj")
            else [f"{letter}_proj" for letter in "qkv"]
        )
        config = self.config
        heads = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
        return self._split(name, parts, normed, [num * self.head_dim for num in heads])

    def _mlp_inputs(self, name: str, mlp: Any, normed: Any) -> Sequence[Any]:
        """Gate and the values that it multiplies, [N, 1, width] each."""
        parts = ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]
        return self._split(f"{name}.mlp", parts, normed, [mlp.down_proj.in_features] * 2)

    def _split(
        self, name: str, parts: Sequence[str], states: Any, widths: Sequence[int]
    ) -> Sequence[Any]:
        """The parts of one product. A product costs microseconds of its own, so these are joined:
        with the 30 small layers of a model of 135 M parameters, a pass takes 0.92 of the time."""
        out = self._linear([f"{name}.{part}" for part in parts], states)
        return op.variadic_split(out, _int(-1), _ints(*widths)).outputs()  # type: ignore[no-any-return]

    def _embedding_scale(self) -> float:
        """In the type of the files, as in training."""
        dtype = self.weights.tensors["model.embed_tokens.weight"].dtype
        return torch.tensor(self.config.hidden_size**0.5).to(dtype).item()

    def _activated(self, gate: Any) -> Any:
        if activation(self.config) == "silu":
            return self._silu(gate)
        return op.gelu(gate, "tanh")

    def _silu(self, states: Any) -> Any:
        """If SiLU is written with a sigmoid, OpenVINO runs the MLP as one operator on processors
        with AMX. A pass of up to 32 tokens then takes 0.90 to 0.95 of the time. With one thread,
        this operator of 2026.4 divides by zero. A swish with an explicit beta does not use it."""
        if self.num_threads == 1:
            return op.swish(states, _float(1.0))
        return op.multiply(states, op.sigmoid(states))

    def _rotated(self, states: Any, name: str, norm: Any, rotation: Any) -> Any:
        """[N, 1, heads * D] -> [N, heads * D]: the first part of each head is rotated. The head
        norm, if any, is applied first. rotation: half of the part's width, cosines, sines; None
        rotates nothing."""
        if rotation is None:
            return op.squeeze(states, _int(1))
        half, cos, sin = rotation
        heads = op.reshape(states, _ints(0, 0, -1, self.head_dim), special_zero=True)
        if norm is not None:
            heads = self._norm(name, norm, heads)
        heads = op.transpose(heads, _ints(0, 2, 1, 3))  # [N, heads, 1, D]

        def between(first: int, end: int) -> Any:
            return op.slice(heads, _ints(first), _ints(end), step=_ints(1), axes=_ints(3))

        part, rest = heads, []
        if 2 * half < self.head_dim:
            part, rest = between(0, 2 * half), [between(2 * half, self.head_dim)]
        turned = op.concat(
            [op.multiply(between(half, 2 * half), _float(-1.0)), between(0, half)], -1
        )
        rotated = op.add(op.multiply(part, cos), op.multiply(turned, sin))
        if rest:
            rotated = op.concat([rotated, *rest], -1)
        return op.reshape(op.transpose(rotated, _ints(0, 2, 1, 3)), _ints(0, -1), special_zero=True)

    def _by_position(self, table: torch.Tensor) -> tuple[int, Any, Any]:
        """From [2, max_len, D / 2]: D / 2, and [N, 1, 1, D] cosines and sines of the tokens."""
        tables = [
            op.gather(op.constant(numbers.numpy()), self.inputs["positions"], _int(0))
            for numbers in torch.cat([table, table], dim=-1).float()
        ]
        cos, sin = (op.unsqueeze(op.unsqueeze(table, _int(1)), _int(1)) for table in tables)
        return table.shape[-1], cos, sin

    def _attend(
        self, index: int, queries: Any, keys: Any, values: Any, scaling: float, window: int
    ) -> Any:
        """Attention output [N, heads * D]. window: positions that a query sees; 0 means all."""
        inputs = self.inputs
        queries, keys, values = (
            op.gather(states, inputs["attended"], _int(0)) for states in (queries, keys, values)
        )
        nothing, no_floats = (
            op.constant(np.zeros(0, np.int32)),
            op.constant(np.zeros(0, np.float32)),
        )
        zero = op.constant(np.int32(0))
        operands = [queries, keys, values, *self.caches[2 * index : 2 * index + 2]]
        operands += [inputs["past_lens"], inputs["subsequence_begins"]]
        operands += [inputs["block_indices"], inputs["block_indices_begins"]]
        operands += [_float(scaling), op.constant(np.int32(window)), no_floats, self.longest]
        # Scores, rotated blocks, sparse attention, sinks, evicted blocks, mask between queries.
        operands += [nothing, nothing, nothing, no_floats, no_floats, zero, zero]
        operands += [op.constant(np.zeros((0, 0, 0, 0), np.float32)), zero]
        operands += [nothing, nothing, nothing, nothing]
        # Masks of trees, and where they begin.
        operands += [op.constant(np.zeros(0, np.uint8)), nothing]
        node = _PagedAttentionExtension([operand.output(0) for operand in operands])
        info = node.get_rt_info()
        for name in ("k", "v"):
            info[f"num_{name}_heads"] = self.config.num_key_value_heads
            info[f"{name}_head_size"] = self.head_dim
        return op.gather(node.output(0), inputs["kept"], _int(0))

    def _norm(self, name: str, norm: Any, states: Any) -> Any:
        is_gemma = not hasattr(norm, "variance_epsilon")  # and stores the weight less 1
        eps = norm.eps if is_gemma else norm.variance_epsilon
        mean = op.reduce_mean(op.power(states, _float(2.0)), _ints(-1), keep_dims=True)
        inverse = op.divide(_float(1.0), op.sqrt(op.add(mean, _float(eps))))
        weight = self.weights.stored(f"{name}.weight")
        weight = self._stored(weight.float() + 1.0 if is_gemma else weight)
        return op.multiply(op.multiply(states, inverse), weight)

    def _linear(self, names: Sequence[str], states: Any, num_rows: int | None = None) -> Any:
        """The product with the first num_rows rows of the joined weights, with what the adapters
        add to it, and the bias if there is one."""
        adapted = [name for name in names if name in self.adapters.layers]
        weights = [f"{name}.weight" for name in names] + [name + MATRIX_A for name in adapted]
        products = [_product(states, parts) for parts in self._matrices(weights, num_rows)]
        out = products[0] if len(products) == 1 else op.concat(products, -1)
        if adapted:
            out = self._with_adapters(out, names, adapted)
        biases = [f"{name}.bias" for name in names]
        if biases[0] not in self.weights.tensors:
            return out
        return op.add(out, self._stored(self.weights.stored(*biases)))

    def _with_adapters(self, out: Any, names: Sequence[str], adapted: Sequence[str]) -> Any:
        """out: W x of these layers and then A x of the adapted ones, [N, 1, width]. Returns
        W x + B A x, with the A of each token's own adapter."""
        ranks = [self.adapters.rank] * len(adapted)
        widths = [self.widths[name] for name in names]
        parts = op.variadic_split(out, _int(-1), _ints(*widths, *ranks)).outputs()
        inner = dict(zip(adapted, parts[len(names) :], strict=True))
        whole = []
        for name, part in zip(names, parts, strict=False):
            if name in inner:
                # Selected and not multiplied: infinity of another adapter becomes 0.
                own = op.select(self.own_columns, inner[name], _float(0.0))
                matrix_b = self._stored(self.adapters.joined(name)[1])
                part = op.add(part, op.matmul(own, matrix_b, False, True))
            whole.append(part)
        return whole[0] if len(whole) == 1 else op.concat(whole, -1)

    def _matrices(self, names: Sequence[str], num_rows: int | None) -> list[list[Any]]:
        """The parts of the weights of these names: of neighbours as one matrix, where the files'
        own 4 bits are kept for all of them or for none."""
        kept = {name: self._kept(name) for name in names}
        matrices = []
        for is_kept, run in groupby(names, key=lambda name: kept[name] is not None):
            if is_kept:
                weight = joined([weight for name in run if (weight := kept[name]) is not None])
                columns = columns_of(2 * weight.values.shape[1], self.most_width, self.group)
                matrices.append(self._int4(by_columns(weight, columns)))
            else:
                matrices.append(self._matrix(list(run), num_rows, self.most_width))
        return matrices

    def _kept(self, name: str) -> Compressed | None:
        if not self.keeps_4_bits or not name.startswith(LAYERS):
            return None
        return self.weights.kept(name)

    def _matrix(
        self, names: Sequence[str], num_rows: int | None = None, most_width: int | None = None
    ) -> list[Any]:
        """The weight [out, in] of a product or of the embeddings, as float32 in the graph; one
        after another, its parts by columns if it is wider than most_width."""
        if not self.num_bits:
            return [self._stored(self.weights.stored(*names)[:num_rows])]
        if self.num_bits == 8 or not names[0].startswith(LAYERS):
            return self._int8(self.weights.int8(*names, most_width=most_width), num_rows)
        return self._int4(self.weights.int4(self.group, *names, most_width=most_width))

    def _int8(self, parts: Sequence[Compressed], num_rows: int | None) -> list[Any]:
        made = []
        for part in parts:
            values = part.values[:num_rows]
            integers = self._constant(values, values.shape, ov.Type.i8)
            scale = op.constant(part.scale[:num_rows].numpy())
            made.append(op.multiply(op.convert(integers, np.float32), scale))
        return made

    def _int4(self, parts: Sequence[Compressed]) -> list[Any]:
        made = []
        for part in parts:
            num_out, num_groups, _ = part.scale.shape
            width = 2 * part.values.shape[1]
            shape = num_out, num_groups, width // num_groups
            integers = self._constant(part.values, shape, ov.Type.u4)
            zero, scale = (op.constant(numbers.numpy()) for numbers in (part.zero, part.scale))
            shifted = op.subtract(op.convert(integers, np.float32), op.convert(zero, np.float32))
            whole = _ints(num_out, width)
            made.append(op.reshape(op.multiply(shifted, scale), whole, special_zero=False))
        return made

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(tensor.byte_size for tensor in self.memory if isinstance(tensor, ov.Tensor))

    def _constant(self, numbers: torch.Tensor, shape: Sequence[int], dtype: ov.Type) -> Any:
        """A constant on the memory of the numbers, which may hold several values in a byte."""
        array = numbers.numpy()
        tensor = ov.Tensor(array, ov.Shape(list(shape)), dtype)
        self.memory += [array, tensor]
        return op.constant(tensor, shared_memory=True)

    def _stored(self, weight: torch.Tensor) -> Any:
        """The weight as float32 in the graph, on its own memory.

        Products in half precision keep weights of half precision. Those in float32 get them as
        float32: otherwise OpenVINO 2026.4 converts them in each pass, and sums in another order in
        passes of up to 4 tokens (with two threads) and of 256 and more, if a product is 4,096 wide.
        """
        if weight.dtype == torch.float32 or not self.is_half:
            weight = weight.float()
            return self._constant(weight, weight.shape, ov.Type.f32)
        stored = self._constant(weight.view(torch.int16), weight.shape, TYPES[weight.dtype])
        converted = _conversion(self.marked.clone())
        converted.input(0).replace_source_output(stored.output(0))
        converted.constructor_validate_and_infer_types()
        return converted


def _product(states: Any, parts: Sequence[Any]) -> Any:
    """With a weight of which these are the parts by columns."""
    widths = [part.get_output_shape(0)[1] for part in parts]
    inputs = [states]
    if len(parts) > 1:
        inputs = op.variadic_split(states, _int(-1), _ints(*widths)).outputs()
    products = [
        op.matmul(given, weight, transpose_a=False, transpose_b=True)
        for given, weight in zip(inputs, parts, strict=True)
    ]
    return reduce(op.add, products)


def _marked() -> ov.Model:
    """A model with one marked conversion. The mark makes OpenVINO keep weights in their stored
    precision instead of converting them once. The Python API cannot set this mark."""
    inputs = op.parameter([1, 64], np.float32)
    made = op.matmul(inputs, op.constant(np.ones((64, 64), np.float32)), False, True)
    model = ov.Model([op.result(made)], [inputs], "compressed")
    compress_model_transformation(model)
    return model


def _conversion(model: ov.Model) -> Any:
    return next(
        operator for operator in model.get_ordered_ops() if operator.get_type_name() == "Convert"
    )


def _parameter(name: str, shape: Sequence[int], dtype: Any) -> Any:
    node = op.parameter(list(shape), dtype, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def _int(value: int) -> Any:
    return op.constant(np.int64(value))


def _ints(*values: int) -> Any:
    return op.constant(np.array(values, np.int64))


def _float(value: float) -> Any:
    return op.constant(np.float32(value))
