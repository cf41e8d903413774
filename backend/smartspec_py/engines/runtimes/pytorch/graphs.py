"""Passes as CUDA graphs: one launch instead of a thousand.

For small batches, launching the kernels of a pass takes longer than the GPU needs to run them. A
captured graph launches all kernels at once. A graph has fixed shapes and addresses. So the tokens
of a pass are padded to one of a few sizes (`layout`), its inputs are copied to one static buffer,
and its last hidden states are written to another. All lengths are read on the device. So rows that
decode, with any number of drafts, and chunks of prompts share one replay.

Logits are computed after the replay, of the wanted tokens only. The launches of their few kernels
take no time, because they wait for the replay anyway.

Costs:
- Padding to the size. `time_pass` uses the same path, so the profile includes this cost.
- Memory. All graphs share one pool, as large as the largest graph needs. PyTorch allows this for
  graphs that are replayed in the order of their capture, so that no graph overwrites results that
  are still needed. Here the order varies, but it is safe: graphs run one after another on one
  stream, a graph reads nothing from the pool that it did not compute itself, and all data that
  outlives a pass (keys, inputs, states) is outside the pool.
- Startup time: `warm` captures all sizes. Nothing is captured later, because a capture delays a
  pass and can fail. Larger passes are launched kernel by kernel.

If a capture fails at the start, or captured passes compute something else than plain ones, all
passes are launched kernel by kernel.

On a CPU the same code is a dry run, if a test replaces the kernel: static buffers, padding and
scratch slot are the same, and the "graph" is a plain call of the function. The CUDA part follows
PyTorch's documentation (CUDA semantics, "CUDA Graphs"; `torch.cuda.graph`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from smartspec_py.engines.checkpoints.checks import first_line
from smartspec_py.engines.runtimes.pytorch.causal import PackedModel, PyTorchRunner
from smartspec_py.engines.runtimes.pytorch.compiled import compile_parts
from smartspec_py.engines.runtimes.pytorch.layout import (
    SIZES,
    SPLIT_KEYS,
    Line,
    Tiling,
    lay_out,
    size_of,
)
from smartspec_py.engines.runtimes.pytorch.packed import (
    PLAIN,
    PackedBatch,
    Scores,
    Write,
    complete,
    pack,
)
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput, RunnerConfig

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 3
"""Passes before a capture, as in PyTorch's example. In these, libraries choose kernels and allocate
workspaces, which is not possible during a capture."""

FOR_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The attention of passes that are not captured. cuDNN's is the fastest on an H200, but takes about
20 ms for each new shape."""

MOST_DIFFERENCE = 0.2
"""Between the logits of a captured and a plain pass, as a share of the largest. In bfloat16, it was
0.054 for 32 layers of random weights."""

Replay = Callable[[], None]
"""Runs a captured pass over the contents of the static buffers."""


class Shape(NamedTuple):
    """A captured pass: its tokens with padding, and the most keys of its rows."""

    num_tokens: int
    context_len: int


def kernels() -> tuple[Callable[..., torch.Tensor], Write]:
    """The attention of captured passes, and what writes their keys. Raises ImportError where
    Triton's language is missing."""
    from smartspec_py.engines.runtimes.pytorch.attention import attend, write

    return attend, write


class GraphRunner(PyTorchRunner):
    """A `PyTorchRunner` whose passes are padded and captured, once it is warm."""

    def __init__(self, model: PackedModel, config: RunnerConfig) -> None:
        super().__init__(model, config)
        num_kv_heads = self.cache.buffer.shape[-2]
        num_shared = max(1, model.config.num_attention_heads // num_kv_heads)
        self._tiling = Tiling.of(config.num_rows, num_shared)
        self._graphs: dict[Shape, Replay] = {}
        self._pool = torch.cuda.graph_pool_handle() if config.device.type == "cuda" else None
        self.num_replays = 0

    @property
    def about(self) -> str:
        return super().about + (" in CUDA graphs" if self._graphs else "")

    @torch.inference_mode()
    def warm(self) -> None:
        """Capture all sizes. The largest is first, so that the others fit into the memory that it
        allocated. No row may be in use."""
        start = time.perf_counter()
        max_len = self.config.max_len
        context_lens = [max_len] if max_len <= SPLIT_KEYS else [max_len, SPLIT_KEYS]
        if self._pool is not None:
            compile_parts(self._model)
        graphs = {}
        try:
            self._allocate()
            for size in reversed(SIZES):
                for context_len in context_lens:
                    shape = Shape(size, context_len)
                    graphs[shape] = self._captured(shape)
            self._graphs = graphs
            self._compare()
        except Exception as error:  # whatever the compilers raise
            self._graphs = {}
            logger.warning(
                "%s: its passes cannot be captured as CUDA graphs (%s), so they are slower: set "
                "engine.cuda_graphs to false to skip the capture",
                self.config.path.name,
                first_line(error),
            )
            return
        seconds = time.perf_counter() - start
        name = self.config.path.name
        logger.info("%s: captured passes of %d sizes in %.1f s", name, len(graphs), seconds)

    def _allocate(self) -> None:
        """Make the static buffers, after one plain pass that shows their widths."""
        device, most, given = self.config.device, SIZES[-1], None
        if self._model.reads_states:
            shape = most, self._model.config.hidden_size
            given = torch.zeros(shape, dtype=self.config.dtype, device=device)
        probe = RowInput(0, 0, [0], 1)
        packed, _ = pack([probe], self.cache, device, None if given is None else given[:1])
        hidden, states = self._model(packed, self.cache)
        self._staged = packed.slots.new_zeros(len(Line) * most)
        self._given = given
        self._hidden = hidden.new_zeros(most, hidden.shape[1])
        self._states = self._hidden if states is hidden else None
        if states is not None and states is not hidden:
            self._states = states.new_zeros(most, states.shape[1])

    def _compare(self) -> None:
        """Raise RuntimeError if a captured pass computes something else than a plain one."""
        inputs, states = [], None
        for row, length in enumerate([24, 3, 1][: self.config.num_rows]):
            num_tokens = min(length, self.config.max_len)
            tokens = [(31 * i + row) % self.config.vocab_size for i in range(num_tokens)]
            inputs.append(RowInput(row, 0, tokens, num_tokens))
        if self._given is not None:
            given = self._given[: sum(len(item.tokens) for item in inputs)]
            states = torch.arange(given.numel()).sin().view(given.shape).to(given)
        captured = self.forward(inputs, states=states).logits
        plain = super().forward(inputs, states=states).logits
        for row_input in inputs:
            self.cache.clear([row_input.row])
        is_used = plain.isfinite()  # a head has no logits of some tokens
        difference = (captured - plain)[is_used].abs().max() / plain[is_used].abs().max()
        if not difference <= MOST_DIFFERENCE:
            raise RuntimeError(f"their logits differ by {difference:.3g} of the largest")

    @torch.inference_mode()
    def forward(
        self,
        inputs: Sequence[RowInput],
        token_ids: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> PassOutput:
        """See `PyTorchRunner`."""
        shape = self._shape_of(inputs)
        if shape is None:
            with sdpa_kernel(FOR_ANY_SHAPE):
                return super().forward(inputs, token_ids, states)
        firsts = self._stage(inputs, shape.num_tokens)
        if states is not None:
            assert self._given is not None
            self._given[: len(states)].copy_(states)
        if token_ids is not None:
            complete(self._lines(shape.num_tokens)[Line.TOKEN_ID], token_ids, inputs, firsts)
        self._graphs[shape]()
        self.num_replays += 1
        found = self._states
        if found is not None and self.config.state_layers:
            found = found[: shape.num_tokens].clone()  # the next pass overwrites the buffer
        return self._output(self._hidden, found, inputs, firsts)

    def _shape_of(self, inputs: Sequence[RowInput]) -> Shape | None:
        """The captured pass for these inputs. None if there is none."""
        size = size_of(inputs)
        if size is None or not self._graphs:
            return None
        longest = max(item.position + len(item.tokens) for item in inputs)
        shape = Shape(size, SPLIT_KEYS)
        if longest <= SPLIT_KEYS and shape in self._graphs:
            return shape
        return Shape(size, self.config.max_len)

    def _captured(self, shape: Shape) -> Replay:
        """Capture a pass. This overwrites the staged inputs."""
        body = self._body(shape)
        if self._pool is None:
            return body
        self._stage([], shape.num_tokens)  # so that warm-up passes write to no row
        return _capture(body, self.config.device, self._pool)

    def _body(self, shape: Shape) -> Replay:
        """A pass over the staged inputs. All its tensors are on the device and have fixed
        addresses."""
        num_tokens = shape.num_tokens
        lines = self._lines(num_tokens)
        attend, write = kernels()
        attend = partial(
            attend,
            tiling=self._tiling,
            max_len=self.config.max_len,
            context_len=shape.context_len,
        )

        def attention(layer: int, queries: torch.Tensor, scores: Scores = PLAIN) -> torch.Tensor:
            keys, values = self.cache.by_slot[layer]
            return attend(queries.to(keys.dtype), keys, values, lines, scores)

        packed = PackedBatch(
            token_ids=lines[Line.TOKEN_ID][None],
            positions=lines[Line.POSITION][None],
            slots=lines[Line.SLOT],
            attention=attention,
            states=None if self._given is None else self._given[:num_tokens],
            adapters=lines[Line.ADAPTER],
            write=write,
        )

        def run() -> None:
            hidden, states = self._model(packed, self.cache)
            self._hidden[:num_tokens].copy_(hidden)
            if states is not None and states is not hidden:
                assert self._states is not None
                self._states[:num_tokens].copy_(states)

        return run

    def _stage(self, inputs: Sequence[RowInput], num_tokens: int) -> list[int]:
        """Copy a pass to the static buffers. Returns the index of the first token of each input."""
        made, firsts = lay_out(
            inputs, num_tokens, self._tiling, self.config.max_len, self.cache.scratch_slot
        )
        host = torch.from_numpy(made)
        if self._pool is not None:
            # PyTorch reuses pinned memory only after the copies from it are done.
            host = host.pin_memory()
        self._lines(num_tokens).copy_(host, non_blocking=True)
        return firsts

    def _lines(self, num_tokens: int) -> torch.Tensor:
        """[lines, num_tokens]: contiguous, and at the same address for every size."""
        return self._staged[: len(Line) * num_tokens].view(len(Line), num_tokens)


def _capture(body: Replay, device: torch.device, pool: Any) -> Replay:
    """The body as a CUDA graph that shares the pool's memory with other graphs.

    body: reads and writes tensors that outlive the graph. Its other tensors come from the pool.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                body()
        current.wait_stream(side)
        try:
            # PyTorch's default stream for captures is on the device of the first capture.
            with torch.cuda.graph(graph, pool=pool, stream=side):
                body()
        finally:
            torch.cuda.set_stream(current)  # a failed capture may leave its own stream active
    return graph.replay
