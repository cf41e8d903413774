"""Short passes as replays of CUDA graphs: one launch instead of several hundred.

A decoding or verifying pass of a small batch takes a GPU less time than it takes a CPU to launch
its kernels. Captured once and replayed, they are launched together. A graph has fixed shapes and
addresses, so a pass is padded to a bucket (`buckets`), its inputs are copied to one static buffer,
and its logits are written to another. Prompt chunks, longer than MAX_SHORT, go the plain way, and a
pass that has one goes with it.

What this costs:
- The last bucket's padding. `time_pass` goes the same way, so the profile charges it.
- Memory. All graphs share one pool, which is as large as the largest of them needs. PyTorch allows
  that for graphs that are replayed in the order of their capture, so that none overwrites what
  another still has to give. These are replayed in any order, but one after another on one stream,
  each computes all that it reads from the pool, and what outlives a pass (keys, inputs, logits)
  lies outside. The nodes of the graphs come on top: there are as many graphs as the ladder has
  buckets and no more, and none is evicted. The static logits are float32, for the tokens of the
  largest bucket.
- Time at the start, when `warm` captures what decoding needs. Other buckets, such as those of the
  short rest of a prompt, are captured when they are first needed, with a stall.

On a CPU the same code is a dry run: static buffers, padding and scratch slot are the same, and the
"graph" is a plain call of what would be captured. That is how it was tested: IT WAS NEVER RUN ON A
GPU. The CUDA part follows PyTorch's documents (CUDA semantics, "CUDA Graphs"; `torch.cuda.graph`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smartspec_py.engines.torch.buckets import Bucket, lay_out, lay_out_drafts, make_ladder
from smartspec_py.engines.torch.packed import AttentionGroup, PackedBatch, RowInput, causal_mask
from smartspec_py.engines.torch.runner import CausalRunner, ModelError, PassOutput, RunnerConfig

logger = logging.getLogger(__name__)

NUM_INPUTS = 4
"""Numbers of each token that are staged: its id, position and slot, and one of `wanted`."""

NUM_WARM_UPS = 3
"""Passes before a capture, as in PyTorch's own example: libraries choose kernels and take their
workspaces in them, which a capture could not."""

Graph = Callable[[], None]
"""Runs a captured pass over what is in the static buffers."""


class GraphRunner(CausalRunner):
    """A `CausalRunner` whose short passes are padded and captured."""

    can_draft_greedy = True

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        assert not config.batch_invariant, "a padded pass is not batch-invariant"
        super().__init__(model, config)
        self.ladder = make_ladder(config.num_rows, config.max_len)
        max_tokens, device = self.ladder.max_tokens, config.device
        vocab_size = min(config.vocab_size, model.config.vocab_size)
        self._staged = torch.zeros(NUM_INPUTS * max_tokens, dtype=torch.long, device=device)
        self._every = torch.arange(max_tokens, device=device)
        self._logits = torch.zeros(max_tokens, vocab_size, device=device)
        hidden_size = model.config.hidden_size if config.gives_hidden else 0
        self._hidden = torch.zeros(max_tokens, hidden_size, dtype=config.dtype, device=device)
        self._graphs: dict[Bucket, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.num_replays = 0
        self.num_eager = 0
        """Passes that were replayed, and that were not."""

    @property
    def num_graphs(self) -> int:
        """Buckets captured so far."""
        return len(self._graphs)

    @torch.inference_mode()
    def warm(self, max_width: int) -> None:
        """Capture all buckets of up to so many tokens a row, the largest first: the others then
        find room in the memory that it took."""
        start = time.perf_counter()
        try:
            for bucket in self.ladder.buckets(max_width):
                self._graph(bucket)
        except RuntimeError as error:
            raise ModelError(
                f"{self.config.path}: its passes cannot be captured as CUDA graphs ({error}); "
                "engine.cuda_graphs: false spares the attempt"
            ) from error
        logger.info(
            "%s: %d sizes of pass captured in %.1f s",
            self.config.path.name,
            self.num_graphs,
            time.perf_counter() - start,
        )

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> PassOutput:
        bucket = self.ladder.bucket_of(inputs)
        if bucket is None:
            self.num_eager += 1
            return super().forward(inputs)
        start = time.perf_counter()
        graph = self._graph(bucket)
        wanted = self._stage(inputs, bucket)
        self._replay(graph)
        hidden = self._hidden.index_select(0, wanted) if self.config.gives_hidden else None
        output = PassOutput(self._logits.index_select(0, wanted), hidden)
        self.passes_s += time.perf_counter() - start
        return output

    @torch.inference_mode()
    def draft_greedy(
        self, inputs: Sequence[RowInput], draft_lens: Sequence[int]
    ) -> list[list[int]]:
        """See `CausalRunner`. Each token is fed to the next pass on the device; the host waits once
        for all of them."""
        drafts = [self.forward(inputs).logits.argmax(-1)]
        start = time.perf_counter()
        passes = lay_out_drafts(
            inputs, draft_lens, self.ladder, self.config.max_len, self.cache.scratch_slot
        )
        rows = self._to_device([item.row for item in inputs])
        places = self._to_device([[later.positions, later.slots] for later in passes])
        for later, place in zip(passes, places, strict=True):
            graph = self._graph(later.bucket)
            static = self._static_inputs(later.bucket)
            # Whatever a pass of another shape left there, padding must be tokens that exist.
            static[0].zero_().index_copy_(0, rows, drafts[-1])
            static[1:3].copy_(place)
            self._replay(graph)
            drafts.append(self._logits.index_select(0, rows).argmax(-1))
        self.passes_s += time.perf_counter() - start
        by_input: list[list[int]] = torch.stack(drafts, dim=1).tolist()
        return [tokens[:num] for tokens, num in zip(by_input, draft_lens, strict=True)]

    def _graph(self, bucket: Bucket) -> Graph:
        """Captured where it is not yet; that stages padding."""
        graph = self._graphs.get(bucket)
        if graph is None:
            self._stage([], bucket)  # so that trial passes touch no row
            body = self._body(bucket)
            if self._pool is None:
                graph = _dry_run(body)
            else:
                graph = _capture(body, self.config.device, self._pool)
            self._graphs[bucket] = graph
        return graph

    def _replay(self, graph: Graph) -> None:
        graph()
        self.num_replays += 1

    def _body(self, bucket: Bucket) -> Graph:
        """A pass over what is staged for this bucket, all on the device and in fixed places."""
        num_tokens = bucket.num_tokens
        token_ids, positions, slots, _ = self._static_inputs(bucket)

        def run() -> None:
            mask = causal_mask(positions.view(bucket.num_rows, bucket.width), bucket.context_len)
            group = AttentionGroup(
                first=0,
                last=num_tokens,
                row_lo=0,
                row_hi=bucket.num_rows,
                width=bucket.width,
                context_len=bucket.context_len,
                mask=mask,
                gather=None,
                scatter=None,
            )
            every = self._every[:num_tokens]
            out = self._run(PackedBatch(token_ids[None], positions[None], slots, every, (group,)))
            self._logits[:num_tokens].copy_(out.logits)
            if out.hidden is not None:
                self._hidden[:num_tokens].copy_(out.hidden)

        return run

    def _stage(self, inputs: Sequence[RowInput], bucket: Bucket) -> torch.Tensor:
        """Copy a pass to the static buffer, in one transfer. Returns its wanted tokens there."""
        laid_out = lay_out(inputs, bucket, self.config.max_len, self.cache.scratch_slot)
        num_wanted = len(laid_out.wanted)
        unused = [0] * (bucket.num_tokens - num_wanted)
        static = self._static_inputs(bucket)
        host = self._on_host(
            [laid_out.token_ids, laid_out.positions, laid_out.slots, laid_out.wanted + unused]
        )
        static.copy_(host, non_blocking=True)
        return static[3, :num_wanted]

    def _static_inputs(self, bucket: Bucket) -> torch.Tensor:
        """[NUM_INPUTS, R * T]: contiguous, and at the same place for every bucket."""
        return self._staged[: NUM_INPUTS * bucket.num_tokens].view(NUM_INPUTS, bucket.num_tokens)

    def _to_device(self, values: Sequence[Any]) -> torch.Tensor:
        return self._on_host(values).to(self.config.device, non_blocking=True)

    def _on_host(self, values: Sequence[Any]) -> torch.Tensor:
        """Integers, pinned for a GPU: a fresh tensor each time, since PyTorch gives pinned memory
        out again only when the copies from it are done."""
        return torch.tensor(values, dtype=torch.long, pin_memory=self._pool is not None)


def _dry_run(body: Graph) -> Graph:
    """The body itself, after one trial pass, as there are some before a capture."""
    body()
    return body


def _capture(body: Graph, device: torch.device, pool: Any) -> Graph:
    """The body as a CUDA graph, which shares the pool's memory with others.

    body: reads and writes tensors that outlive the graph; whatever else it makes is the pool's.
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
            with torch.cuda.graph(graph, pool=pool):
                body()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails may leave its own behind
    return graph.replay
