"""Whether the TensorRT-LLM path should draft for one half of the requests while the other verifies.

Today a step is host, draft engine, target engine, one after the other. With two-batch overlap, each
half of the requests has its own steps, and the engines work at the same time. Both engines then
read their weights twice as often. On one GPU they also share its memory bandwidth.

A model in virtual time; nothing runs on a GPU. A pass reads weights and cache at BANDWIDTH, or
computes, whichever takes longer. Starting it takes OVERHEAD_S, which grows with the batch. Engines
on one GPU that together need more than all of it are slowed down in proportion. They never delay
each other otherwise, and the loop never waits for the slower half. Both favour the overlap.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from smartspec_sim.hardware import COMPUTE_SHARE, GPUS, MODELS, USABLE_MEMORY
from studies.document import publish, table

TARGET, DRAFT, GPU = MODELS["llama-3-8b"], MODELS["llama-3.2-1b"], GPUS["h100"]

FULL_BATCH, FULL_CONTEXT = 32, 2000
"""Sequences, and tokens of each, for which the estimates below were made, with 4 drafts."""

BANDWIDTH = (TARGET.weight_bytes + FULL_BATCH * FULL_CONTEXT * TARGET.kv_bytes) / 9e-3
"""Bytes per second, so that a step without drafts takes 9 ms."""


class Overhead(NamedTuple):
    """Seconds at FULL_BATCH beside reading and computing: of a draft pass, of a verification, and
    of the loop. They make 11 ms of drafting, 15 ms of verification and 1.5 ms of Python."""

    draft_s: float = 1.05e-3
    verify_s: float = 6e-3
    host_s: float = 1.5e-3


OVERHEAD_S = Overhead()
OVERHEAD_OF_ONE = 0.26
"""Share of OVERHEAD_S with one sequence. 4 drafts then reach 1.3 times the speed of none."""

BATCHES = (2, 4, 8, 12, 16, 24, 32, 48, 64)
DRAFT_LENS = range(1, 9)
NUM_STEPS = 100
"""Steps before the steps that are counted, and number of those."""


@dataclass(frozen=True)
class Case:
    """accept_prob: of each draft, if those before it were accepted. context_len: tokens of each
    sequence."""

    accept_prob: float = 0.7
    context_len: int = 2000

    def expected(self, draft_len: int) -> float:
        """Tokens per sequence and step."""
        return sum(self.accept_prob**drafts for drafts in range(draft_len + 1))


@dataclass(frozen=True)
class Phase:
    """work_s: seconds in which the GPU reads or computes. overhead_s: other seconds."""

    work_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        return self.work_s + self.overhead_s

    def gpu_share(self, idle: float) -> float:
        """Share of the GPU that it needs, if the GPU is idle in this share of the overhead."""
        return (self.work_s + (1.0 - idle) * self.overhead_s) / self.total_s


def target_s(batch_size: int, draft_len: int, case: Case) -> float:
    """A pass of the target without its overhead; also a step without drafts, which is a burst."""
    cache_bytes = batch_size * case.context_len * TARGET.kv_bytes
    flops = 2 * TARGET.parameters * batch_size * (draft_len + 1)
    reading_s = (TARGET.weight_bytes + cache_bytes) / BANDWIDTH
    return max(reading_s, flops / (COMPUTE_SHARE * GPU.flops))


def phases(batch_size: int, draft_len: int, case: Case) -> tuple[Phase, Phase, Phase]:
    """Host, draft engine and target engine in one step of these sequences."""
    grown = OVERHEAD_OF_ONE + (1 - OVERHEAD_OF_ONE) * (batch_size - 1) / (FULL_BATCH - 1)
    draft_bytes = DRAFT.weight_bytes + batch_size * case.context_len * DRAFT.kv_bytes
    return (
        Phase(0.0, grown * OVERHEAD_S.host_s),
        Phase(draft_len * draft_bytes / BANDWIDTH, draft_len * grown * OVERHEAD_S.draft_s),
        Phase(target_s(batch_size, draft_len, case), grown * OVERHEAD_S.verify_s),
    )


def rate_of_none(batch_size: int, case: Case) -> float:
    """Tokens per second without drafts."""
    return batch_size / target_s(batch_size, 0, case)


def rate_of_one(batch_size: int, case: Case) -> tuple[float, int]:
    """Tokens per second if all sequences step together, and the best draft length."""
    return max(
        (batch_size * case.expected(k) / sum(p.total_s for p in phases(batch_size, k, case)), k)
        for k in DRAFT_LENS
    )


class Half:
    """A half of the requests. since_s: when it began to wait for its phase."""

    def __init__(self, every: Sequence[Phase]) -> None:
        self._every = every
        self.index, self.num_steps, self.since_s = 0, 0, 0.0
        self.left_s = self.phase.total_s

    @property
    def phase(self) -> Phase:
        return self._every[self.index]

    def spend(self, seconds: float, now_s: float) -> None:
        self.left_s -= seconds
        if self.left_s > 1e-12:
            return
        self.index = (self.index + 1) % len(self._every)
        self.num_steps += self.index == 0
        self.left_s, self.since_s = self.phase.total_s, now_s


def step_s(halves: Sequence[Half], idle: float, *, shares_gpu: bool) -> float:
    """Mean seconds between two ends of steps, of either half. Host and engines each serve one half
    at a time, first come, first served."""
    now_s, begin_s = 0.0, 0.0
    while (num_steps := sum(half.num_steps for half in halves)) < 2 * NUM_STEPS:
        if num_steps <= NUM_STEPS:
            begin_s, num_before = now_s, num_steps
        active = list(halves)
        if len({half.index for half in halves}) == 1:
            active = [min(halves, key=lambda half: half.since_s)]
        needed = sum(half.phase.gpu_share(idle) for half in active if half.index)
        speed = 1.0 / max(1.0, needed) if shares_gpu else 1.0
        seconds = min(half.left_s for half in active)
        now_s += seconds / speed
        for half in active:
            half.spend(seconds, now_s)
    return (now_s - begin_s) / (num_steps - num_before)


def rate_of_two(batch_size: int, case: Case, idle: float, *, shares_gpu: bool) -> tuple[float, int]:
    """Tokens per second with two-batch overlap, and the best draft length; batch_size is even."""
    every = []
    for draft_len in DRAFT_LENS:
        halves = [Half(phases(batch_size // 2, draft_len, case)) for _ in range(2)]
        tokens = batch_size // 2 * case.expected(draft_len)
        every.append((tokens / step_s(halves, idle, shares_gpu=shares_gpu), draft_len))
    return max(every)


def rate_of_replicas(batch_size: int, case: Case) -> float:
    """Two GPUs with both models each and half of the requests; with drafts where they pay."""
    half = batch_size // 2
    return 2 * max(rate_of_none(half, case), rate_of_one(half, case)[0])


class Rates(NamedTuple):
    """Tokens per second. two_busy, two_half, two_idle: two-batch overlap on one GPU that is idle in
    0, 0.5 and all of the overhead. own_gpu: with the draft model on a second GPU."""

    batch_size: int
    none: float
    one: float
    two_busy: float
    two_half: float
    two_idle: float
    own_gpu: float
    replicas: float

    @property
    def best(self) -> float:
        """Without overlap on one GPU."""
        return max(self.none, self.one)


def rates(batch_size: int, case: Case) -> Rates:
    busy, half, idle = (
        rate_of_two(batch_size, case, share, shares_gpu=True)[0] for share in (0.0, 0.5, 1.0)
    )
    return Rates(
        batch_size,
        none=rate_of_none(batch_size, case),
        one=rate_of_one(batch_size, case)[0],
        two_busy=busy,
        two_half=half,
        two_idle=idle,
        own_gpu=rate_of_two(batch_size, case, 0.0, shares_gpu=False)[0],
        replicas=rate_of_replicas(batch_size, case),
    )


def all_rates(case: Case) -> list[Rates]:
    """At every batch size whose caches fit beside the weights of both models."""
    room = USABLE_MEMORY * GPU.memory - TARGET.weight_bytes - DRAFT.weight_bytes
    each = case.context_len * (TARGET.kv_bytes + DRAFT.kv_bytes)
    return [rates(batch_size, case) for batch_size in BATCHES if batch_size * each <= room]


def summary(case: Case) -> list[object]:
    """A line of the second table."""
    paying = [one for one in all_rates(case) if one.one > one.none]
    return [
        case.accept_prob,
        case.context_len,
        paying[-1].batch_size,
        *(
            f"{max(getattr(one, name) / one.best for one in paying):.2f}"
            for name in ("two_busy", "two_half", "two_idle", "own_gpu", "replicas")
        ),
    ]


CASES = [Case(p, length) for p in (0.7, 0.85) for length in (500, 2000, 8000)]


def main() -> None:
    every = all_rates(Case())
    lines = [
        [
            one.batch_size,
            f"{one.none:.0f}",
            *(f"{rate / one.best:.2f}" for rate in one[2:]),
        ]
        for one in every
    ]
    shared = ["GPU never idle", "idle in half", "idle in all"]
    beside = ["draft on a second GPU", "two replicas"]
    over = "rates over the better of no drafts and one batch on one GPU"
    publish(
        Path(sys.argv[1]),
        "overlap",
        "Two-batch overlap on TensorRT-LLM, modelled",
        [
            ANSWER,
            f"Tokens/s without drafts, and {over}, by concurrent requests; acceptance rate 0.7, "
            "2,000 tokens of text:",
            table(["requests", "no drafts", "one batch", *shared, *beside], lines),
            "The largest of these ratios at 2, 4, 8, 12, 16, 24, 32, 48 and 64 requests, as far as "
            "the caches fit and drafts pay with one batch:",
            table(
                ["acceptance rate", "tokens of text", "drafts pay up to", *shared, *beside],
                map(summary, CASES),
            ),
            METHOD,
        ],
        {"rates": [one._asdict() for one in every]},
    )


ANSWER = """**Two-batch overlap is not built, because it does not pay.** On one GPU, halving the
batch reads the weights of both models twice as often. If the GPU is idle in half of the engines'
overhead, overlap is never faster than the better of no drafts and one batch, and up to 42 % slower.
It gains only with 32 requests or more, an acceptance rate of 0.85, and a GPU that is idle in more
than half of the overhead. Then less overhead gains as well, without halving the batch.

With the draft model on a second GPU, overlap gains up to 1.6 times. But a second replica on that
GPU gains as much or more, at every batch size and with any models: a step of one half takes at
least as long as the step of a replica that serves this half. A replica needs no new code."""

METHOD = """The model: Llama 3 8B with a 1B draft in bfloat16 on an H100. It reproduces the estimate
for 32 requests and 4 drafts (draft 11 ms, verification 15 ms, Python 1.5 ms, no drafts 9 ms) and
1.3 times the speed of no drafts with one request. Each arrangement uses its best draft length. *GPU
never idle*, *idle in half*, *idle in all*: two-batch overlap on one GPU that is idle in this share
of the overhead of the engines. Nobody measured that share. *draft on a second GPU*: two-batch
overlap without shared bandwidth; without overlap a second GPU for the draft model gains nothing
here. *two replicas*: each GPU serves half of the requests with both models."""


if __name__ == "__main__":
    main()
