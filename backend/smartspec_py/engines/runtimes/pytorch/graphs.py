"""Passes as CUDA graphs: one launch instead of a thousand.

For small batches, launching the kernels of a pass takes longer than the GPU needs to run them. A
captured graph launches all kernels at once. A graph has fixed shapes and addresses. So a pass is
padded to a bucket (`buckets`), its inputs are copied to one static buffer, and its logits are
written to another. Rows that decode share one replay. Each row with a long input, which reads a
prompt, is a replay of its own.

Costs:
- Padding to the bucket. `time_pass` uses the same path, so the profile includes this cost.
- Memory. All graphs share one pool, as large as the largest graph needs. PyTorch allows this for
  graphs that are replayed in the order of their capture, so that no graph overwrites results that
  are still needed. Here the order varies, but it is safe: graphs run one after another on one
  stream, a graph reads nothing from the pool that it did not compute itself, and all data that
  outlives a pass (keys, inputs, logits) is outside the pool. The nodes of the graphs need extra
  memory. There are at most as many graphs as buckets, and none is evicted. The static logits are
  float32 and have room for the tokens of the largest bucket of rows that decode.
- Startup time: `warm` captures all buckets. Nothing is captured later, because a capture delays a
  pass and can fail. Passes that fit in no bucket are launched kernel by kernel.

If a capture fails at the start, all passes are launched kernel by kernel.

On a CPU the same code is a dry run. Static buffers, padding and scratch slot are the same, and the
"graph" is a plain call of the function. The CUDA part follows PyTorch's documentation (CUDA
semantics, "CUDA Graphs"; `torch.cuda.graph`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from smartspec_py.engines.runtimes.pytorch.buckets import (
    NUM_INPUTS,
    Bucket,
    bucket_of,
    lay_out,
    make_buckets,
    make_long_buckets,
)
from smartspec_py.engines.runtimes.pytorch.causal import PackedModel, PyTorchRunner
from smartspec_py.engines.runtimes.pytorch.compiled import compile_parts
from smartspec_py.engines.runtimes.pytorch.packed import (
    AttentionGroup,
    PackedBatch,
    attention_mask,
    states_of,
)
from smartspec_py.engines.runtimes.runner import Parts, PassOutput, RowInput, RunnerConfig, joined

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 3
"""Passes before a capture, as in PyTorch's example. In these, libraries choose kernels and allocate
workspaces, which is not possible during a capture."""

FOR_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The attention of passes that are not captured. cuDNN's is the fastest on an H200 (6.0 against 6.5
ms for a pass of an 8 B model over one token), but takes about 20 ms for each new shape."""

Graph = Callable[[], None]
"""Runs a captured pass over the contents of the static buffers."""


class GraphRunner(PyTorchRunner):
    """A `PyTorchRunner` whose passes are padded and captured, once it is warm."""

    def __init__(self, model: PackedModel, config: RunnerConfig) -> None:
        super().__init__(model, config)
        self.buckets: list[Bucket] = []
        """The captured ones for rows that decode, ascending."""
        self._long: list[Bucket] = []
        """The captured ones for long inputs, ascending."""
        self._most = 0
        """Longer inputs are long."""
        self._graphs: dict[Bucket, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if config.device.type == "cuda" else None
        self.num_replays = 0

    @property
    def about(self) -> str:
        return super().about + (" in CUDA graphs" if self.buckets else "")

    @property
    def is_padded(self) -> bool:
        return bool(self.buckets)

    @torch.inference_mode()
    def warm(self, max_width: int) -> None:
        """Capture all buckets, those for decoding of up to max_width tokens per row. The largest is
        first, so that the others fit into the memory that it allocated."""
        start = time.perf_counter()
        config, name = self.config, self.config.path.name
        buckets = make_buckets(config.num_rows, config.max_len, max_width)
        long = make_long_buckets(config.max_len)
        if self._pool is not None:
            compile_parts(self._model)
        try:
            self._allocate(
                buckets[-1].num_tokens, max(bucket.num_tokens for bucket in buckets + long)
            )
            self._graphs = {
                bucket: self._captured(bucket) for bucket in reversed([*buckets, *long])
            }
        except RuntimeError as error:
            logger.warning(
                "%s: its passes cannot be captured as CUDA graphs (%s), so they are slower: set "
                "engine.cuda_graphs to false to skip the capture",
                name,
                error,
            )
            return
        self.buckets, self._long = buckets, long
        self._most = max(bucket.width for bucket in buckets)
        seconds = time.perf_counter() - start
        logger.info("%s: captured passes of %d sizes in %.1f s", name, len(self._graphs), seconds)

    @property
    def _vocab_size(self) -> int:
        """Logits of a token."""
        return min(self.config.vocab_size, int(self._model.config.vocab_size))

    def _allocate(self, num_logits: int, num_tokens: int) -> None:
        """Make the static buffers. num_logits: most tokens with logits. num_tokens: most tokens."""
        config, device = self.config, self.config.device
        self._staged = torch.zeros(NUM_INPUTS * num_tokens, dtype=torch.long, device=device)
        self._every = torch.arange(num_tokens, device=device)
        self._logits = torch.zeros(num_logits, self._vocab_size, device=device)
        num_states = len(config.state_layers) or int(config.gives_hidden)
        hidden_size = num_states * self._model.config.hidden_size
        self._hidden = torch.zeros(num_tokens, hidden_size, dtype=config.dtype, device=device)
        self._given = torch.zeros_like(self._hidden) if self._model.reads_states else None

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        replays = self._replays(inputs)
        if not replays:
            with sdpa_kernel(FOR_ANY_SHAPE):
                return super().forward(inputs)
        start = time.perf_counter()
        passes = [parts for parts, _ in replays]
        outputs = [self._replayed([row for _, row in parts], bucket) for parts, bucket in replays]
        output = outputs[0] if len(outputs) == 1 else joined(passes, outputs)
        self.passes_s += time.perf_counter() - start
        return output

    def _replays(self, inputs: Sequence[RowInput]) -> list[tuple[Parts, Bucket]]:
        """The replays of a pass. Empty if it must be launched kernel by kernel."""
        if not self.buckets:
            return []
        long = [(i, row) for i, row in enumerate(inputs) if len(row.tokens) > self._most]
        short = [(i, row) for i, row in enumerate(inputs) if len(row.tokens) <= self._most]
        if any(row.num_logits > 1 for _, row in long):
            return []
        replays: list[tuple[Parts, Bucket]] = []
        for parts in ([short] if short else []) + [[part] for part in long]:
            among = self.buckets if parts is short else self._long
            bucket = bucket_of([row for _, row in parts], among)
            if bucket is None:
                return []
            replays.append((parts, bucket))
        return replays

    def _replayed(self, inputs: Sequence[RowInput], bucket: Bucket) -> PassOutput:
        """One replay."""
        wanted = self._stage(inputs, bucket)
        if self._given is not None:
            states = states_of(inputs)
            assert states is not None
            self._given[self._places(inputs, bucket)] = states
        self._graphs[bucket]()
        self.num_replays += 1
        # A long bucket has the logits of its wanted token only.
        places = self._every[: len(wanted)] if bucket.is_long else wanted
        states = None
        if self.config.state_layers:
            states = self._hidden[self._places(inputs, bucket)]
        elif self.config.gives_hidden:
            states = self._hidden.index_select(0, places)
        logits = self._logits.index_select(0, places)
        return PassOutput(logits, self._by_input(states, inputs))

    def _places(self, inputs: Sequence[RowInput], bucket: Bucket) -> list[int]:
        """Where the tokens of the inputs are in the static buffers."""
        firsts = [0 if bucket.is_long else row.row * bucket.width for row in inputs]
        pairs = zip(firsts, inputs, strict=True)
        return [place for first, row in pairs for place in range(first, first + len(row.tokens))]

    def _captured(self, bucket: Bucket) -> Graph:
        """Capture the graph of a bucket. This overwrites the staged inputs."""
        self._stage([], bucket)  # so that warm-up passes write to no row
        body = self._body(bucket)
        if self._pool is None:
            body()  # a dry run, after one warm-up pass as before a capture
            return body
        return _capture(body, self.config.device, self._pool)

    def _body(self, bucket: Bucket) -> Graph:
        """A pass over the staged inputs of this bucket. All its tensors are on the device and have
        fixed addresses."""
        num_tokens, num_rows, width = bucket.num_tokens, bucket.num_rows, bucket.width
        inputs = self._static_inputs(bucket)
        token_ids, positions, slots, rows, firsts, adapters, wanted = inputs
        every = self._every[:num_tokens]

        def run() -> None:
            starts = positions.view(num_rows, width)[:, 0]
            mask = attention_mask(starts, firsts[:num_rows], width, bucket.context_len)
            group_rows = rows[:num_rows] if bucket.is_long else slice(0, num_rows)
            group = AttentionGroup(slice(0, num_tokens), group_rows, mask)
            places = wanted[:num_rows] if bucket.is_long else every
            given = None if self._given is None else self._given[:num_tokens]
            packed = PackedBatch(
                token_ids[None],
                positions[None],
                slots,
                places,
                (group,),
                states=given,
                adapters=adapters,
            )
            logits, states = self._model(packed, self.cache)
            self._logits[: len(logits)].copy_(logits)
            if states is not None:
                self._hidden[: len(states)].copy_(states)

        return run

    def _stage(self, inputs: Sequence[RowInput], bucket: Bucket) -> torch.Tensor:
        """Copy a pass to the static buffer in one transfer. Returns its wanted tokens there."""
        config, static = self.config, self._static_inputs(bucket)
        made, num_wanted = lay_out(inputs, bucket, config.max_len, self.cache.scratch_slot)
        host = torch.from_numpy(made)
        if self._pool is not None:
            # PyTorch reuses pinned memory only after the copies from it are done.
            host = host.pin_memory()
        static.copy_(host, non_blocking=True)
        return static[-1, :num_wanted]

    def _static_inputs(self, bucket: Bucket) -> torch.Tensor:
        """[NUM_INPUTS, R * T]: contiguous, and at the same address for every bucket."""
        return self._staged[: NUM_INPUTS * bucket.num_tokens].view(NUM_INPUTS, bucket.num_tokens)


def _capture(body: Graph, device: torch.device, pool: Any) -> Graph:
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
