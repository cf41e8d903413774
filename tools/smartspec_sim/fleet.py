"""Several simulated servers behind a load balancer, with failures and rolling restarts.

Each replica runs the server's own step loop on its own clock. The load balancer sends a request
when it arrives, and knows the requests that have ended by then. Health checks take no time.

A replica that fails loses its streams: a request with a token has failed, and a request without one
is sent to another replica. A replica that drains gets no new requests, finishes its own, and is
back some seconds later with half of the evidence that it had learned.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SequenceId
from smartspec_py.serving.learned import MOST_KEPT
from smartspec_py.serving.request import RequestError
from smartspec_sim.latency import RequestTiming
from smartspec_sim.routing import ROUTES
from smartspec_sim.simulate import CostChange, SimLimits, SimResult, Simulation, without_collector
from smartspec_sim.workload import SimRequest, longest_context

TICK_S = 0.1
"""How often a draining replica is checked, in virtual seconds."""

GivesUp = Callable[[RequestTiming], bool]
FAILED = "the replica failed"
NONE_UP = "refused: no replica is up"


@dataclass(frozen=True)
class Outage:
    """time_s: when it begins. restart_s: how long a replica takes to start."""

    time_s: float
    restart_s: float


@dataclass(frozen=True)
class FleetSpec:
    """route: a name of `ROUTES`. failures: each of one replica. rolling: one replica after another
    drains and restarts, from its time on."""

    num_replicas: int = 1
    route: str = "least"
    failures: tuple[Outage, ...] = ()
    rolling: Outage | None = None

    @property
    def is_disturbed(self) -> bool:
        return bool(self.failures) or self.rolling is not None


class _Replica:
    """server: None while it is down. up_s: when it is back. history: its earlier servers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.server: Simulation | None = None
        self.up_s = 0.0
        self.is_draining = False
        self.history: list[Simulation] = []
        self.num_open = 0
        self.ended: deque[tuple[float, SequenceId]] = deque()

    @property
    def is_up(self) -> bool:
        return self.server is not None and not self.is_draining

    def advance(self, time_s: float) -> None:
        """Run to time_s. num_open counts the requests that have ended by then, although the last
        step may end later."""
        if self.server is None:
            return
        self.server.advance(time_s)
        while self.ended and self.ended[0][0] <= time_s:
            self.ended.popleft()
            self.num_open -= 1

    def end_server(self, up_s: float) -> Simulation:
        assert self.server is not None, "it is down"
        ended, self.server = self.server, None
        self.history.append(ended)
        self.up_s, self.is_draining, self.num_open = up_s, False, 0
        self.ended.clear()
        return ended


class FleetSimulation:
    """One policy on one workload. `run` once; the same arguments give the same result."""

    def __init__(
        self,
        requests: Sequence[SimRequest],
        policy: str,
        cost: CostModel,
        limits: SimLimits,
        fleet: FleetSpec,
        *,
        changes: Sequence[CostChange] = (),
        seed: int = 1,
    ) -> None:
        """requests: in order of arrival. seed: of the load balancer. Otherwise as `Simulation`."""
        self._requests = {request.sequence: request for request in requests}
        self._policy, self._cost, self._limits = policy, cost, limits
        self._changes = changes
        self._longest = longest_context(requests)
        self._route = ROUTES[fleet.route]
        self._rng = random.Random(seed)
        self._now_s = 0.0
        self._is_given_up = False
        self._gives_up: GivesUp = lambda timing: False
        self._timings: dict[SequenceId, RequestTiming] = {}
        self._failures = deque(sorted(fleet.failures, key=lambda one: one.time_s))
        self._rolling = fleet.rolling
        self._replicas = [_Replica(number) for number in range(fleet.num_replicas)]
        self._to_drain = deque(self._replicas if fleet.rolling else ())
        for replica in self._replicas:
            self._start(replica)

    def run(
        self,
        progress: Callable[[int], None] = lambda num_over: None,
        gives_up: GivesUp = lambda timing: False,
    ) -> SimResult | None:
        """Serve everything. progress: called with the number of requests that are over.

        gives_up: called with each request that is over. If it returns true, the simulation ends
        without a result.
        """
        self._gives_up = gives_up
        with without_collector():
            for time_s, request in self._arrivals():
                self._advance(time_s)
                if self._is_given_up:
                    return None
                if request is not None:
                    self._send(request)
                progress(len(self._timings))
        return self._merged()

    def _arrivals(self) -> Iterator[tuple[float, SimRequest | None]]:
        """The requests, then ticks until all have ended."""
        for request in self._requests.values():
            yield request.arrival_s, request
        while any(replica.server and replica.server.is_busy for replica in self._replicas):
            yield self._now_s + TICK_S, None

    def _advance(self, until_s: float) -> None:
        for time_s in self._times(until_s):
            for replica in self._replicas:
                replica.advance(time_s)
            self._now_s = time_s
            self._change()

    def _times(self, until_s: float) -> Iterator[float]:
        """The times to stop at: changes of the fleet, and until_s."""
        while self._now_s < until_s:
            times = [replica.up_s for replica in self._replicas if replica.server is None]
            times += [one.time_s for one in self._failures]
            if self._to_drain:
                assert self._rolling is not None
                times.append(max(self._rolling.time_s, self._now_s + TICK_S))
            if any(replica.is_draining for replica in self._replicas):
                times.append(self._now_s + TICK_S)
            yield min([until_s, *(time for time in times if time > self._now_s)])

    def _change(self) -> None:
        """Starts, failures and drains that are due now."""
        for replica in self._replicas:
            if replica.server is None and replica.up_s <= self._now_s:
                self._start(replica)
            elif replica.is_draining and replica.server and not replica.server.is_busy:
                assert self._rolling is not None
                replica.end_server(self._now_s + self._rolling.restart_s)
        while self._failures and self._failures[0].time_s <= self._now_s:
            self._fail(self._failures.popleft())
        is_due = self._rolling is not None and self._rolling.time_s <= self._now_s
        if is_due and self._to_drain and all(replica.is_up for replica in self._replicas):
            self._to_drain.popleft().is_draining = True

    def _start(self, replica: _Replica) -> None:
        def on_end(sequence: SequenceId, timing: RequestTiming) -> None:
            self._record(sequence, timing)
            replica.ended.append((server.now_s, sequence))

        server = Simulation(
            (),
            self._policy,
            self._cost,
            self._limits,
            changes=self._changes,
            longest=self._longest,
            start_s=self._now_s,
            on_end=on_end,
        )
        if replica.history and not replica.history[-1].is_busy:
            server.loop.restore(replica.history[-1].loop.state(), MOST_KEPT)
        replica.server = server

    def _fail(self, failure: Outage) -> None:
        """The replica with the most open requests fails."""
        up = [replica for replica in self._replicas if replica.is_up]
        if not up:
            return
        victim = max(up, key=lambda replica: replica.num_open)
        late = [sequence for time_s, sequence in victim.ended if time_s > self._now_s]
        first_s = {sequence: self._timings.pop(sequence).first_s for sequence in late}
        first_s |= victim.end_server(self._now_s + failure.restart_s).first_tokens_s
        for sequence, time_s in sorted(first_s.items()):
            request = self._requests[sequence]
            if time_s is None or time_s > self._now_s:
                self._send(request)
            else:
                self._end(request, FAILED)

    def _send(self, request: SimRequest) -> None:
        """Send the request to a replica, and to others if it is refused."""
        candidates = [replica for replica in self._replicas if replica.is_up]
        reason = NONE_UP
        while candidates:
            replica = self._route(request, candidates, self._rng)
            assert isinstance(replica, _Replica)
            assert replica.server is not None
            try:
                replica.server.put(request)
            except RequestError as error:
                reason = f"refused: {error}"
                candidates.remove(replica)
            else:
                replica.num_open += 1
                return
        self._end(request, reason)

    def _end(self, request: SimRequest, error: str) -> None:
        timing = RequestTiming(request.arrival_s, request.arrival_s, error=error)
        self._record(request.sequence, timing)

    def _record(self, sequence: SequenceId, timing: RequestTiming) -> None:
        self._timings[sequence] = timing
        self._is_given_up |= self._gives_up(timing)

    def _merged(self) -> SimResult:
        """Sums over all replicas. busy_s is the mean over them."""
        servers = [one for replica in self._replicas for one in replica.history]
        servers += [replica.server for replica in self._replicas if replica.server]
        results = [server.result for server in servers]
        merged = SimResult(
            self._policy,
            [self._timings[sequence] for sequence in self._requests],
            [request.cohort for request in self._requests.values()],
        )
        for name in SUMS:
            setattr(merged, name, sum(getattr(result, name) for result in results))
        for result in results:
            merged.draft_lens.update(result.draft_lens)
        elapsed_s = max(result.elapsed_s for result in results)
        return replace(merged, elapsed_s=elapsed_s, busy_s=merged.busy_s / len(self._replicas))


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
