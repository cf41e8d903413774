"""Runs the server's own step loop with simulated engines on a virtual clock.

The step loop, the scheduler, the acceptance estimates and the planner are those of the server.
Triton, the network and the responder are not simulated. A request is put into the inbox at its
arrival time, between two steps.
"""

from __future__ import annotations

import gc
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from smartspec_py.config import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.serving.admission import CacheBudget
from smartspec_py.serving.build import keep_numpy_in_one_thread
from smartspec_py.serving.messages import Update
from smartspec_py.serving.request import ErrorCode, Request, RequestError
from smartspec_py.serving.step import StepRecord
from smartspec_sim.engine import PLACEHOLDER, SimProposer, SimTarget, sim_capabilities
from smartspec_sim.latency import RequestTiming
from smartspec_sim.workload import SimRequest, longest_context
from smartspec_testing.clock import VirtualClock
from smartspec_testing.offline import UNBOUNDED, OfflineLoop

SAMPLING = SamplingParams()
SHOW_EVERY = 256
"""Steps between two calls of `progress`."""


@dataclass(frozen=True)
class SimLimits:
    """As `limits` of engine.json, with defaults for a GPU.

    target_bytes, draft_bytes: cache bytes per token. cache_bytes: size of both caches together; 0
    means unlimited.
    """

    max_sequences: int = 32
    max_queue: int = 100_000
    max_draft_len: int = 7
    prefill_chunk: int = 512
    target_bytes: int = 0
    draft_bytes: int = 0
    cache_bytes: int = 0


@dataclass
class SimResult:
    """Result of one run. kinds: kinds of the requests, in the order of `timings`.

    elapsed_s: virtual seconds. busy_s: virtual seconds inside target passes.
    num_sequence_steps: decoding rows, summed over the steps.
    """

    policy: str
    timings: list[RequestTiming]
    kinds: list[str]
    num_steps: int = 0
    num_decoding_steps: int = 0
    num_sequence_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    elapsed_s: float = 0.0
    busy_s: float = 0.0
    draft_lens: Counter[int] = field(default_factory=Counter)

    @property
    def mean_rows(self) -> float:
        return self.num_sequence_steps / max(1, self.num_decoding_steps)

    @property
    def mean_draft_len(self) -> float:
        """Tokens drafted a decoding step and sequence."""
        return self.num_drafted / max(1, self.num_sequence_steps)

    @property
    def mean_acceptance_len(self) -> float:
        """Tokens gained a decoding step and sequence: accepted drafts and one."""
        return 1.0 + self.num_accepted / max(1, self.num_sequence_steps)


@dataclass(frozen=True)
class CostChange:
    """From time_s on, in virtual seconds, steps take the time of this cost model. The planner does
    not know it."""

    time_s: float
    cost: CostModel


@contextmanager
def without_collector() -> Iterator[None]:
    """Simulate without the garbage collector and with one thread of NumPy.

    Steps create no reference cycles; looking for them takes 4 % of the time. NumPy's threads take a
    third of the time. NumPy stays limited to one thread in this process.
    """
    keep_numpy_in_one_thread()
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def served_request(request: SimRequest, policy: str, max_draft_len: int) -> Request:
    """The request as the loop knows it."""
    deadline_s, slo_ms = request.deadline_s, request.tpot_slo_ms
    return Request(
        sequence=request.sequence,
        tokens=[PLACEHOLDER] * request.prompt_len,
        num_prompt=request.prompt_len,
        max_tokens=request.output_len,
        sampling=SAMPLING,
        policy=policy,
        max_draft_len=max_draft_len,
        proposers=request.proposers,
        slo_s_per_token=None if slo_ms is None else slo_ms / 1e3,
        cohort=request.cohort,
        priority=request.priority,
        arrival_s=request.arrival_s,
        deadline_s=None if deadline_s is None else request.arrival_s + deadline_s,
    )


Ended = Callable[[SequenceId, RequestTiming], object]
"""Called with each request that has ended."""


class Simulation:
    """One server with one policy. The same arguments give the same result.

    `run` once serves a workload. For several servers, `fleet.py` calls `put` and `advance`.
    """

    def __init__(
        self,
        requests: Sequence[SimRequest],
        policy: str,
        cost: CostModel,
        limits: SimLimits,
        *,
        believed: CostModel | None = None,
        changes: Sequence[CostChange] = (),
        longest: int = 0,
        on_end: Ended = lambda sequence, timing: None,
    ) -> None:
        """requests: in order of arrival. cost: times of steps. believed: the planner's cost model
        at the start; None means the same. changes: changes of the times of steps, in any order;
        each applies from the first step that begins at its time or later. longest: tokens of the
        longest request that `put` will get."""
        self._requests = requests
        self._policy = policy
        self._limits = limits
        self._clock = VirtualClock()
        self._on_end = on_end
        self._texts: dict[SequenceId, SimRequest] = {}
        self._served: dict[SequenceId, Request] = {}
        self._timings: dict[SequenceId, RequestTiming] = {}
        self._result = SimResult(policy, [], [request.cohort for request in requests])
        self._changes = deque(sorted(changes, key=lambda change: change.time_s))
        longest = max(1, longest, longest_context(requests))
        most = limits.max_draft_len
        capabilities = sim_capabilities(
            limits.max_sequences, longest, most, bytes_per_token=limits.target_bytes
        )
        self.target = SimTarget(capabilities, cost, self._clock, self._texts)
        self.proposers = {
            DRAFT_MODEL: SimProposer(
                DRAFT_MODEL, self._texts, most, cost, self._clock, limits.draft_bytes
            ),
            PROMPT_LOOKUP: SimProposer(PROMPT_LOOKUP, self._texts, most, cost, self._clock),
        }
        self._offline = OfflineLoop(
            self.target,
            self.proposers,
            believed or cost,
            self._clock.now,
            budget=_budget(limits),
            max_queue=limits.max_queue,
            prefill_chunk=limits.prefill_chunk,
            on_update=self._take,
            on_step=self._count,
        )
        self.loop = self._offline.loop

    def run(self, progress: Callable[[int], None] | None = None) -> SimResult:
        """Serve all requests. progress: called with the number of requests that have ended."""
        with without_collector():
            return self._run(progress)

    def _run(self, progress: Callable[[int], None] | None) -> SimResult:
        for request in self._requests:
            self.advance(request.arrival_s, progress)
            try:
                self.put(request)
            except RequestError as error:
                self._end(request.sequence, request.arrival_s, f"refused: {error}")
        self.advance(math.inf, progress)
        self.loop.check_integrity()
        assert not self.target.num_sequences, "a request was not released"
        if progress is not None:
            progress(len(self._timings))
        result = self.result
        result.timings = [self._timings[request.sequence] for request in self._requests]
        return result

    @property
    def result(self) -> SimResult:
        """The counts so far, without the timings."""
        result = self._result
        result.num_preemptions = self.loop.num_preemptions
        result.elapsed_s, result.busy_s = self._clock.now(), self.target.busy_s
        return result

    @property
    def now_s(self) -> float:
        """The end of the last step, or the time up to which it was idle."""
        return self._clock.now()

    @property
    def is_busy(self) -> bool:
        return self._offline.is_busy

    def advance(self, until_s: float, progress: Callable[[int], None] | None = None) -> None:
        """Run the steps that begin before until_s. A server without requests is idle until then."""
        result = self._result
        while self._clock.now() < until_s and self._offline.is_busy:
            self._change_cost()
            self._offline.step()
            result.num_steps += 1
            if progress is not None and result.num_steps % SHOW_EVERY == 0:
                progress(len(self._timings))
        if until_s < math.inf:
            self._skip_to(until_s)

    def _change_cost(self) -> None:
        while self._changes and self._changes[0].time_s <= self._clock.now():
            cost = self._changes.popleft().cost
            self.target.set_cost(cost)
            for proposer in self.proposers.values():
                proposer.set_cost(cost)

    def _skip_to(self, time_s: float) -> None:
        """Let idle time pass; at least up to time_s, whatever rounding says."""
        while (left := time_s - self._clock.now()) > 0:
            self._clock.sleep(left)

    def put(self, request: SimRequest) -> None:
        """Serve the request from the next step on. Raises RequestError if the queue is full, or if
        the request is longer than the cache."""
        need = request.context_len * self._limits.target_bytes
        if 0 < self._limits.cache_bytes < need:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "longer than the cache")
        served = served_request(request, self._policy, self._limits.max_draft_len)
        self._offline.put(served)
        self._texts[request.sequence] = request
        self._served[request.sequence] = served

    def _take(self, update: Update) -> None:
        """Record the times of a request that has ended."""
        if update.is_last:
            served = self._served.pop(update.sequence)
            del self._texts[served.sequence]
            error = None if update.error is None else update.error[1]
            self._end(served.sequence, served.arrival_s, error, served)

    def _end(
        self,
        sequence: SequenceId,
        arrival_s: float,
        error: str | None,
        served: Request | None = None,
    ) -> None:
        assert sequence not in self._timings, f"request {sequence} ended twice"
        timing = RequestTiming(arrival_s, arrival_s, error=error)
        if served is not None:
            timing = replace(
                timing,
                first_s=served.first_token_s,
                last_s=served.last_token_s,
                num_tokens=served.num_generated,
            )
        self._timings[sequence] = timing
        self._on_end(sequence, timing)

    def _count(self, step: StepRecord) -> None:
        result, verifications, num_undrafted = self._result, step.verifications, step.num_undrafted
        result.num_generated += step.num_generated
        if num_undrafted:
            result.draft_lens[0] += num_undrafted
        rows = num_undrafted + len(verifications)
        for num_drafted, num_accepted in verifications:
            result.num_drafted += num_drafted
            result.num_accepted += num_accepted
            result.draft_lens[num_drafted] += 1
        result.num_sequence_steps += rows
        result.num_decoding_steps += bool(rows)


def _budget(limits: SimLimits) -> CacheBudget:
    """Without a size of the cache, a token takes no room."""
    if not limits.cache_bytes:
        return UNBOUNDED
    return CacheBudget(limits.cache_bytes, limits.target_bytes, limits.draft_bytes)
