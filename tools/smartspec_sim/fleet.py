"""Several simulated servers behind a load balancer, and the fewest that meet latency targets.

Each replica runs the server's own step loop on its own clock. A request goes to the replica with
the fewest open requests when it arrives, ties at random, and to another one if it is refused.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SequenceId
from smartspec_py.serving.request import RequestError
from smartspec_sim.capacity import SAMPLE, Target, Verdict, smallest
from smartspec_sim.latency import RequestTiming
from smartspec_sim.scenario import Load, Run, as_row
from smartspec_sim.simulate import SimLimits, SimResult, Simulation, without_collector
from smartspec_sim.workload import SimRequest, longest_context, offered_rate

GUESSED_LOAD = 0.7
"""The search begins at the number of replicas that would be this busy with decoding."""

GivesUp = Callable[[RequestTiming], bool]
Progress = Callable[[float], None]


class _Replica:
    """num_open: requests that were sent to it and have not ended."""

    def __init__(self, server: Callable[[_Replica], Simulation]) -> None:
        self.num_open = 0
        self.ended_s: deque[float] = deque()
        self.server = server(self)

    def advance(self, time_s: float) -> None:
        """Run to time_s. The last step may end later, with requests that are still open then."""
        self.server.advance(time_s)
        while self.ended_s and self.ended_s[0] <= time_s:
            self.ended_s.popleft()
            self.num_open -= 1


class FleetSimulation:
    """One policy on one workload. `run` once; the same arguments give the same result."""

    def __init__(
        self,
        requests: Sequence[SimRequest],
        policy: str,
        cost: CostModel,
        limits: SimLimits,
        num_replicas: int,
        seed: int = 1,
    ) -> None:
        """requests: in order of arrival. seed: of the load balancer. Otherwise as `Simulation`."""
        self._requests = requests
        self._policy = policy
        self._rng = random.Random(seed)
        self._timings: dict[SequenceId, RequestTiming] = {}
        self._is_given_up = False
        self._gives_up: GivesUp = lambda timing: False
        longest = longest_context(requests)

        def start(replica: _Replica) -> Simulation:
            def on_end(sequence: SequenceId, timing: RequestTiming) -> None:
                self._record(sequence, timing)
                replica.ended_s.append(replica.server.now_s)

            return Simulation((), policy, cost, limits, longest=longest, on_end=on_end)

        self._replicas = [_Replica(start) for _ in range(num_replicas)]

    def run(
        self,
        progress: Callable[[int], None] = lambda num_over: None,
        gives_up: GivesUp = lambda timing: False,
    ) -> SimResult | None:
        """Serve everything. progress: called with the number of requests that have ended.

        gives_up: called with each request that has ended. If it returns true, the simulation ends
        without a result.
        """
        self._gives_up = gives_up
        with without_collector():
            for request in self._requests:
                if not self._advance(request.arrival_s):
                    return None
                self._send(request)
                progress(len(self._timings))
            return self._merged() if self._advance(math.inf) else None

    def _advance(self, time_s: float) -> bool:
        """False if the simulation was given up."""
        for replica in self._replicas:
            replica.advance(time_s)
            if self._is_given_up:
                return False
        return True

    def _send(self, request: SimRequest) -> None:
        candidates = list(self._replicas)
        while candidates:
            fewest = min(replica.num_open for replica in candidates)
            replica = self._rng.choice([one for one in candidates if one.num_open == fewest])
            try:
                replica.server.put(request)
            except RequestError as error:
                reason = f"refused: {error}"
                candidates.remove(replica)
            else:
                replica.num_open += 1
                return
        timing = RequestTiming(request.arrival_s, request.arrival_s, error=reason)
        self._record(request.sequence, timing)

    def _record(self, sequence: SequenceId, timing: RequestTiming) -> None:
        self._timings[sequence] = timing
        self._is_given_up |= self._gives_up(timing)

    def _merged(self) -> SimResult:
        """Sums over all replicas. busy_s is the mean over them."""
        results = [replica.server.result for replica in self._replicas]
        merged = SimResult(
            self._policy,
            [self._timings[request.sequence] for request in self._requests],
            [request.cohort for request in self._requests],
        )
        for name in SUMS:
            setattr(merged, name, sum(getattr(result, name) for result in results))
        for result in results:
            merged.draft_lens.update(result.draft_lens)
        merged.elapsed_s = max(result.elapsed_s for result in results)
        merged.busy_s /= len(results)
        return merged


SUMS = (
    "num_steps",
    "num_decoding_steps",
    "num_sequence_steps",
    "num_drafted",
    "num_accepted",
    "num_generated",
    "num_preemptions",
    "busy_s",
)


def fleet_row(
    run: Run, num_replicas: int, progress: Progress = lambda share: None
) -> dict[str, Any]:
    """The row of this many replicas. progress: called with the share that is done."""
    row = _row(run, num_replicas, num_replicas, (), progress)
    assert row is not None, "it gives up only to meet a target"
    return row


def search(
    run: Run,
    targets: Sequence[Target],
    progress: Progress = lambda share: None,
    guess: int | None = None,
) -> dict[str, Any]:
    """The row of the smallest fleet that meets the targets. Without one, the row has no latencies.

    progress: called with an estimate of the share that is done. guess: where the search begins;
    None means an estimate from the costs.
    """
    rows: dict[int, dict[str, Any] | None] = {}

    def is_enough(number: int) -> bool:
        rows[number] = _row(run, number, min(number, SAMPLE), targets)
        progress(1 - 0.8 ** len(rows))
        return rows[number] is not None

    number = smallest(is_enough, guess or _guess(run))
    found = rows.get(number or 0) or {
        "policy": run.policy,
        "offered_rps": rate_of(run.load),
    }
    texts = [str(target) for target in targets]
    return found | {"num_replicas": number, "targets": texts, "tried": sorted(rows)}


def _row(
    run: Run,
    num_replicas: int,
    sample: int,
    targets: Sequence[Target],
    progress: Progress = lambda share: None,
) -> dict[str, Any] | None:
    """The row of this many replicas, or None if they miss a target.

    sample: the number that is simulated. A load without requests meets no target.
    """
    requests = run.load.faster(sample / num_replicas).requests()
    verdict = Verdict(targets, len(requests))
    fleet = FleetSimulation(requests, run.policy, run.cost, run.limits, sample)
    result = fleet.run(
        lambda num_over: progress(num_over / max(1, len(requests))), verdict.is_missed
    )
    is_met = result is not None and all(one.is_met(result.timings) for one in targets)
    if result is None or not is_met or (targets and not requests):
        return None
    rate = offered_rate(requests) * num_replicas / sample
    return as_row(result, run.limits, rate, run.slo) | {
        "num_replicas": num_replicas,
        "simulated_replicas": sample,
        "errors": dict(Counter(one.error for one in result.timings if one.error)),
    }


def _guess(run: Run) -> int:
    """From the rate of full batches of single tokens, with the mean lengths of the load."""
    rate = rate_of(run.load)
    requests = run.load.faster(min(1.0, 10 / rate)).requests() if rate else []
    if not requests:
        return 1
    mean_output = sum(one.output_len for one in requests) / len(requests)
    mean_context = sum(one.context_len for one in requests) / len(requests)
    rows = run.limits.max_sequences
    step_s = run.cost.target_s(rows, rows, mean_context)
    return math.ceil(rate * mean_output * step_s / rows / GUESSED_LOAD)


def rate_of(load: Load) -> float:
    """Mean requests per second."""
    if load.spec is None:
        return offered_rate(load.record)
    phases = [phase.rates for phase in load.spec.phases]
    return sum(one.num_expected for one in phases) / sum(one.duration_s for one in phases)
