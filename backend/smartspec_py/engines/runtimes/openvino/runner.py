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
  most MOST_WIDTH wide, and have at most MOST_TOKENS rows, or FEWER_TOKENS, see `precision`. This is
  so without VNNI, and with widths that none of GROUPS divides. Models with large matrices of 8 bits
  have products of whole numbers there.
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

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import openvino as ov
import torch

from smartspec_py.engines.checkpoints.checks import (
    GEMMA_4,
    GPT_OSS,
    GRANITE_4,
    GRANITE_MOE,
    LFM2,
)
from smartspec_py.engines.checkpoints.experts import ByExpert
from smartspec_py.engines.checkpoints.recurrent import TILE, state_shapes
from smartspec_py.engines.phases import PREPARING, begin
from smartspec_py.engines.runtimes.machine import free_bytes
from smartspec_py.engines.runtimes.openvino.attention import BLOCK_LEN, INPUTS, LONGEST
from smartspec_py.engines.runtimes.openvino.cache import BlockCache
from smartspec_py.engines.runtimes.openvino.experts import NUM_TOKENS
from smartspec_py.engines.runtimes.openvino.gemma4 import LAST, LAST_INPUTS, Gemma4Graph
from smartspec_py.engines.runtimes.openvino.gpt_oss import GptOssGraph
from smartspec_py.engines.runtimes.openvino.granite import GraniteGraph
from smartspec_py.engines.runtimes.openvino.graph import DecoderGraph
from smartspec_py.engines.runtimes.openvino.lfm2 import Lfm2Graph
from smartspec_py.engines.runtimes.openvino.operators import share_constants
from smartspec_py.engines.runtimes.openvino.parts import (
    attended_parts,
    bounded,
    cut,
    of_like_lengths,
    with_copy,
)
from smartspec_py.engines.runtimes.openvino.precision import (
    HALF,
    MOST_WIDTH,
    Numbers,
    choose_numbers,
    most_tokens,
    settings_of,
)
from smartspec_py.engines.runtimes.openvino.products import MATRIX_A, OWN_ADAPTERS, Products
from smartspec_py.engines.runtimes.openvino.short_convs import ConvStates
from smartspec_py.engines.runtimes.openvino.states import States
from smartspec_py.engines.runtimes.openvino.weights import Weights
from smartspec_py.engines.runtimes.runner import (
    OPENVINO,
    Parts,
    PassOutput,
    RowInput,
    Runner,
    RunnerConfig,
    joined,
)

MOST_IN_TILES = 128
"""Tokens of a pass with recurrent states. OpenVINO keeps what the layers compute of them, 2 MB a
token with 18 such layers of 1,024, and more tokens take hardly less time each."""

MOST_COPIES, MOST_OF_4_BITS, COPIED_BYTES = 3, 2, 1 << 30
"""A pass of another size than the one before takes longer, because OpenVINO prepares each operator
again: 3 ms with the 30 layers of SmolLM2-135M, a third of a pass of one token. So there are several
copies of the compiled graph, each warm for the shape of its last pass. All copies but the first
take at most so much memory for their weights, and an eighth of what is free. A copy with weights of
4 bits takes long to prepare: 2.4 s with 0.5 B (Intel Xeon with AMX). Passes of 1 and 8 tokens in
turn take 68 ms with one of these copies, and 39 with two or three."""

MOST_PADDING, PARAMETERS_PER_LAYER = 2, 50_000_000
"""A pass can get tokens that nobody reads, so that a copy has its size. Another size costs about as
much per layer as a token per 50 million parameters (AMD EPYC Zen 5). Models with more parameters
per layer get no padding and no further copies."""

CHEAP_TOKENS = 4
"""Without rounded activations, a pass over 5 tokens takes 1.7 times as long as one over 4 (AVX2).
So padding does not lead beyond 4."""


@dataclass(slots=True)
class _Copy:
    """A compiled copy of the graph. num_tokens: of its last pass, with padding."""

    request: ov.InferRequest
    num_tokens: int = 0


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
        model. most_copies: None leaves it open. numbers: how products are computed, if this is
        known. Raises ModelError."""
        core, of_model = ov.Core(), weights or Weights(ByExpert(model.state_dict()))
        if numbers is None:
            precisions = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            config, numbers = choose_numbers(model, config, of_model, precisions)
        self.numbers = numbers
        super().__init__(config)
        self._most_tokens, shapes = config.num_rows * config.max_len, state_shapes(model.config)
        if numbers.is_bounded:
            self._most_tokens = most_tokens(model, config)
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
        has_4_bits = numbers.num_bits == 4 or config.keeps_4_bits
        most_copies = most_copies or (MOST_OF_4_BITS if has_4_bits else MOST_COPIES)
        num_copies = 1 + min(most_copies - 1, most_bytes // max(1, products.num_bytes))
        compiled = _compiled(core, built, settings_of(config, numbers), num_copies)
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
    if hf_config.model_type in (GRANITE_MOE, GRANITE_4):
        return GraniteGraph
    return Gemma4Graph if hf_config.model_type in GEMMA_4 else DecoderGraph


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
        has_half_attention=numbers.has_half_attention,
        most_width=MOST_WIDTH if numbers.is_bounded else None,
        keeps_4_bits=config.keeps_4_bits,
        keeps_experts=config.keeps_experts,
        adapters=config.adapters,
    )


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
