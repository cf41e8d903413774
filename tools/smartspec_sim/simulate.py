"""Runs the server's own step loop with simulated engines on a virtual clock.

The step loop, admission, the acceptance estimates and the planner are those of the server.
Triton, the network and the responder are not simulated. A request is put into the inbox at its
arrival time, between two steps.

Several servers share a load as behind a load balancer, each with its own clock. A request goes to
the replica with the fewest open requests when it arrives, ties at random, and to another one if it
is refused.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smartspec_py.constants import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.base import TargetCapabilities
from smartspec_py.serving.admission import CacheBudget
from smartspec_py.serving.messages import Update
from smartspec_py.serving.request import ErrorCode, Request, RequestError
from smartspec_py.serving.step import StepRecord
from smartspec_sim.engine import PLACEHOLDER, VOCAB_SIZE, SimProposer, SimTarget
from smartspec_sim.latency import RequestTiming
from smartspec_sim.workload import SimRequest
from smartspec_testing.clock import VirtualClock
from smartspec_testing.offline import UNBOUNDED, OfflineLoop

SAMPLING = SamplingParams()


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

    def capabilities(self, longest: int) -> TargetCapabilities:
        """longest: maximum tokens of a sequence."""
        return TargetCapabilities(
            max_sequences=self.max_sequences,
            max_context_len=longest,
            max_draft_len=self.max_draft_len,
            max_decode_tokens=1,
            max_prefill_tokens=longest,
            verifies_sampling=True,
            vocab_size=VOCAB_SIZE,
            bytes_per_token=self.target_bytes,
        )

    @property
    def budget(self) -> CacheBudget:
        if not self.cache_bytes:
            return UNBOUNDED
        return CacheBudget(self.cache_bytes, self.target_bytes, self.draft_bytes)


@dataclass
class SimResult:
    """Result of one run, in the order of the requests. Counts are sums over all replicas.

    elapsed_s: virtual seconds. busy_s: virtual seconds inside target passes, mean over the
    replicas. num_sequence_steps: decoding rows, summed over the steps.
    """

    timings: list[RequestTiming] = field(default_factory=list)
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
        """Tokens drafted per decoding step and sequence."""
        return self.num_drafted / max(1, self.num_sequence_steps)

    @property
    def mean_acceptance_len(self) -> float:
        """Tokens gained per decoding step and sequence: accepted drafts and one."""
        return 1.0 + self.num_accepted / max(1, self.num_sequence_steps)

    def count(self, step: StepRecord) -> None:
        verifications, num_undrafted = step.verifications, step.num_undrafted
        self.num_steps += 1
        self.num_generated += step.num_generated
        if num_undrafted:
            self.draft_lens[0] += num_undrafted
        for num_drafted, num_accepted in verifications:
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted
            self.draft_lens[num_drafted] += 1
        rows = num_undrafted + len(verifications)
        self.num_sequence_steps += rows
        self.num_decoding_steps += bool(rows)


Ended = Callable[[SequenceId, RequestTiming], object]
"""Called with each request that has ended."""


class Server:
    """One simulated server with one policy."""

    def __init__(
        self,
        policy: str,
        cost: CostModel,
        limits: SimLimits,
        longest: int,
        on_step: Callable[[StepRecord], object],
        on_end: Ended,
    ) -> None:
        """cost: times of steps, and the planner's cost model at the start. longest: tokens of the
        longest request."""
        self._policy = policy
        self._limits = limits
        self._on_end = on_end
        self.clock = VirtualClock()
        self._texts: dict[SequenceId, SimRequest] = {}
        self._open: dict[SequenceId, Request] = {}
        self._num_ended_in_step = 0
        most = limits.max_draft_len
        self.target = SimTarget(limits.capabilities(longest), cost, self.clock, self._texts)
        proposers = {
            name: SimProposer(name, self._texts, most, cost, self.clock, num_bytes)
            for name, num_bytes in ((DRAFT_MODEL, limits.draft_bytes), (PROMPT_LOOKUP, 0))
        }
        self._offline = OfflineLoop(
            self.target,
            proposers,
            cost,
            self.clock.now,
            budget=limits.budget,
            max_queue=limits.max_queue,
            prefill_chunk=limits.prefill_chunk,
            on_update=self._take,
            on_step=on_step,
        )
        self.loop = self._offline.loop

    def advance(self, until_s: float) -> None:
        """Run the steps that begin before until_s. The last one may end later."""
        while self.clock.now() < until_s and self._offline.is_busy:
            self._num_ended_in_step = 0
            self._offline.step()
        if until_s < math.inf:
            while (left := until_s - self.clock.now()) > 0:  # again, if the sum was rounded down
                self.clock.sleep(left)

    def num_open(self, time_s: float) -> int:
        """Requests that have not ended at time_s, the time of the last `advance`."""
        ends_later = self.clock.now() > time_s
        return len(self._open) + (self._num_ended_in_step if ends_later else 0)

    def put(self, request: SimRequest) -> None:
        """Serve the request from the next step on. Raises RequestError if the queue is full, or if
        the request is longer than the cache."""
        need = request.context_len * self._limits.target_bytes
        if 0 < self._limits.cache_bytes < need:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "longer than the cache")
        served = _served_request(request, self._policy, self._limits.max_draft_len)
        self._offline.put(served)
        self._texts[request.sequence] = request
        self._open[request.sequence] = served

    def _take(self, update: Update) -> None:
        """Record the times of a request that has ended."""
        if not update.is_last:
            return
        served = self._open.pop(update.sequence)
        del self._texts[update.sequence]
        self._num_ended_in_step += 1
        timing = RequestTiming(
            scheduled_s=served.arrival_s,
            first_s=served.first_token_s,
            last_s=served.last_token_s,
            num_tokens=served.num_generated,
            error=None if update.error is None else update.error[1],
        )
        self._on_end(update.sequence, timing)


def _served_request(request: SimRequest, policy: str, max_draft_len: int) -> Request:
    """The request as the loop knows it."""
    deadline_s, slo_ms = request.deadline_s, request.tpot_slo_ms
    return Request(
        sequence=request.sequence,
        tokens=[PLACEHOLDER] * request.prompt_len,
        num_prompt=request.prompt_len,
        max_tokens=request.max_tokens or request.output_len,
        sampling=SAMPLING,
        policy=policy,
        max_draft_len=max_draft_len,
        proposers=tuple(request.runs),
        slo_s_per_token=None if slo_ms is None else slo_ms / 1e3,
        acceptance_group=request.acceptance_group,
        priority=request.priority,
        arrival_s=request.arrival_s,
        deadline_s=None if deadline_s is None else request.arrival_s + deadline_s,
    )


class Simulation:
    """One policy on one workload. `run` once; the same arguments give the same result."""

    def __init__(
        self,
        requests: Sequence[SimRequest],
        policy: str,
        cost: CostModel,
        limits: SimLimits,
        *,
        num_replicas: int = 1,
    ) -> None:
        """requests: in order of arrival. cost: see `Server`."""
        self._requests = requests
        self._rng = random.Random(1)
        self._timings: dict[SequenceId, RequestTiming] = {}
        self._result = SimResult()
        self._progress: Callable[[int], object] = lambda num_over: None
        longest = max((request.context_len for request in requests), default=1)
        self.servers = [
            Server(
                policy,
                cost,
                limits,
                longest,
                self._result.count,
                self._end,
            )
            for _ in range(num_replicas)
        ]

    def run(self, progress: Callable[[int], object] = lambda num_over: None) -> SimResult:
        """Serve all requests. progress: called with the number of requests that have ended."""
        self._progress = progress
        for request in self._requests:
            self._advance(request.arrival_s)
            self._send(request)
        self._advance(math.inf)
        result = self._result
        for server in self.servers:
            server.loop.lifecycle.check_integrity()
            assert not server.target.num_sequences, "a request was not released"
            result.num_preemptions += server.loop.lifecycle.num_preemptions
            result.elapsed_s = max(result.elapsed_s, server.clock.now())
            result.busy_s += server.target.busy_s / len(self.servers)
        result.timings = [self._timings[request.sequence] for request in self._requests]
        return result

    def _advance(self, time_s: float) -> None:
        for server in self.servers:
            server.advance(time_s)

    def _send(self, request: SimRequest) -> None:
        candidates, arrival_s = list(self.servers), request.arrival_s
        while candidates:
            fewest = min(server.num_open(arrival_s) for server in candidates)
            idlest = [one for one in candidates if one.num_open(arrival_s) == fewest]
            server = self._rng.choice(idlest)
            try:
                server.put(request)
                return
            except RequestError as error:
                reason = f"refused: {error}"
                candidates.remove(server)
        self._end(request.sequence, RequestTiming(arrival_s, error=reason))

    def _end(self, sequence: SequenceId, timing: RequestTiming) -> None:
        assert sequence not in self._timings, f"request {sequence} ended twice"
        self._timings[sequence] = timing
        self._progress(len(self._timings))
