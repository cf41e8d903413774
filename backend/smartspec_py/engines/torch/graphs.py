"""Short passes as CUDA graphs: one launch instead of several hundred.

For small batches, launching the kernels of a pass takes longer than the GPU needs to run them. A
captured graph launches all kernels at once. A graph has fixed shapes and addresses. So a pass is
padded to a bucket (`buckets`), its inputs are copied to one static buffer, and its logits are
written to another. Inputs longer than MAX_WIDTH (prompt chunks) are not captured. A pass that
contains one is launched kernel by kernel as a whole.

Costs:
- Padding to the bucket. `time_pass` uses the same path, so the profile includes this cost.
- Memory. All graphs share one pool, as large as the largest graph needs. PyTorch allows this for
  graphs that are replayed in the order of their capture, so that no graph overwrites results that
  are still needed. Here the order varies, but it is safe: graphs run one after another on one
  stream, a graph reads nothing from the pool that it did not compute itself, and all data that
  outlives a pass (keys, inputs, logits) is outside the pool. The nodes of the graphs need extra
  memory. There are at most as many graphs as buckets, and none is evicted. The static logits are
  float32 and have room for the tokens of the largest bucket.
- Startup time: `warm` captures the buckets that decoding needs. Nothing is captured later, because
  a capture delays a pass and can fail. Passes of other sizes are launched kernel by kernel.

If a capture fails at the start, all passes are launched kernel by kernel.

On a CPU the same code is a dry run. Static buffers, padding and scratch slot are the same, and the
"graph" is a plain call of the function. This is how the code was tested: IT WAS NEVER RUN ON A GPU.
The CUDA part follows PyTorch's documentation (CUDA semantics, "CUDA Graphs"; `torch.cuda.graph`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smartspec_py.engines.torch.buckets import NUM_INPUTS, Bucket, bucket_of, lay_out, make_buckets
from smartspec_py.engines.torch.packed import AttentionGroup, PackedBatch, RowInput, attention_mask
from smartspec_py.engines.torch.runner import CausalRunner, PassOutput, RunnerConfig

logger = logging.getLogger(__name__)

NUM_WARM_UPS = 3
"""Passes before a capture, as in PyTorch's example. In these, libraries choose kernels and allocate
workspaces, which is not possible during a capture."""

Graph = Callable[[], None]
"""Runs a captured pass over the contents of the static buffers."""


class GraphRunner(CausalRunner):
    """A `CausalRunner` whose short passes are padded and captured."""

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        super().__init__(model, config)
        buckets, device = make_buckets(config.num_rows, config.max_len), config.device
        max_tokens = buckets[-1].num_tokens
        vocab_size = min(config.vocab_size, model.config.vocab_size)
        self._staged = torch.zeros(NUM_INPUTS * max_tokens, dtype=torch.long, device=device)
        self._every = torch.arange(max_tokens, device=device)
        self._logits = torch.zeros(max_tokens, vocab_size, device=device)
        num_states = len(config.state_layers) or int(config.gives_hidden)
        hidden_size = num_states * model.config.hidden_size
        self._hidden = torch.zeros(max_tokens, hidden_size, dtype=config.dtype, device=device)
        self.buckets: list[Bucket] = []
        """The captured ones, ascending."""
        self._graphs: dict[Bucket, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.num_replays = 0
        """Passes that were replayed. Others were launched kernel by kernel."""

    @property
    def about(self) -> str:
        return super().about + (" in CUDA graphs" if self.buckets else "")

    @torch.inference_mode()
    def warm(self, max_width: int) -> None:
        """Capture all buckets of up to max_width tokens per row. The largest is first, so that the
        others fit into the memory that it allocated."""
        start = time.perf_counter()
        buckets = make_buckets(self.config.num_rows, self.config.max_len, max_width)
        name = self.config.path.name
        try:
            self._graphs = {bucket: self._captured(bucket) for bucket in reversed(buckets)}
        except RuntimeError as error:
            logger.warning(
                "%s: its passes cannot be captured as CUDA graphs (%s), so they are slower: set "
                "engine.cuda_graphs to false to skip the capture",
                *(name, error),
            )
            return
        self.buckets = buckets
        seconds = time.perf_counter() - start
        logger.info("%s: captured passes of %d sizes in %.1f s", name, len(buckets), seconds)

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        bucket = bucket_of(inputs, self.buckets)
        if bucket is None:
            return super().forward(inputs)
        start = time.perf_counter()
        wanted = self._stage(inputs, bucket)
        self._graphs[bucket]()
        self.num_replays += 1
        output = PassOutput(
            self._logits.index_select(0, wanted), self._states(inputs, wanted, bucket)
        )
        self.passes_s += time.perf_counter() - start
        return output

    def _states(
        self, inputs: Sequence[RowInput], wanted: torch.Tensor, bucket: Bucket
    ) -> torch.Tensor | None:
        """The states that the pass returns; see `PassOutput`."""
        if self.config.state_layers:
            firsts = [(one.row * bucket.width, len(one.tokens)) for one in inputs]
            return torch.cat([self._hidden[first : first + num] for first, num in firsts])
        return self._hidden.index_select(0, wanted) if self.config.gives_hidden else None

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
        num_tokens = bucket.num_tokens
        token_ids, positions, slots, seen, _ = self._static_inputs(bucket)

        def run() -> None:
            by_row = bucket.num_rows, bucket.width
            starts = positions.view(by_row)[:, 0]
            bits = self._every[: bucket.width]
            is_seen = (seen.view(by_row)[:, :, None] >> bits).bitwise_and(1).bool()
            mask = attention_mask(starts, is_seen, bucket.context_len)
            group = AttentionGroup(slice(0, num_tokens), slice(0, bucket.num_rows), mask)
            every = self._every[:num_tokens]
            out = self._run(PackedBatch(token_ids[None], positions[None], slots, every, (group,)))
            self._logits[:num_tokens].copy_(out.logits)
            if out.hidden is not None:
                self._hidden[:num_tokens].copy_(out.hidden)

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
