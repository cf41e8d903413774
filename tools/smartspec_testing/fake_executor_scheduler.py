"""Who runs in an iteration of the executor's fake: batch size, token budget and blocks.

A context counts its whole input and its drafts against max_num_tokens, cached or not; a generating
request counts 1. Those who do not fit, and all behind them, wait. All blocks that a request may
come to need are taken when it begins (GUARANTEED_NO_EVICT). With chunked context, an input that
does not fit is read in pieces of whole blocks; its drafts then have the room that is left in the
last block, and the others are dropped without a word.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from smartspec_testing.fake_executor_blocks import BlockPool
from smartspec_testing.fake_executor_jobs import Behaviour, EngineLimits, Job


@dataclass(frozen=True)
class Scheduled:
    """One iteration. context: jobs that read, generating: those that draw one token each.

    num_context_tokens: as charged; num_computed: of them, those that were not cached.
    """

    context: Sequence[Job]
    generating: Sequence[Job]
    num_context_tokens: int
    num_computed: int

    @property
    def jobs(self) -> list[Job]:
        return [*self.generating, *self.context]


@dataclass
class Scheduler:
    """Keeps the jobs; the executor takes them out by `remove` when they end."""

    limits: EngineLimits
    blocks: BlockPool
    behaviour: Behaviour
    is_chunked: bool
    hold_back_prob: float
    random: random.Random
    waiting: list[Job] = field(default_factory=list)
    generating: list[Job] = field(default_factory=list)

    @property
    def jobs(self) -> list[Job]:
        return self.generating + self.waiting

    def add(self, job: Job) -> None:
        """Behind those of the same priority."""
        priority = job.request.priority
        index = sum(1 for other in self.waiting if other.request.priority >= priority)
        self.waiting.insert(index, job)

    def refusal(self, job: Job) -> str | None:
        """Why the job can never run; None where it can."""
        limits = self.limits
        if job.num_input > limits.max_input_len:
            return f"prompt of {job.num_input} tokens exceeds max_input_len {limits.max_input_len}"
        if job.max_tokens < 1:
            return f"no room to generate within max_seq_len {limits.max_seq_len}"
        if not self.is_chunked and job.context_charge > limits.max_num_tokens:
            return f"{job.context_charge} tokens exceed max_num_tokens {limits.max_num_tokens}"
        num_blocks = self.blocks.num_needed(job.num_reserved)
        if num_blocks > self.blocks.num_blocks:
            return f"{num_blocks} blocks exceed the {self.blocks.num_blocks} of the KV cache"
        return None

    def schedule(self) -> Scheduled:
        """Take the waiting jobs that fit beside the generating ones, first come, first served."""
        generating = list(self.generating)
        num_tokens = len(generating)
        context: list[Job] = []
        num_computed = 0
        for job in list(self.waiting):
            if len(generating) + len(context) == self.limits.max_batch_size:
                break
            num_read = self._num_fitting(job, self.limits.max_num_tokens - num_tokens)
            if num_read == 0 or not self._has_blocks(job):
                break
            if self.hold_back_prob and self.random.random() < self.hold_back_prob:
                continue
            num_computed += self._read(job, num_read)
            num_tokens += num_read
            context.append(job)
        self.generating += [job for job in context if job.has_read_all]
        self.waiting = [job for job in self.waiting if not job.has_read_all]
        num_context_tokens = num_tokens - len(generating)
        return Scheduled(context, generating, num_context_tokens, num_computed)

    def _num_fitting(self, job: Job, budget: int) -> int:
        """Tokens that the job may read now, its drafts among them; 0 where it has to wait."""
        left = job.context_charge - self._start(job)
        if left <= budget:
            return left
        size = self.limits.tokens_per_block
        return min(budget, job.num_input - job.num_read) // size * size if self.is_chunked else 0

    def _start(self, job: Job) -> int:
        """Tokens that are not charged again, or, where cached ones are free, never are."""
        if job.num_read or self.behaviour.charges_reused_tokens:
            return job.num_read
        return self.blocks.num_cached(job.request.input_token_ids, job.request.cache_salt_id)

    def _has_blocks(self, job: Job) -> bool:
        """Whether the job has its blocks, or could have them."""
        if job.held is not None:
            return True
        tokens, salt = job.request.input_token_ids, job.request.cache_salt_id
        return self.blocks.can_allocate(tokens, job.num_reserved, salt)

    def _read(self, job: Job, num_tokens: int) -> int:
        """Begin or go on with the job's context; how many tokens of it have to be computed."""
        start = self._start(job)
        if job.held is None:
            tokens, salt = job.request.input_token_ids, job.request.cache_salt_id
            job.held = self.blocks.allocate(tokens, job.num_reserved, salt)
        assert job.held is not None
        end = start + num_tokens
        job.num_read = min(end, job.num_input)
        if not job.has_read_all or job.is_chunked:
            job.is_chunked = True
            self._drop_drafts(job)
        return max(end - max(start, job.held.num_cached), 0)

    def _drop_drafts(self, job: Job) -> None:
        job.drafts = job.drafts[: -job.num_input % self.limits.tokens_per_block]

    def remove(self, job: Job, stores: bool) -> None:
        """stores: whether its blocks can be reused."""
        for jobs in (self.waiting, self.generating):
            if job in jobs:
                jobs.remove(job)
        if job.held is not None:
            self.blocks.free(job.held, job.computed, stores)
            job.held = None
