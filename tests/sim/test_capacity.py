"""The smallest fleet: targets, the search, and what it finds."""

from __future__ import annotations

import math

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_sim.capacity import Target, Verdict, parse_target, smallest
from smartspec_sim.fleet import FAILED, FleetSimulation, FleetSpec, Outage
from smartspec_sim.fleet_runs import FleetRun, rate_of
from smartspec_sim.hardware import Hardware
from smartspec_sim.latency import RequestTiming
from smartspec_sim.scenario import Load, Run, Scenario, runs_of
from smartspec_sim.simulate import SimLimits
from smartspec_sim.workload import KindSpec, LengthSpec, PhaseSpec, WorkloadSpec

COST = CostModel(PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))))
LIMITS = SimLimits(max_sequences=8, prefill_chunk=64)
KIND = KindSpec(prompt=LengthSpec(mean=40), output=LengthSpec(mean=20, sd=10, most=60))


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
        return RequestTiming(1.0, 1.0, error=FAILED)
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


@pytest.mark.parametrize("num_late", [0, 9, 10, 11, 100])
def test_a_verdict_comes_when_it_is_certain(num_late: int) -> None:
    """With p90 of 100 requests, 10 may be late."""
    target = Target("p90", "ttft", 500.0)
    timings = [timing(0.6)] * num_late + [timing(0.1)] * (100 - num_late)
    verdict = Verdict([target], 100)
    found = [verdict.is_missed(one) for one in timings]
    is_missed = found[-1]
    assert found == sorted(found)
    assert is_missed == (not target.is_met(timings)) == (num_late > 10)


@pytest.mark.parametrize(
    "text", ["p99", "p98 ttft < 5 ms", "p99 ttfb < 5 ms", "p99 ttft < 0 ms", "p99 ttft < 5", ""]
)
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="p99 ttft < 500 ms") as caught:
        parse_target(text)
    assert repr(text) in str(caught.value)


def run_of(rate: float) -> Run:
    load = Load(WorkloadSpec(kinds=(KIND,), phases=(PhaseSpec(duration_s=2.0, rate=rate),)))
    [run] = runs_of([Scenario(load, LIMITS)], ["none"], lambda rows: Hardware(COST))
    return run


def test_a_search_finds_the_fewest_replicas() -> None:
    """One fewer misses the target, by a simulation of its own."""
    target = parse_target("p90 e2e < 500 ms")
    run = run_of(80.0)
    row = FleetRun.of(run, FleetSpec(), (target,)).row()
    fewest = row["num_replicas"]
    assert row["e2e_ms"]["p90"] < 500
    assert row["targets"] == ["p90 e2e < 500 ms"]
    for number, is_met in ((fewest, True), (fewest - 1, False)):
        fleet = FleetSpec(number)
        requests = run.scenario.load.requests()
        result = FleetSimulation(requests, "none", COST, LIMITS, fleet).run()
        assert result is not None
        assert target.is_met(result.timings) == is_met


def test_a_target_below_the_fastest_step_has_no_answer() -> None:
    row = FleetRun.of(run_of(10.0), FleetSpec(), (parse_target("p50 ttft < 1 ms"),)).row()
    assert row["num_replicas"] is None
    assert "ttft_ms" not in row


def test_a_fleet_run_is_a_row_with_its_errors() -> None:
    run = run_of(30.0)
    row = FleetRun.of(run, FleetSpec(3, failures=(Outage(1.0, 1.0),))).row()
    assert (row["num_replicas"], row["simulated_replicas"], row["route"]) == (3, 3, "least")
    assert row["errors"] == {FAILED: row["num_failed"]}
    assert row["num_failed"] > 0
    assert rate_of(run.scenario.load) == 30.0


def test_a_route_by_prefix_needs_prefixes() -> None:
    with pytest.raises(ValueError, match="--route"):
        FleetRun.of(run_of(1.0), FleetSpec(2, "prefix"))
