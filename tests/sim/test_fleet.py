"""Fleets: one replica is one server; failures and restarts by hand; shared prefixes and routes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Prefill
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_sim.acceptance import DraftRuns
from smartspec_sim.engine import SimTarget, sim_capabilities
from smartspec_sim.fleet import FAILED, NONE_UP, FleetSimulation, FleetSpec, Outage
from smartspec_sim.prefixes import PrefixCache
from smartspec_sim.routing import ROUTES
from smartspec_sim.simulate import SimLimits, SimResult, Simulation
from smartspec_sim.workload import (
    KindSpec,
    LengthSpec,
    PhaseSpec,
    SimRequest,
    WorkloadSpec,
    draw,
    only,
)
from smartspec_testing.clock import VirtualClock

FLAT = CostModel(PassTable((1,), (1, 16), ((1.0, 1.0),)))
"""Every pass takes a second; drafting is free."""

FAST = CostModel(
    target=PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))),
    draft=PassTable((1, 64), (1,), ((0.001,), (0.002,))),
)
LIMITS = SimLimits(max_sequences=8, prefill_chunk=64)


def requests_at(times: list[float], output_len: int = 5) -> list[SimRequest]:
    runs = only(DRAFT_MODEL, DraftRuns([0] * output_len))
    return [SimRequest(number, time, 4, output_len, runs) for number, time in enumerate(times, 1)]


def spec(
    rate: float, duration_s: float = 4.0, prefix_len: int = 0, num_prefixes: int = 1
) -> WorkloadSpec:
    kind = KindSpec(
        prompt=LengthSpec(mean=40),
        output=LengthSpec(mean=20, sd=10, most=60),
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
    )
    return WorkloadSpec(kinds=(kind,), phases=(PhaseSpec(duration_s=duration_s, rate=rate),))


def served(requests: list[SimRequest], fleet: FleetSpec, limits: SimLimits = LIMITS) -> SimResult:
    result = FleetSimulation(requests, "none", FLAT, limits, fleet).run()
    assert result is not None
    return result


def errors(result: SimResult) -> dict[str | None, int]:
    return dict(Counter(timing.error for timing in result.timings))


ONE_ROW = replace(LIMITS, max_sequences=1)


@pytest.mark.parametrize("policy", ["none", "goodput"])
def test_a_fleet_of_one_is_one_server(policy: str) -> None:
    requests = draw(spec(12.0))
    one = FleetSimulation(requests, policy, FAST, LIMITS, FleetSpec()).run()
    assert one is not None
    alone = Simulation(requests, policy, FAST, LIMITS).run()
    assert one.timings == alone.timings
    assert (one.num_steps, one.draft_lens) == (alone.num_steps, alone.draft_lens)
    assert one.busy_s == alone.busy_s


def test_the_same_arguments_give_the_same_result() -> None:
    requests = draw(spec(15.0, 2.0))
    fleet = FleetSpec(3, "random", (Outage(0.5, 0.5),), Outage(1.0, 0.1))
    first, second = (FleetSimulation(requests, "goodput", FAST, LIMITS, fleet) for _ in range(2))
    assert first.run() == second.run()


def test_two_replicas_share_the_load() -> None:
    """Two requests of 5 tokens each, 1 s a token: side by side, or one after the other."""
    requests = requests_at([0.0, 0.0])
    for number, ends in ((2, [5.0, 5.0]), (1, [5.0, 10.0])):
        result = served(requests, FleetSpec(number), ONE_ROW)
        assert [timing.last_s for timing in result.timings] == ends


def test_a_failure_ends_the_streams_of_one_replica() -> None:
    """Requests 1 and 2 run, one on each replica, with one row each; 3 waits behind one of them.

    At 2.5 s the replica with two requests fails. Its stream has 2 tokens and fails. Request 3 has
    none: it waits behind the other stream until 5 s, and its 5 tokens end at 10 s.
    """
    requests = requests_at([0.0, 0.0, 0.5])
    result = served(requests, FleetSpec(2, failures=(Outage(2.5, 100.0),)), ONE_ROW)
    assert errors(result) == {None: 2, FAILED: 1}
    assert result.timings[2].last_s == 10.0
    assert sorted(timing.last_s or 0.0 for timing in result.timings) == [0.0, 5.0, 10.0]


def test_a_request_that_ends_in_the_step_of_a_failure_has_failed() -> None:
    """The last step lasts from 4 s to 5 s; the failure is at 4.5 s."""
    result = served(requests_at([0.0, 4.6]), FleetSpec(1, failures=(Outage(4.5, 1.0),)))
    assert [timing.error for timing in result.timings] == [FAILED, NONE_UP]


def test_without_a_replica_requests_are_refused_until_it_is_back() -> None:
    """It fails at 2 s and is back at 12 s. Health checks take no time."""
    requests = requests_at([3.0, 11.5, 12.0], 1)
    result = served(requests, FleetSpec(1, failures=(Outage(2.0, 10.0),)))
    assert [timing.error for timing in result.timings] == [NONE_UP, NONE_UP, None]
    assert result.timings[2].last_s == 13.0


def test_a_full_replica_passes_requests_on() -> None:
    """One place in the queue each, and no step begins before all five have come."""
    result = served(requests_at([0.0] * 5), FleetSpec(2), replace(ONE_ROW, max_queue=1))
    assert errors(result)[None] == 2
    assert [timing.last_s for timing in result.timings if timing.is_finished] == [5.0, 5.0]


@pytest.mark.parametrize("route", ROUTES)
def test_a_rolling_restart_loses_nothing(route: str) -> None:
    requests = draw(spec(10.0, 6.0))
    fleet = FleetSpec(3, route, rolling=Outage(1.0, 0.5))
    simulation = FleetSimulation(requests, "none", FAST, LIMITS, fleet)
    result = simulation.run()
    assert result is not None
    assert errors(result) == {None: len(requests)}
    assert [len(replica.history) for replica in simulation._replicas] == [1, 1, 1]


@dataclass
class Known:
    """A replica as the load balancer sees it."""

    number: int
    num_open: int


def choices(route: str, request: SimRequest, opens: list[int]) -> Counter[int]:
    rng = random.Random(1)
    replicas = [Known(number, num_open) for number, num_open in enumerate(opens)]
    return Counter(ROUTES[route](request, replicas, rng).number for _ in range(300))


def test_routes() -> None:
    plain = requests_at([0.0])[0]
    assert set(choices("least", plain, [3, 1, 1, 2])) == {1, 2}
    assert set(choices("random", plain, [3, 1, 1, 2])) == {0, 1, 2, 3}
    assert choices("prefix", plain, [3, 1, 1, 2]) == choices("least", plain, [3, 1, 1, 2])


def test_the_same_prefix_goes_to_the_same_replica_while_it_has_room() -> None:
    """With 20 open requests each, all have room. With 40 of 100, a replica has more than 1.25 times
    the mean."""
    homes = Counter[int]()
    for number in range(40):
        request = replace(requests_at([0.0])[0], prefix=f"chat/{number}", prefix_len=10)
        [home] = choices("prefix", request, [20] * 4)
        homes[home] += 1
        [other] = choices("prefix", request, [40 if one == home else 20 for one in range(4)])
        assert other != home
    assert len(homes) == 4
    assert max(homes.values()) < 20


def test_the_least_recently_used_prefix_leaves() -> None:
    cache = PrefixCache(25)
    for prefix in ("a", "b"):
        cache.add(prefix, 10)
    assert cache.use("a") == 10
    cache.add("c", 10)
    cache.add("d", 30)
    assert [cache.use(prefix) for prefix in ("a", "b", "c", "d", None)] == [10, 0, 10, 0, 0]


def test_a_cached_prefix_is_not_computed_again() -> None:
    """Once the prompt of one request has been computed, not before. One token always is."""
    request = replace(requests_at([0.0])[0], prompt_len=30, prefix="chat/1", prefix_len=30)
    texts = dict.fromkeys((1, 2, 3), request)
    target = SimTarget(sim_capabilities(8, 100, 4), FLAT, VirtualClock(), texts, 100)
    sampling = SamplingParams()
    assert target.begin(1, [0] * 30, 30, sampling) == 0
    assert target.begin(2, [0] * 30, 30, sampling) == 0
    target.submit([Prefill(1, (0,) * 30, 0, True)])
    target.poll(0.0)
    assert target.begin(3, [0] * 30, 30, sampling) == 29


def test_shared_prefixes_make_first_tokens_earlier() -> None:
    requests = draw(spec(10.0, prefix_len=200, num_prefixes=3))
    assert {request.prefix for request in requests} == {"chat/0", "chat/1", "chat/2"}
    assert all(request.prompt_len == 240 for request in requests)
    plain_s, reused_s = (
        sum(
            timing.first_s or 0.0
            for timing in Simulation(requests, "none", FAST, replace(LIMITS, prefix_tokens=tokens))
            .run()
            .timings
        )
        for tokens in (0, 600)
    )
    assert reused_s < plain_s
