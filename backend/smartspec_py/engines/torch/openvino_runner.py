"""Runs a model with OpenVINO on a CPU: the same passes as `CausalRunner`, with other kernels.

Whole passes are faster than separate calls of PyTorch operators, most of all with many sequences
of one token (docs/research/performance.md). It supports the same models as `llama`.

The logits of a token have the same bits in every pass, whatever else the pass computes, however
its prompt was cut into chunks, and whatever part of it was cached. OpenVINO chooses among kernels
that sum in different orders, so each kind of token is always computed by the same ones:
- No product has a single row. A lone token is computed twice.
- Products in float32 have no weights of half precision, see `openvino_graph`. Those with weights of
  8 and 4 bits need a processor with VNNI.
- Tokens of a prompt are attended together, at least two at a time. See `TorchTarget` for a single
  token that is left of a prompt.
- Keys in 8 bits have one scale per token. OpenVINO's default, one per channel of a block, would be
  computed again when the block gets more tokens.
- All other tokens, which were generated or are drafts, are attended as separate sequences of one
  token each that share the row's blocks. A pass writes all its keys before it reads any.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import openvino as ov
import torch
from transformers import AutoModelForCausalLM

from smartspec_py.engines.torch.checkpoint import ModelError
from smartspec_py.engines.torch.context import free_bytes
from smartspec_py.engines.torch.openvino_graph import (
    BLOCK_LEN,
    INPUTS,
    LONGEST,
    DecoderGraph,
    cache_names,
)
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.runner import (
    PassOutput,
    Runner,
    RunnerConfig,
    check_complete,
    check_tied,
    check_used,
    load_config,
)
from smartspec_py.engines.torch.threads import TRIED_PASS, has_vnni, set_fastest
from smartspec_py.engines.torch.weights import FileWeights, Weights

GROUPS = (128, 64, 32)
"""With compressed weights, so many activations are rounded to 8 bits with one scale: the first of
these that divides the width of every product. One scale for a whole row would be less accurate.
Weights of 4 bits have the same groups."""

NUM_BITS = {"stored": 0, "int8": 8, "int4": 4}

LARGE = 100_000_000
"""Parameters from which `auto` means int8 on processors with VNNI. Such weights do not fit in a
CPU's caches, so a pass takes as long as reading them: with int8, 0.43 to 0.75 of the time on all
processors that were tried. The choice is not measured at each start, because texts depend on it.

Without VNNI, OpenVINO 2026.4 converts 8-bit weights to float32, and sums in another order in passes
of more than 83 tokens, and of more than 4 if a product is 8,192 wide (AVX2, emulated)."""

MOST_COPIES, COPIED_BYTES = 3, 1 << 30
"""A pass of another size than the one before takes longer, because OpenVINO prepares each operator
again: 3 ms with the 30 layers of SmolLM2-135M, a third of a pass of one token. So there are several
copies of the compiled graph, each ready for the size of its last pass. All copies but the first
take at most so much memory for their weights, and an eighth of what is free."""

MOST_PADDING, PARAMETERS_PER_LAYER = 2, 50_000_000
"""A pass can get tokens that nobody reads, so that a copy has its size. Another size costs about as
much per layer as a token per 50 million parameters (AMD EPYC Zen 5). Models with more parameters
per layer get no padding."""

TRIED_BYTES = 256 << 20
"""Numbers of threads are tried with as many layers as have this size: more than the caches hold."""

HALF = {torch.bfloat16: "BF16", torch.float16: "FP16"}
"""Precisions that not every processor has, by their names in OpenVINO."""


@dataclass(slots=True)
class _Copy:
    """A compiled copy of the graph. num_tokens: of its last pass, with padding."""

    request: ov.InferRequest
    num_tokens: int = 0


class OpenVinoRunner(Runner):
    """A model that OpenVINO compiled. config.dtype: the precision of the products. It becomes
    float32 if the processor lacks this precision."""

    cache: BlockCache
    _graph_class = DecoderGraph

    def __init__(
        self,
        model: Any,
        config: RunnerConfig,
        weights: Weights | None = None,
        most_copies: int = MOST_COPIES,
    ) -> None:
        """model: of Transformers; it is not used after this call. weights: None takes those of the
        model. Raises ModelError."""
        core = ov.Core()
        if HALF.get(config.dtype) not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            config = replace(config, dtype=torch.float32)
        super().__init__(config)
        precision = HALF.get(config.dtype, "f32").lower()
        num_threads = torch.get_num_threads()
        num_bits = NUM_BITS[config.weights]
        group = _group(model) if num_bits else 0
        if num_bits == 4 and not group:
            raise ModelError(
                f"engine.weights: int4 needs products whose width {GROUPS[-1]} divides: use int8"
            )
        self._settings = settings = {
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": "u8" if config.kv_cache == "u8" else precision,
            "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
            "INFERENCE_NUM_THREADS": num_threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        of_model = weights or Weights(model.state_dict())
        is_half = config.dtype in HALF
        sizes = num_bits, group, config.max_len, num_threads
        graph = self._graph_class(model, of_model, *sizes, is_half)
        built, self._memory = self._build(graph, model), graph.memory
        most_bytes = min(COPIED_BYTES, free_bytes(config.device) // 8)
        num_copies = 1 + min(most_copies - 1, most_bytes // max(1, graph.num_bytes))
        compiled = [core.compile_model(built, "CPU", settings) for _ in range(num_copies)]
        self.compiled = compiled[0]
        self._copies = [_Copy(one.create_infer_request()) for one in compiled]
        """The one whose last pass was first comes first."""
        self._places = {one.any_name: i for i, one in enumerate(self.compiled.inputs)}
        """The index of each input. OpenVINO takes 2 us longer to find it."""
        self._hidden_size: int = model.config.hidden_size
        num_parameters = sum(one.numel() for one in model.parameters())
        wanted = len(model.model.layers) * PARAMETERS_PER_LAYER / num_parameters
        self._most_padding = min(MOST_PADDING, int(wanted))
        self.cache = BlockCache(self.compiled, model, config)
        for copy, (name, tensor) in product(self._copies, self.cache.tensors.items()):
            copy.request.set_tensor(name, tensor)

    def _build(self, graph: DecoderGraph, model: Any) -> ov.Model:
        config = self.config
        return graph.build(model, config.vocab_size, config.gives_hidden, config.state_layers)

    @property
    def about(self) -> str:
        weights = f", {self.config.weights} weights" if self.config.weights != "stored" else ""
        return f"OpenVINO {ov.get_version().split('-')[0]}{weights}{self.config.cache_text}"

    @property
    def bytes_per_token(self) -> int:
        num_bytes = sum(int(tensor.byte_size) for tensor in self.cache.tensors.values())
        return num_bytes // (self.cache.num_blocks * BLOCK_LEN)

    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        """In two passes if an input has tokens of both kinds: in one pass, OpenVINO gives wrong
        results for a sequence that shares blocks with one of several tokens."""
        mixed = [one for one in inputs if 1 < one.num_prompt < len(one.tokens)]
        if not mixed:
            return self._pass(inputs)
        halves = [_halves(one) for one in mixed]
        rests = iter([rest for _, rest in halves])
        both = [[first for first, _ in halves], [next(rests) if i in mixed else i for i in inputs]]
        outputs = [self._pass(half) for half in both]
        order = [(0, first) for first in both[0]], [(1, rest) for rest in both[1]]
        firsts = iter(order[0])
        by_input = [
            part
            for one, rest in zip(inputs, order[1], strict=True)
            for part in ((next(firsts), rest) if one in mixed else (rest,))
        ]
        logits = _joined([out.logits for out in outputs], by_input, lambda one: one.num_logits)
        hidden = [out.hidden for out in outputs if out.hidden is not None]
        has_all = bool(self.config.state_layers)
        return PassOutput(
            logits,
            _joined(hidden, by_input, lambda one: len(one.tokens) if has_all else one.num_logits)
            if hidden
            else None,
        )

    def _pass(self, inputs: Sequence[RowInput]) -> PassOutput:
        start = time.perf_counter()
        parts = [part for one in inputs for part in _parts(one)]
        ends = np.cumsum([len(one.tokens) for one in inputs]).tolist()
        wanted = [
            token
            for one, end in zip(inputs, ends, strict=True)
            for token in range(end - one.num_logits, end)
        ]
        if ends[-1] == 1:
            parts *= 2
        num_tokens = max(2, ends[-1])
        copy = self._copy_for(num_tokens)
        request, padding = copy.request, copy.num_tokens - num_tokens
        parts += [RowInput(self.config.num_rows, 0, (0,), 0)] * padding
        # Two, because the output layer is a product too, and some operators fail with no rows.
        num_results, layers = max(2, len(wanted)) + padding, self.config.state_layers
        self._set_inputs(request, parts, [*wanted, *[0] * (num_results - len(wanted))])
        # Each pass gets its own output memory; the next pass would overwrite OpenVINO's buffer.
        logits = torch.empty(num_results, self.config.vocab_size)
        request.set_output_tensor(0, ov.Tensor(logits.numpy(), shared_memory=True))
        hidden = None
        if self.config.gives_hidden or layers:
            num_states = num_tokens + padding if layers else num_results
            hidden = torch.empty(num_states, self._hidden_size * max(1, len(layers)))
            request.set_output_tensor(1, ov.Tensor(hidden.numpy(), shared_memory=True))
            hidden = hidden[: ends[-1] if layers else len(wanted)]
        request.infer(share_outputs=True)  # else it also copies them
        self.passes_s += time.perf_counter() - start
        return PassOutput(logits[: len(wanted)], hidden)

    @property
    def ready_sizes(self) -> Collection[int]:
        """With padding. A lone token is computed twice."""
        paddings = range(self._most_padding + 1)
        sizes = {one.num_tokens - padding for one in self._copies for padding in paddings}
        return sizes | {1} if 2 in sizes else sizes

    def _copy_for(self, num_tokens: int) -> _Copy:
        """The copy for a pass of so many tokens: one of that size or little more, or else the one
        that was not used for the longest time."""
        most = num_tokens + self._most_padding
        fitting = [one for one in self._copies if num_tokens <= one.num_tokens <= most]
        found = min(fitting, key=attrgetter("num_tokens"), default=self._copies[0])
        if not fitting:
            found.num_tokens = num_tokens
        self._copies.remove(found)
        self._copies.append(found)
        return found

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Without padding."""
        given = batch_size, tokens_per_row, context_len, num_logits
        self.cache.occupy(batch_size, min(context_len + tokens_per_row, self.config.max_len))
        kept, self._most_padding = self._most_padding, 0
        seconds = super().time_pass(*given)
        self._most_padding = kept
        return seconds

    def release(self) -> None:
        self.cache.release()

    def _set_inputs(
        self, request: ov.InferRequest, parts: Sequence[RowInput], wanted: Sequence[int]
    ) -> None:
        starts = [one.position - one.first for one in parts]
        ends = [start + len(one.tokens) for start, one in zip(starts, parts, strict=True)]
        blocks = [self.cache.blocks(one.row, end) for one, end in zip(parts, ends, strict=True)]
        given: dict[str, Any] = {
            "token_ids": [token for one in parts for token in one.tokens],
            "positions": [position for one in parts for position in one.positions],
            "wanted": wanted,
            "past_lens": starts,
            "subsequence_begins": np.cumsum([0, *(len(one.tokens) for one in parts)]),
            "block_indices": [block for found in blocks for block in found],
            "block_indices_begins": np.cumsum([0, *map(len, blocks)]),
            LONGEST: max(ends),
        }
        for name, dtype in (*INPUTS.items(), (LONGEST, np.int32)):
            request.set_input_tensor(self._places[name], ov.Tensor(np.asarray(given[name], dtype)))


def _group(model: Any) -> int:
    """Numbers with one scale; 0, which rounds no activations, if no group divides all widths."""
    widths = {one.in_features for one in model.modules() if isinstance(one, torch.nn.Linear)}
    return next((g for g in GROUPS if not any(width % g for width in widths)), 0)


def _halves(one: RowInput) -> tuple[RowInput, RowInput]:
    """The tokens of the prompt, and the others."""
    first, num_rest = one.num_prompt, len(one.tokens) - one.num_prompt
    num_logits = max(0, one.num_logits - num_rest)
    return (
        RowInput(one.row, one.position, one.tokens[:first], num_logits, first),
        RowInput(one.row, one.position + first, one.tokens[first:], one.num_logits - num_logits),
    )


def _joined(
    given: Sequence[torch.Tensor],
    order: Sequence[tuple[int, RowInput]],
    num: Callable[[RowInput], int],
) -> torch.Tensor:
    """The rows of several outputs in the order of the inputs, which are in order of each output."""
    starts, parts = [0] * len(given), []
    for output, one in order:
        parts.append(given[output][starts[output] :][: num(one)])
        starts[output] += num(one)
    return torch.cat(parts)


def _parts(one: RowInput) -> list[RowInput]:
    """The tokens of an input by attention: those of a prompt together, others one by one."""
    first = one.num_prompt if one.num_prompt > 1 else 0
    together = [RowInput(one.row, one.position, one.tokens[:first], 0)] if first else []
    return together + [
        RowInput(one.row, one.position + i, one.tokens[i : i + 1], 0)
        for i in range(first, len(one.tokens))
    ]


def load_openvino_runner(config: RunnerConfig, counts: Sequence[int] = ()) -> OpenVinoRunner:
    """Load weights from a local directory, tensor by tensor.

    counts: numbers of threads to choose from, see `threads`; empty keeps the number.
    Raises ModelError.
    """
    hf_config = load_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    files = FileWeights(config)
    missing = {name for name, _ in model.named_parameters()} - set(files)
    check_complete(missing, config)
    unexpected = set(files) - set(model.state_dict())
    check_used(unexpected, files, config)
    files.leave_out(unexpected)
    pair = "model.embed_tokens.weight", "lm_head.weight"
    if hf_config.tie_word_embeddings and set(pair) <= set(files):
        check_tied(torch.equal(*(files[name] for name in pair)), config)
    weights = Weights(files)
    if config.weights == "auto":
        is_int8 = model.num_parameters() >= LARGE and has_vnni()
        config = replace(config, weights="int8" if is_int8 else "stored")
    if counts:
        layers = model.model.layers
        num_bytes = sum(one.numel() for one in layers[0].parameters())
        model.model.layers = layers[: -(-TRIED_BYTES // num_bytes)]
        tried: dict[int, OpenVinoRunner] = {}

        def pass_s() -> float:
            count = torch.get_num_threads()
            if count not in tried:
                one_row = replace(config, num_rows=1, state_layers=())
                tried[count] = OpenVinoRunner(model, one_row, weights, most_copies=1)
            # While it serves, PyTorch has one thread: more would spin on the cores of OpenVINO's.
            torch.set_num_threads(1)
            seconds = tried[count].time_pass(*TRIED_PASS)
            torch.set_num_threads(count)
            return seconds

        set_fastest(counts, pass_s)
        tried.clear()
        model.model.layers = layers
    return OpenVinoRunner(model, config, weights)


class BlockCache:
    """Keys and values in blocks of BLOCK_LEN tokens. Each row owns as many adjacent blocks as its
    maximum length needs."""

    def __init__(self, compiled: ov.CompiledModel, model: Any, config: RunnerConfig) -> None:
        self._per_row = -(-config.max_len // BLOCK_LEN)
        self.num_blocks = config.num_rows * self._per_row + 1  # the last one is for padding
        self.tensors: dict[str, ov.Tensor] = {}
        self._maps: list[mmap.mmap] = []
        self._occupied = [0] * config.num_rows
        """Blocks of each row that `occupy` has written."""
        for name in cache_names(len(model.model.layers)):
            # In 8 bits, each row of a block begins with its scale and zero.
            dtype = compiled.input(name).element_type
            widths = [one.get_length() for one in list(compiled.input(name).partial_shape)[1:]]
            shape = ov.Shape([self.num_blocks, *widths])
            num_bytes = math.prod(shape) * dtype.size
            # The system gives each page when it is written, so unused rows take no memory.
            self._maps.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            with contextlib.suppress(OSError):  # some kernels have no large pages
                self._maps[-1].madvise(mmap.MADV_HUGEPAGE)
            self.tensors[name] = ov.Tensor(np.frombuffer(self._maps[-1], np.uint8), shape, dtype)

    def blocks(self, row: int, num_tokens: int) -> range:
        """The blocks of the row's first num_tokens tokens."""
        first = row * self._per_row
        return range(first, first + -(-num_tokens // BLOCK_LEN))

    def occupy(self, num_rows: int, num_tokens: int) -> None:
        """Write to this many tokens of the first rows. Reading pages that were never written takes
        no time: they are all the same page, which stays in the processor's caches."""
        for row in range(num_rows):
            blocks = self.blocks(row, num_tokens)
            for tensor in self.tensors.values() if len(blocks) > self._occupied[row] else ():
                _bytes(tensor)[blocks.start + self._occupied[row] : blocks.stop] = 0
            self._occupied[row] = max(self._occupied[row], len(blocks))

    def release(self) -> None:
        """Give the memory of all rows back to the system. Their contents are lost."""
        self._occupied = [0] * len(self._occupied)
        for one in self._maps:
            one.madvise(mmap.MADV_DONTNEED)

    def copy_row(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the keys and values of the row's first num_tokens tokens, in whole blocks."""
        read, written = self.blocks(source, num_tokens), self.blocks(destination, num_tokens)
        for tensor in self.tensors.values():
            by_block = _bytes(tensor)
            by_block[written.start : written.stop] = by_block[read.start : read.stop]

    def clear_row(self, row: int) -> None:
        """See `RowStore`."""
        blocks = self.blocks(row, self._per_row * BLOCK_LEN)
        for tensor in self.tensors.values():
            _bytes(tensor)[blocks.start : blocks.stop] = 0


def _bytes(tensor: ov.Tensor) -> Any:
    """View [blocks, bytes] of the tensor's memory."""
    return tensor.data.view(np.uint8).reshape(tensor.shape[0], -1)
