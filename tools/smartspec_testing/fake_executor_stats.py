"""Statistics of the executor's fake: of iterations, and of single requests."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from smartspec_testing.fake_executor_blocks import BlockPool
from smartspec_testing.fake_executor_jobs import Job
from smartspec_testing.fake_executor_plain import plain_class
from smartspec_testing.fake_executor_scheduler import Scheduled

TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S.%f"


class IterationStats(plain_class("IterationStats")):  # type: ignore[misc]
    def to_json_str(self) -> str:
        return json.dumps(asdict(self))


class RequestStats(plain_class("RequestStats")):  # type: ignore[misc]
    def to_json_str(self) -> str:
        return json.dumps(asdict(self))


class RequestStatsPerIteration(plain_class("RequestStatsPerIteration")):  # type: ignore[misc]
    def to_json_str(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Counts:
    """Of one entry. num_drafted, num_accepted: draft tokens; latency_s: seconds."""

    iteration: int
    now_s: float
    latency_s: float
    num_queued: int
    num_active: int
    num_completed: int
    num_drafting: int
    num_drafted: int
    num_accepted: int


@dataclass
class StatsLog:
    """What is kept until it is asked for; the oldest are lost beyond the lengths of the config."""

    blocks: BlockPool
    max_active: int
    fills_specdec: bool
    max_iterations: int
    max_request_iterations: int
    _iterations: deque[Any] = field(init=False)
    _requests: deque[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._iterations = deque(maxlen=self.max_iterations)
        self._requests = deque(maxlen=self.max_request_iterations)

    def add(self, scheduled: Scheduled, counts: Counts) -> None:
        stats = IterationStats()
        stats.timestamp = datetime.fromtimestamp(counts.now_s, UTC).strftime(TIMESTAMP_FORMAT)
        stats.iter = counts.iteration
        stats.iter_latency_ms = counts.latency_s * 1e3
        stats.num_queued_requests = counts.num_queued
        stats.num_active_requests = counts.num_active
        stats.num_completed_requests = counts.num_completed
        new = [job for job in scheduled.context if job.first_iter == counts.iteration]
        stats.num_new_active_requests = len(new)
        stats.new_active_requests_queue_latency_ms = 1e3 * sum(
            job.scheduled_s - job.arrival_s for job in new
        )
        stats.max_num_active_requests = self.max_active
        stats.gpu_mem_usage = stats.cpu_mem_usage = stats.pinned_mem_usage = 0
        stats.kv_cache_stats = _kv_cache_stats(self.blocks)
        stats.inflight_batching_stats = _batching_stats(scheduled)
        if self.fills_specdec:
            stats.specdec_stats = _specdec_stats(counts)
        self._iterations.append(stats)
        self._requests.append(_request_stats(counts.iteration, scheduled))

    def take_iterations(self) -> list[Any]:
        taken = list(self._iterations)
        self._iterations.clear()
        return taken

    def take_requests(self) -> list[Any]:
        taken = list(self._requests)
        self._requests.clear()
        return taken


def _kv_cache_stats(blocks: BlockPool) -> Any:
    stats = plain_class("KvCacheStats")()
    stats.max_num_blocks = blocks.num_blocks
    stats.free_num_blocks = blocks.num_free_blocks
    stats.used_num_blocks = blocks.num_held_blocks
    stats.tokens_per_block = blocks.tokens_per_block
    stats.alloc_total_blocks = stats.alloc_new_blocks = blocks.num_allocated
    stats.reused_blocks = blocks.num_reused
    stats.missed_blocks = blocks.num_missed
    stats.cache_hit_rate = _rate(blocks.num_reused, blocks.num_missed)
    return stats


def _batching_stats(scheduled: Scheduled) -> Any:
    stats = plain_class("InflightBatchingStats")()
    stats.num_scheduled_requests = len(scheduled.jobs)
    stats.num_context_requests = len(scheduled.context)
    stats.num_gen_requests = len(scheduled.generating)
    stats.num_paused_requests = 0
    stats.num_ctx_tokens = scheduled.num_context_tokens
    stats.micro_batch_id = 0
    stats.avg_num_decoded_tokens_per_iter = 1.0 if scheduled.generating else 0.0
    return stats


def _specdec_stats(counts: Counts) -> Any:
    stats = plain_class("SpecDecodingStats")()
    stats.num_draft_tokens = counts.num_drafted
    stats.num_accepted_tokens = counts.num_accepted
    stats.num_requests_with_draft_tokens = counts.num_drafting
    stats.acceptance_length = 1.0 + counts.num_accepted / max(counts.num_drafting, 1)
    stats.iter_latency_ms = counts.latency_s * 1e3
    stats.draft_overhead = 0.0
    return stats


def _request_stats(iteration: int, scheduled: Scheduled) -> Any:
    made = RequestStatsPerIteration()
    made.iter = iteration
    made.request_stats = [_one_request_stats(job) for job in scheduled.jobs]
    return made


def _one_request_stats(job: Job) -> Any:
    stats = RequestStats()
    stats.id = job.request_id
    stats.num_generated_tokens = job.num_generated
    stats.context_prefill_position = job.num_read
    stats.scheduled, stats.paused = True, False
    return stats


def perf_metrics(job: Job, blocks: BlockPool, iteration: int, now_s: float) -> Any:
    """Of a request that ends now, in iteration number `iteration`."""
    made = plain_class("RequestPerfMetrics")()
    made.first_iter, made.last_iter, made.iter = job.first_iter, iteration, iteration
    made.timing_metrics = _timing(job, now_s)
    made.kv_cache_metrics = _cache_metrics(job, blocks)
    made.speculative_decoding = plain_class("SpeculativeDecodingMetrics")()
    made.speculative_decoding.total_draft_tokens = len(job.drafts)
    made.speculative_decoding.total_accepted_draft_tokens = job.num_accepted
    made.speculative_decoding.acceptance_rate = job.num_accepted / max(len(job.drafts), 1)
    return made


def _timing(job: Job, now_s: float) -> Any:
    made = plain_class("TimingMetrics")()
    made.arrival_time = timedelta(seconds=job.arrival_s)
    made.first_scheduled_time = timedelta(seconds=job.scheduled_s)
    made.first_token_time = timedelta(seconds=job.first_token_s)
    made.last_token_time = timedelta(seconds=now_s)
    return made


def _cache_metrics(job: Job, blocks: BlockPool) -> Any:
    made = plain_class("KvCacheMetrics")()
    num_reused = len(job.held.shared) if job.held else 0
    num_own = job.held.num_own if job.held else 0
    made.num_reused_blocks = num_reused
    made.num_new_allocated_blocks = made.num_total_allocated_blocks = num_own
    made.num_missed_blocks = blocks.num_needed(job.num_input) - num_reused
    made.kv_cache_hit_rate = _rate(num_reused, made.num_missed_blocks)
    return made


def _rate(num_hits: int, num_misses: int) -> float:
    return num_hits / max(num_hits + num_misses, 1)


def drafts_of(jobs: Sequence[Job]) -> tuple[int, int]:
    """Requests with drafts, and their drafts together."""
    num_drafts = [len(job.drafts) for job in jobs if job.drafts]
    return len(num_drafts), sum(num_drafts)
