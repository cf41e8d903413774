"""Fleets by hand, targets, and the search for the smallest fleet."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from smartspec_py.config import DRAFT_MODEL
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_sim.acceptance import DraftRuns
from smartspec_sim.capacity import Target, Verdict, parse_target, smallest
from smartspec_sim.fleet import FleetSimulation, fleet_row, rate_of, search
from smartspec_sim.latency import RequestTiming
from smartspec_sim.scenario import Load, Run
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

FLAT = CostModel(PassTable((1,), (1, 16), ((1.0, 1.0),)))
"""Every pass takes a second; drafting is free."""

FAST = CostModel(
    target=PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))),
    draft=PassTable((1, 64), (1,), ((0.001,), (0.002,))),
)
LIMITS = SimLimits(max_sequences=8, prefill_chunk=64)
ONE_ROW = replace(LIMITS, max_sequences=1)
KIND = KindSpec(prompt=LengthSpec(mean=40), output=LengthSpec(mean=20, sd=10, most=60))


def spec(rate: float, duration_s: float = 2.0) -> WorkloadSpec:
    return WorkloadSpec(kinds=(KIND,), phases=(PhaseSpec(duration_s=duration_s, rate=rate),))


def served(times: list[float], num_replicas: int, limits: SimLimits = ONE_ROW) -> SimResult:
    """Requests of 5 tokens at these times."""
    runs = only(DRAFT_MODEL, DraftRuns([0] * 5))
    requests = [SimRequest(number, time, 4, 5, runs) for number, time in enumerate(times, 1)]
    result = FleetSimulation(requests, "none", FLAT, limits, num_replicas).run()
    assert result is not None
    return result


@pytest.mark.parametrize("policy", ["none", "goodput"])
def test_a_fleet_of_one_is_one_server(policy: str) -> None:
    requests = draw(spec(12.0))
    one = FleetSimulation(requests, policy, FAST, LIMITS, 1).run()
    assert one is not None
    alone = Simulation(requests, policy, FAST, LIMITS).run()
    assert one.timings == alone.timings
    assert (one.num_steps, one.draft_lens, one.busy_s) == (
        alone.num_steps,
        alone.draft_lens,
        alone.busy_s,
    )


def test_replicas_share_the_load() -> None:
    """5 tokens each, 1 s a token: side by side, or one after the other. At 6 s, both replicas of
    the last line have ended their request, so the third does not wait."""
    for times, number, ends in (
        ([0.0, 0.0], 2, [5.0, 5.0]),
        ([0.0, 0.0], 1, [5.0, 10.0]),
        ([0.0, 0.0, 6.0], 2, [5.0, 5.0, 11.0]),
    ):
        assert [timing.last_s for timing in served(times, number).timings] == ends


def test_a_full_replica_passes_requests_on() -> None:
    """One place in the queue each, and no step begins before all five have come."""
    result = served([0.0] * 5, 2, replace(ONE_ROW, max_queue=1))
    assert [timing.last_s for timing in result.timings if timing.is_finished] == [5.0, 5.0]
    assert sum("refused" in (timing.error or "") for timing in result.timings) == 3


@pytest.mark.parametrize("guess", [1, 7, 30, 500])
def test_the_smallest_number_is_found(guess: int) -> None:
    for fewest in range(1, 60):
        tried: list[int] = []

        def is_enough(number: int, fewest: int = fewest, tried: list[int] = tried) -> bool:
            tried.append(number)
            return number >= fewest

        assert smallest(is_enough, guess) == fewest
        assert len(tried) == len(set(tried)) < 20
    assert smallest(lambda number: False, guess, most=40) is None


def timing(ttft_s: float | None) -> RequestTiming:
    """Three tokens; the last comes 1 s after the first."""
    if ttft_s is None:
        return RequestTiming(1.0, 1.0, error="refused")
    return RequestTiming(1.0, 1.0, 1.0 + ttft_s, 2.0 + ttft_s, 3)


@pytest.mark.parametrize(
    ("text", "value_ms"),
    [
        ("p90 ttft < 500 ms", 900.0),
        ("p99 ttft<1.5s", math.inf),
        ("mean ttft < 1 s", math.inf),
        ("p50 e2e < 2 s", 1500.0),
        ("p50 tpot < 20 ms", 500.0),
    ],
)
def test_targets_count_failed_requests_as_late(text: str, value_ms: float) -> None:
    """First tokens after 0.1 s to 0.9 s, and one request of 10 that failed."""
    timings = [timing(0.1 * number) for number in range(1, 10)] + [timing(None)]
    target = parse_target(text)
    assert target.value_ms(timings) == pytest.approx(value_ms)
    assert target.is_met(timings) == (value_ms < target.bound_ms)


@pytest.mark.parametrize("num_late", [0, 10, 11, 100])
def test_a_verdict_comes_when_it_is_certain(num_late: int) -> None:
    """With p90 of 100 requests, 10 may be late."""
    target = Target("p90", "ttft", 500.0)
    timings = [timing(0.6)] * num_late + [timing(0.1)] * (100 - num_late)
    verdict = Verdict([target], 100)
    found = [verdict.is_missed(one) for one in timings]
    assert found == sorted(found)
    assert found[-1] == (not target.is_met(timings)) == (num_late > 10)


@pytest.mark.parametrize(
    "text", ["p99", "p98 ttft < 5 ms", "p99 ttfb < 5 ms", "p99 ttft < 0 ms", "p99 ttft < 5", ""]
)
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="p99 ttft < 500 ms") as caught:
        parse_target(text)
    assert repr(text) in str(caught.value)


def test_a_search_finds_the_fewest_replicas() -> None:
    """One fewer misses the target, by a simulation of its own."""
    target = parse_target("p90 e2e < 500 ms")
    run = Run(Load(spec(80.0)), "none", FAST, LIMITS)
    row = search(run, [target])
    fewest = row["num_replicas"]
    assert fewest > 1
    assert row["e2e_ms"]["p90"] < 500
    assert row["targets"] == ["p90 e2e < 500 ms"]
    for number, is_met in ((fewest, True), (fewest - 1, False)):
        result = FleetSimulation(run.load.requests(), "none", FAST, LIMITS, number).run()
        assert result is not None
        assert target.is_met(result.timings) == is_met
    assert fleet_row(run, fewest)["num_failed"] == 0
    assert rate_of(run.load) == 80.0


def test_a_target_below_the_fastest_step_has_no_answer() -> None:
    run = Run(Load(spec(10.0)), "none", FAST, LIMITS)
    row = search(run, [parse_target("p50 ttft < 1 ms")])
    assert row["num_replicas"] is None
    assert "ttft_ms" not in row
