"""Runs a model with OpenVINO on a CPU: the same passes as `PyTorchRunner`, with other kernels.

Whole passes are faster than separate calls of PyTorch operators, most of all with many sequences
of one token (docs/research/performance.md). It supports the models of `can_write_out`.

The logits of a token have the same bits in every pass, whatever else the pass computes, however
its prompt was cut into chunks, and whatever part of it was cached. OpenVINO chooses among kernels
that sum in different orders, so each kind of token is always computed by the same ones:
- Products with experts have one row each, see `experts`. No other product has a single row: a lone
  token gets a padding token beside it, or its copy.
- Products in float32 have no weights of half precision, see `graph`.
- If weights have 8 or 4 bits and activations are not rounded to 8 bits, products are in float32, at
  most MOST_WIDTH wide, and have at most MOST_TOKENS rows, or FEWER_TOKENS. This is so without VNNI,
  and with widths that none of GROUPS divides. Models with large matrices of 8 bits have products of
  whole numbers there, see LEAST_WEIGHTS.
- Tokens of a prompt are attended together, at least two at a time, see `with_copy`.
- Keys in 8 bits have one scale per token. OpenVINO's default, one per channel of a block, would be
  computed again when the block gets more tokens.
- All other tokens, generated ones and drafts, are attended as separate sequences of one token each
  that share the row's blocks. A pass writes all its keys before it reads any.
- Recurrent states are computed in tiles, each from its first token on, see `recurrent`.

Rows that begin alike may share their first blocks, in the same pass too. A row writes only to
blocks of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import openvino as ov
import torch

from smartspec_py.cache_dir import cache_dir
from smartspec_py.engines.checkpoints.checks import GEMMA_4, GPT_OSS, LFM2, ModelError
from smartspec_py.engines.checkpoints.config import load_config, model_without_weights
from smartspec_py.engines.checkpoints.experts import (
    EXPERT_BIAS,
    EXPERTS,
    ByExpert,
    has_experts,
    usual_name,
)
from smartspec_py.engines.checkpoints.mtp import mtp_parameters
from smartspec_py.engines.checkpoints.quantized import MXFP4_BYTES
from smartspec_py.engines.checkpoints.recurrent import TILE, state_shapes
from smartspec_py.engines.checkpoints.tensors import (
    CheckedTensors,
    check_complete,
    check_tied,
    check_used,
    source_files,
)
from smartspec_py.engines.phases import PREPARING, begin
from smartspec_py.engines.runtimes.machine import cpu_has, free_bytes, has_vnni
from smartspec_py.engines.runtimes.openvino.attention import BLOCK_LEN, INPUTS, LONGEST
from smartspec_py.engines.runtimes.openvino.cache import BlockCache
from smartspec_py.engines.runtimes.openvino.experts import NUM_TOKENS
from smartspec_py.engines.runtimes.openvino.gemma4 import LAST, LAST_INPUTS, Gemma4Graph
from smartspec_py.engines.runtimes.openvino.gpt_oss import GptOssGraph
from smartspec_py.engines.runtimes.openvino.graph import DecoderGraph
from smartspec_py.engines.runtimes.openvino.lfm2 import Lfm2Graph
from smartspec_py.engines.runtimes.openvino.model_types import unused_weights
from smartspec_py.engines.runtimes.openvino.operators import share_constants
from smartspec_py.engines.runtimes.openvino.parts import (
    attended_parts,
    bounded,
    cut,
    of_like_lengths,
    with_copy,
)
from smartspec_py.engines.runtimes.openvino.products import MATRIX_A, OWN_ADAPTERS, Products
from smartspec_py.engines.runtimes.openvino.short_convs import ConvStates
from smartspec_py.engines.runtimes.openvino.states import States
from smartspec_py.engines.runtimes.openvino.weights import Weights
from smartspec_py.engines.runtimes.openvino.weights_file import WeightsFile
from smartspec_py.engines.runtimes.runner import (
    OPENVINO,
    Parts,
    PassOutput,
    RowInput,
    Runner,
    RunnerConfig,
    joined,
)

GROUPS = (128, 64, 32)
"""With compressed weights, so many activations are rounded to 8 bits with one scale: the first of
these that divides the width of every product. One scale for a whole row would be less accurate.
Weights of 4 bits have the same groups."""

NUM_BITS = {"stored": 0, "int8": 8, "int4": 4}

LEAST_WEIGHTS, LEAST_BLOCK, MOST_BLOCK = 1_000_000, 32, 64
"""With AVX2 and without VNNI, products of whole numbers (`Products`) need about ten small operators
each. So they pay if matrices have so many weights on average: passes of Qwen2.5-0.5B take 0.63 to
1.06 of the time, those of SmolLM2-135M 0.95 to 1.3 (AMD EPYC Zen 3). Weights are rotated in blocks
of columns: the largest power of 2 that divides all widths, from LEAST_BLOCK to MOST_BLOCK."""

MOST_WIDTH, MOST_TOKENS = 2_048, 80
"""Without rounded activations, OpenVINO 2026.4 converts compressed weights in each pass. It then
sums in another order in passes of more than 80 tokens, and of up to 4 or 8 tokens in wider products
(with AVX2 from 4,224, with AVX512 from 2,304). So wider products are computed in parts, and larger
passes in several. A pass of 1.0 B over one token then takes 1.1 of the time, and one over more
tokens 0.75 to 0.97 (docs/research/performance.md)."""

EVEN_ROWS, FEWER_TOKENS = 32, 64
"""The same happens in passes of more than 64 tokens if a weight has a number of rows that 32 does
not divide, such as the output layer of a vocabulary of 151,665 tokens (with AVX2, and products
wider than 512)."""

MOST_IN_TILES = 128
"""Tokens of a pass with recurrent states. OpenVINO keeps what the layers compute of them, 2 MB a
token with 18 such layers of 1,024, and more tokens take hardly less time each."""

MOST_COPIES, COPIED_BYTES = 3, 1 << 30
"""A pass of another size than the one before takes longer, because OpenVINO prepares each operator
again: 3 ms with the 30 layers of SmolLM2-135M, a third of a pass of one token. So there are several
copies of the compiled graph, each warm for the shape of its last pass. All copies but the first
take at most so much memory for their weights, and an eighth of what is free."""

MOST_PADDING, PARAMETERS_PER_LAYER = 2, 50_000_000
"""A pass can get tokens that nobody reads, so that a copy has its size. Another size costs about as
much per layer as a token per 50 million parameters (AMD EPYC Zen 5). Models with more parameters
per layer get no padding and no further copies."""

CHEAP_TOKENS = 4
"""Without rounded activations, a pass over 5 tokens takes 1.7 times as long as one over 4 (AVX2).
So padding does not lead beyond 4."""

HALF = {torch.bfloat16: "BF16", torch.float16: "FP16"}
"""Precisions that not every processor has, by their names in OpenVINO."""


@dataclass(slots=True)
class _Copy:
    """A compiled copy of the graph. num_tokens: of its last pass, with padding."""

    request: ov.InferRequest
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Numbers:
    """How products are computed. num_bits, block: see `Products`. group: activations that are
    rounded with one scale; 0 rounds none. is_bounded: whether products have at most MOST_WIDTH
    columns, and passes at most MOST_TOKENS tokens."""

    num_bits: int
    group: int
    block: int
    is_bounded: bool


class OpenVinoRunner(Runner):
    """A model that OpenVINO compiled. config.dtype: the precision of the products. It becomes
    float32 if the processor lacks this precision, or bits would depend on the pass."""

    runtime = OPENVINO
    cache: BlockCache
    states: States | ConvStates | None = None
    _graph_class: type[DecoderGraph] | None = None
    """None chooses it by the type of the model."""

    def __init__(
        self,
        model: Any,
        config: RunnerConfig,
        weights: Weights | None = None,
        most_copies: int | None = None,
        numbers: Numbers | None = None,
    ) -> None:
        """model: of Transformers; it is not used after this call. weights: None takes those of the
        model. most_copies: None means MOST_COPIES. numbers: how products are computed, if this is
        known. Raises ModelError."""
        core, of_model = ov.Core(), weights or Weights(ByExpert(model.state_dict()))
        if numbers is None:
            precisions = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            config, numbers = _numbers(model, config, of_model, precisions)
        self.numbers = numbers
        super().__init__(config)
        self._most_tokens, shapes = config.num_rows * config.max_len, state_shapes(model.config)
        if numbers.is_bounded:
            rows = {layer.out_features for layer in _linear_layers(model)}
            rows |= {config.vocab_size, config.adapters.rank}
            is_even = not any(num % EVEN_ROWS for num in rows)
            self._most_tokens = MOST_TOKENS if is_even else FEWER_TOKENS
        elif shapes is not None and shapes.delta:
            self._most_tokens = MOST_IN_TILES
        products = _products(model, config, of_model, numbers)
        is_kept = config.has_mtp or config.keeps_weights
        self.weights = products.weights if is_kept else None
        """Until what drafts with them is loaded: they hold the model's files."""
        graph_class = self._graph_class or _graph_class(model.config)
        graph = graph_class(model, products, max_len=config.max_len, num_threads=config.num_threads)
        built = graph.build(model, config)
        self._memory = products.memory
        self.config = replace(config, keeps_experts=products.has_kept_experts)
        share_constants(built)
        if self.weights is None:
            of_model.finish()
        num_parameters = sum(weight.numel() for weight in model.parameters())
        wanted: int = len(model.model.layers) * PARAMETERS_PER_LAYER // max(1, num_parameters)
        self._most_padding = min(MOST_PADDING, wanted)
        self._cheap_tokens = CHEAP_TOKENS if numbers.is_bounded else 0
        most_bytes = min(COPIED_BYTES, free_bytes(config.device) // 8) if wanted else 0
        most_copies = most_copies or MOST_COPIES
        num_copies = 1 + min(most_copies - 1, most_bytes // max(1, products.num_bytes))
        compiled = _compiled(core, built, _settings(config, numbers), num_copies)
        self.compiled = compiled[0]
        self._copies = [_Copy(graph.create_infer_request()) for graph in compiled]
        """The one whose last pass was first comes first."""
        self._places = {parameter.any_name: i for i, parameter in enumerate(self.compiled.inputs)}
        """The index of each input. OpenVINO takes 2 us longer to find it."""
        types: dict[str, Any] = {**INPUTS, LONGEST: np.int32}
        types |= dict.fromkeys([OWN_ADAPTERS, NUM_TOKENS], np.int64) | LAST_INPUTS
        self._input_types = {name: types[name] for name in types if name in self._places}
        self._hidden_size: int = model.config.hidden_size
        self.cache = self._own_cache(model)
        tensors = {name: t for name, t in self.cache.tensors.items() if name in self._places}
        if shapes is not None:
            store = States if shapes.delta else ConvStates
            self.states = store(shapes, config.num_rows, config.num_back, config.num_kept_states)
            tensors = tensors | self.states.tensors
        for copy, (name, tensor) in product(self._copies, tensors.items()):
            copy.request.set_tensor(name, tensor)

    def _own_cache(self, model: Any) -> BlockCache:
        return BlockCache(self.compiled, model, self.config)

    @property
    def about(self) -> str:
        version = ov.get_version().split("-")[0]
        return f"{OPENVINO} {version}{self.config.weights_text}{self.config.cache_text}"

    @property
    def bytes_per_token(self) -> int:
        return self.cache.block_bytes // BLOCK_LEN

    def forward(
        self, inputs: Sequence[RowInput], token_ids: torch.Tensor | None = None
    ) -> PassOutput:
        """In several passes if one cannot compute all tokens: see `_passes`."""
        assert token_ids is None, "tokens are on the host"
        passes = self._passes(inputs)
        if len(passes) == 1:
            return self._pass(inputs)
        return joined(passes, [self._pass([part for _, part in parts]) for parts in passes])

    def _passes(self, inputs: Sequence[RowInput]) -> Sequence[Parts]:
        """What each pass computes. If an input has tokens of both kinds, those of its prompt come
        first: in one pass, OpenVINO gives wrong results for a sequence that shares blocks with one
        of several tokens. See MOST_TOKENS."""
        first: list[tuple[int, RowInput]] = []
        second: list[tuple[int, RowInput]] = []
        for index, row in enumerate(inputs):
            if 0 < row.num_prompt < len(row.tokens):
                prompt, rest = cut(row, row.num_prompt)
                first.append((index, prompt))
                second.append((index, rest))
            elif self._has_long_draft(row):
                known, drafts = cut(row, 1)
                first.append((index, known))
                second.append((index, drafts))
            else:
                first.append((index, row))
        passes = [first, second] if second else [first]
        if isinstance(self.states, States):
            passes = [part for parts in passes for part in of_like_lengths(parts)]
        return [part for parts in passes for part in bounded(parts, self._most_tokens)]

    def _has_long_draft(self, row: RowInput) -> bool:
        """See `States.is_behind`."""
        if row.num_prompt or not isinstance(self.states, States) or len(row.tokens) <= TILE:
            return False
        return self.states.is_behind(row)

    def _pass(self, inputs: Sequence[RowInput]) -> PassOutput:
        given = [with_copy(row) for row in inputs]
        parts = [part for row in given for part in attended_parts(row)]
        *firsts, num_tokens = np.cumsum([0, *(len(row.tokens) for row in given)]).tolist()
        wanted = [
            first + i
            for row, first in zip(inputs, firsts, strict=True)
            for i in range(len(row.tokens) - row.num_logits, len(row.tokens))
        ]
        copy = self._copy_for(max(2, num_tokens))
        request, padding = copy.request, copy.num_tokens - num_tokens
        # Two, because the output layer is a product too, and some operators fail with no rows.
        num_results, layers = max(2, len(wanted) + padding), self.config.state_layers
        last = None
        if LAST in self._places:
            last, wanted = _last_tokens(inputs, firsts)
        self._set_inputs(
            request, parts, [*wanted, *[0] * (num_results - len(wanted))], padding, last
        )
        if self.states is not None:
            lens = [len(row.tokens) for row in given]
            for name, numbers in self.states.begin(inputs, lens, copy.num_tokens).items():
                request.set_input_tensor(self._places[name], ov.Tensor(numbers))
        # Each pass gets its own output memory; the next pass would overwrite OpenVINO's buffer.
        logits = torch.empty(num_results, self.config.vocab_size)
        request.set_output_tensor(0, ov.Tensor(logits.numpy(), shared_memory=True))
        hidden = None
        if self.config.gives_hidden or layers:
            num_states = copy.num_tokens if layers else num_results
            width = self.compiled.outputs[1].partial_shape[1].get_length()
            hidden = torch.empty(num_states, width)
            request.set_output_tensor(1, ov.Tensor(hidden.numpy(), shared_memory=True))
            hidden = hidden[: num_tokens if layers else len(wanted)]
        request.infer(share_outputs=True)  # else it also copies them
        if self.states is not None:
            first = 1 + (hidden is not None)
            outputs = range(first, first + len(self.states.tensors))
            self.states.finish([request.get_output_tensor(i).data for i in outputs])
        states = zip(self._by_input(hidden, given), inputs, strict=False)
        own = [states_of_row[: len(row.tokens)] for states_of_row, row in states]
        return PassOutput(logits[: len(wanted)], own)

    @property
    def warm_shapes(self) -> Collection[int]:
        """With padding. A lone token always has some."""
        paddings = range(self._most_padding + 1)
        sizes = {
            copy.num_tokens - padding
            for copy in self._copies
            for padding in paddings
            if self._fits(copy.num_tokens - padding, copy)
        }
        return sizes | {1} if 2 in sizes else sizes

    def _copy_for(self, num_tokens: int) -> _Copy:
        """The copy for a pass of so many tokens: one of that size or little more, or else the one
        that was not used for the longest time."""
        fitting = [copy for copy in self._copies if self._fits(num_tokens, copy)]
        chosen = min(fitting, key=attrgetter("num_tokens"), default=self._copies[0])
        if not fitting:
            chosen.num_tokens = num_tokens
        self._copies.remove(chosen)
        self._copies.append(chosen)
        return chosen

    def _fits(self, num_tokens: int, copy: _Copy) -> bool:
        """Whether a pass of so many tokens may get padding up to the size of the copy."""
        if num_tokens <= self._cheap_tokens < copy.num_tokens:
            return False
        padding: int = copy.num_tokens - num_tokens
        return 0 <= padding <= self._most_padding

    def warm(self) -> None:
        """The first pass of each copy takes 0.3 to 0.5 s longer with 0.5 B (AMD EPYC Zen 3)."""
        for number in range(len(self._copies)):
            self.time_pass(1, 1 + number * (MOST_PADDING + 1), 0)

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Without padding."""
        given = batch_size, tokens_per_row, context_len, num_logits
        self.cache.occupy(batch_size, min(context_len + tokens_per_row, self.config.max_len))
        if self.states is not None:
            position = min(context_len, self.config.max_len - tokens_per_row)
            self.states.pretend(batch_size, max(0, position))
        kept, self._most_padding = self._most_padding, 0
        try:
            return super().time_pass(*given)
        finally:
            self._most_padding = kept

    def _sequences(self, parts: Sequence[RowInput]) -> dict[str, Any]:
        """What the attention reads of these parts, by the names of INPUTS."""
        starts = [part.position - part.first for part in parts]
        blocks = [
            self.cache.blocks_of(part, start + len(part.tokens))
            for start, part in zip(starts, parts, strict=True)
        ]
        return {
            "past_lens": starts,
            "subsequence_begins": np.cumsum([0, *(len(part.tokens) for part in parts)]),
            "block_indices": np.concatenate(blocks),
            "block_indices_begins": np.cumsum([0, *map(len, blocks)]),
        }

    def release(self) -> None:
        self.cache.release()
        if self.states is not None:
            self.states.release()

    def _set_inputs(
        self,
        request: ov.InferRequest,
        parts: Sequence[RowInput],
        wanted: Sequence[int],
        padding: int = 0,
        last: tuple[list[RowInput], list[int]] | None = None,
    ) -> None:
        """padding: tokens behind those of the parts, which nobody reads. last: parts with the
        tokens that go through the last layers, and which tokens of the pass these are."""
        num_tokens = sum(len(part.tokens) for part in parts)
        filler = RowInput(0, 0, (0,), 0, blocks=self.cache.padding)
        parts = [*parts, *[filler] * padding]
        positions = [position for part in parts for position in part.positions]
        given: dict[str, Any] = {
            "token_ids": [token for part in parts for token in part.tokens],
            "positions": np.minimum(positions, self.config.max_len - 1),  # of the last one's copy
            "wanted": wanted,
            **self._sequences(parts),
            LONGEST: max(part.position - part.first + len(part.tokens) for part in parts),
            NUM_TOKENS: [num_tokens],
            OWN_ADAPTERS: [part.adapter for part in parts for _ in part.tokens],
        }
        if last is not None:
            parts, tokens = last
            padding = max(padding, 2 - len(tokens))  # no product has fewer rows
            of_last = self._sequences([*parts, *[filler] * padding])
            given |= {f"last_{name}": each for name, each in of_last.items()}
            given |= {LAST: [*tokens, *[0] * padding], LONGEST: given[LONGEST] + 1}  # with a copy
        for name, dtype in self._input_types.items():
            request.set_input_tensor(self._places[name], ov.Tensor(np.asarray(given[name], dtype)))


def _last_tokens(
    inputs: Sequence[RowInput], firsts: Sequence[int]
) -> tuple[tuple[list[RowInput], list[int]], list[int]]:
    """The parts with the wanted tokens of the inputs, see `gemma4`, and which tokens of the pass
    these are; and the wanted ones among them. firsts: first token of each input in the pass."""
    parts: list[RowInput] = []
    tokens: list[int] = []
    wanted: list[int] = []
    for row, first in zip(inputs, firsts, strict=True):
        num_before = len(row.tokens) - row.num_logits
        rest = cut(row, num_before)[1]
        given = with_copy(rest)
        own = range(first + num_before, first + len(row.tokens))
        wanted += range(len(tokens), len(tokens) + len(own))
        tokens += [*own, *list(own[-1:]) * (len(given.tokens) - len(own))]
        parts += attended_parts(given)
    return (parts, tokens), wanted


def _graph_class(hf_config: Any) -> type[DecoderGraph]:
    if hf_config.model_type in LFM2:
        return Lfm2Graph
    if hf_config.model_type == GPT_OSS:
        return GptOssGraph
    return Gemma4Graph if hf_config.model_type in GEMMA_4 else DecoderGraph


def _numbers(
    model: Any, config: RunnerConfig, weights: Weights, precisions: Sequence[str]
) -> tuple[RunnerConfig, Numbers]:
    """How this processor computes the products, and the config with the precision that they have.
    precisions: of the processor."""
    num_bits = NUM_BITS[config.weights]
    group = _group(model) if num_bits else 0
    if num_bits == 4 and not group:
        raise ModelError(
            f"engine.weights: int4 needs products whose width {GROUPS[-1]} divides: use int8"
        )
    kept_group = weights.kept_group if config.keeps_4_bits and group else 0
    if kept_group:  # the scale of a group of activations is multiplied by one of the weights
        group = min(group, kept_group)
    has_integers = group > 0 and has_vnni()
    is_whole = num_bits == 8 and not has_integers and cpu_has("avx2")
    block = _block(model) if is_whole else 0
    is_bounded = num_bits > 0 and not has_integers and not block
    # In half precision and with AMX, those of experts would have other kernels for a lone token.
    # States are in float32, and drafts may never change one.
    is_float = is_bounded or block or has_experts(model.config)
    is_float = is_float or state_shapes(model.config) is not None
    is_half = not is_float and HALF.get(config.dtype) in precisions
    dtype = config.dtype if is_half else torch.float32
    config = replace(config, keeps_4_bits=kept_group > 0, dtype=dtype)
    return config, Numbers(num_bits, group, block, is_bounded)


def _products(model: Any, config: RunnerConfig, weights: Weights, numbers: Numbers) -> Products:
    matrices = {
        f"{layer}{MATRIX_A}": config.adapters.joined(layer)[0].to(config.dtype)
        for layer in config.adapters.layers
    }
    return Products(
        model,
        weights.with_added(matrices) if matrices else weights,
        num_bits=numbers.num_bits,
        group=numbers.group,
        block=numbers.block,
        is_half=config.dtype in HALF,
        most_width=MOST_WIDTH if numbers.is_bounded else None,
        keeps_4_bits=config.keeps_4_bits,
        keeps_experts=config.keeps_experts,
        adapters=config.adapters,
    )


def _settings(config: RunnerConfig, numbers: Numbers) -> dict[str, Any]:
    """Of OpenVINO."""
    precision = HALF.get(config.dtype, "f32").lower()
    # Rounding to 16 bits changes less than compressed weights do.
    of_keys = "f16" if numbers.num_bits and precision == "f32" else precision
    return {
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": numbers.group,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": "u8" if config.kv_cache == "u8" else of_keys,
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        "INFERENCE_NUM_THREADS": config.num_threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }


def _compiled(
    core: ov.Core, built: ov.Model, settings: dict[str, Any], num_copies: int
) -> list[ov.CompiledModel]:
    begin(PREPARING)
    num_threads = settings["INFERENCE_NUM_THREADS"]
    with ThreadPoolExecutor(num_threads) as threads:  # OpenVINO compiles with one
        tasks = [
            threads.submit(core.compile_model, built, "CPU", settings) for _ in range(num_copies)
        ]
    return [task.result() for task in tasks]


def _group(model: Any) -> int:
    """Numbers with one scale; 0, which rounds no activations, if no group divides all widths."""
    widths = {layer.in_features for layer in _linear_layers(model)}
    matrices = ByExpert(dict(model.named_parameters()))
    widths |= {matrices[name].shape[-1] for name in matrices if f"{EXPERTS}0." in name}
    return next((g for g in GROUPS if not any(width % g for width in widths)), 0)


def _block(model: Any) -> int:
    """See LEAST_WEIGHTS."""
    layers = _linear_layers(model)
    mean = sum(layer.weight.numel() for layer in layers) / len(layers)
    block = math.gcd(MOST_BLOCK, *(layer.in_features for layer in layers))
    return block if mean >= LEAST_WEIGHTS and block >= LEAST_BLOCK else 0


def _linear_layers(model: Any) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def load_openvino_runner(config: RunnerConfig) -> OpenVinoRunner:
    """Load weights from a local directory, tensor by tensor. Raises ModelError."""
    hf_config = load_config(config.path, config.max_len)
    model = model_without_weights(hf_config)
    files = checked_files(model, hf_config, config)
    file = _weights_file(config, model.num_parameters(), hf_config)
    return OpenVinoRunner(model, config, Weights(files, config.num_threads, file=file))


def checked_files(model: Any, hf_config: Any, config: RunnerConfig) -> CheckedTensors:
    """The tensors in the files of a model, by the names of its parameters. model: without weights.
    Raises ModelError if there are others, or not all."""
    files = CheckedTensors(config.path, config.dtype)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    is_tied, names = hf_config.tie_word_embeddings, set(files)
    if is_tied and head in names and embedding not in names:
        files.rename(head, embedding)  # so `safetensors.torch.save_model` writes tied tensors
    for name in names:
        if (usual := usual_name(name)) != name:
            files.rename(name, usual)
    of_mtp = mtp_parameters(hf_config) if config.has_mtp else {}
    needed = {**dict(model.named_parameters()), **of_mtp}
    needed |= {name: tensor for name, tensor in model.named_buffers() if name.endswith(EXPERT_BIAS)}
    missing = set(ByExpert(needed)) - set(files)
    check_complete(missing, config.path)
    tensors = ByExpert({**model.state_dict(), **of_mtp})
    unexpected = set(files) - set(tensors)
    unused = {name for name in unexpected if name.startswith(unused_weights(model))}
    check_used(unexpected - unused, files, config.path)
    files.leave_out(unexpected)
    files.expect(tensors)
    if is_tied and {head, embedding} <= names:
        check_tied(torch.equal(files[embedding], files[head]), config.path)
    return files


def _weights_file(config: RunnerConfig, num_parameters: int, hf_config: Any) -> WeightsFile | None:
    """None if weights are as stored, or joined with adapters."""
    num_bytes = num_parameters * NUM_BITS[config.weights] // 8
    if not num_bytes or not config.weights_cache_bytes or config.adapters.names:
        return None
    keeps_experts = config.keeps_experts and has_experts(hf_config)
    if keeps_experts and hf_config.model_type == GPT_OSS:
        num_bytes = int(num_parameters * MXFP4_BYTES)
    return WeightsFile(
        cache_dir() / "weights",
        source_files(config.path),
        f"{config.weights}, {config.dtype}, {'' if has_vnni() else 'no '}VNNI"
        + (", 4 bits as they are" if config.keeps_4_bits else "")
        + (", those of experts as they are" if keeps_experts else ""),
        num_bytes=num_bytes,
        most_bytes=config.weights_cache_bytes,
    )
