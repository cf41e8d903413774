"""The CUDA graphs of the executor's fake: which iterations replay one.

By trtGptModelInflightBatching.cpp and runtimeBuffers.h of 1.2.0rc2: with `cuda_graph_mode`, an
iteration without contexts leaves a graph for its number of sequences and its longest text, rounded
up to 256 tokens. The next iteration of that shape replays it. The cache holds
`cuda_graph_cache_size` graphs, at least one and at most max_batch_size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smartspec_testing.fake_executor_scheduler import Scheduled

KV_ROUND = 256
"""`kKV_CACHE_LEN_CUDA_GRAPH_ROUND_SIZE`, in tokens."""


@dataclass
class CudaGraphs:
    """capacity: graphs that are kept; 0 where there are none. num_replayed: for tests."""

    capacity: int
    num_replayed: int = 0
    _shapes: dict[tuple[int, int], None] = field(default_factory=dict)

    def replays(self, scheduled: Scheduled) -> bool:
        """Whether the iteration replays a graph. Keeps one for the next of its shape."""
        if not self.capacity or scheduled.context or not scheduled.generating:
            return False
        longest = max(len(job.tokens) for job in scheduled.generating)
        shape = (len(scheduled.generating), -(-longest // KV_ROUND))
        is_known = shape in self._shapes
        self._shapes.pop(shape, None)
        self._shapes[shape] = None
        if len(self._shapes) > self.capacity:
            del self._shapes[next(iter(self._shapes))]
        self.num_replayed += is_known
        return is_known


def make_graphs(config: Any, max_batch_size: int) -> CudaGraphs:
    """config: of the executor."""
    knobs = config.extended_runtime_perf_knob_config
    if not knobs.cuda_graph_mode:
        return CudaGraphs(0)
    return CudaGraphs(min(max_batch_size, max(knobs.cuda_graph_cache_size or 0, 1)))
