"""Runs, targets, and the search for the smallest number of replicas."""

from __future__ import annotations

import math

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_sim.capacity import parse_target, smallest
from smartspec_sim.hardware import Hardware
from smartspec_sim.latency import RequestTiming
from smartspec_sim.scenario import Run
from smartspec_sim.simulate import SimLimits, Simulation
from smartspec_sim.workload import KindSpec, LengthSpec, PhaseSpec, WorkloadSpec, draw

FAST = CostModel(
    target=PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))),
    draft=PassTable((1, 64), (1,), ((0.001,), (0.002,))),
)
LIMITS = SimLimits(max_sequences=8, prefill_chunk=64)


def run_at(rate: float, policy: str = "none", kinds: tuple[str, ...] = ("chat",)) -> Run:
    lengths = {"prompt": LengthSpec(mean=40), "output": LengthSpec(mean=20, sd=10, most=60)}
    spec = WorkloadSpec(
        kinds=tuple(KindSpec(name=name, **lengths) for name in kinds),
        phases=(PhaseSpec(duration_s=2, rate=rate),),
    )
    return Run(draw(spec), policy, Hardware(FAST), LIMITS, {"ttft": 1e6})


def test_a_row() -> None:
    run, heard = run_at(6, "fixed:2", ("chat", "sql")), list[float]()
    row = run.row(progress=heard.append)
    assert (row["policy"], row["num_replicas"], row["num_failed"]) == ("fixed:2", 1, 0)
    assert row["num_slo_met"] == row["num_finished"] == row["num_requests"] == len(run.requests)
    assert row["num_requests"] == sum(one["num_requests"] for one in row["by_kind"].values())
    assert row["by_kind"].keys() == {"chat", "sql"}
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


@pytest.mark.parametrize("guess", [1, 7, 30, 500])
def test_the_smallest_number_is_found(guess: int) -> None:
    for fewest in range(1, 60):
        tried: list[int] = []

        def is_enough(number: int, fewest: int = fewest, tried: list[int] = tried) -> bool:
            tried.append(number)
            return number >= fewest

        assert smallest(is_enough, guess) == fewest
        assert len(tried) == len(set(tried)) < 20
    assert smallest(lambda number: False, guess) is None


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
    """First tokens after 0.1 s to 0.9 s, three tokens in 1 s each; 1 request of 10 failed."""
    timings = [RequestTiming(1.0, 1.0 + n / 10, 2.0 + n / 10, 3) for n in range(1, 10)]
    timings.append(RequestTiming(1.0, error="refused"))
    target = parse_target(text)
    assert target.value_ms(timings) == pytest.approx(value_ms)
    assert target.is_met(timings) == (value_ms < target.bound_ms)


@pytest.mark.parametrize(
    "text", ["p99", "p98 ttft < 5 ms", "p99 ttfb < 5 ms", "p99 ttft < 0 ms", "p99 ttft < 5", ""]
)
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="p99 ttft < 500 ms") as caught:
        parse_target(text)
    assert repr(text) in str(caught.value)


def test_a_search_finds_the_fewest_replicas() -> None:
    """One fewer misses the target in a simulation of all its replicas."""
    target, run = parse_target("p90 e2e < 500 ms"), run_at(50.0)
    row = run.search([target])
    fewest = row["num_replicas"]
    assert fewest > 1
    assert row["e2e_ms"]["p90"] < 500
    assert row["targets"] == ["p90 e2e < 500 ms"]
    for number, is_met in ((fewest, True), (fewest - 1, False)):
        result = Simulation(run.requests, "none", FAST, LIMITS, num_replicas=number).run()
        assert target.is_met(result.timings) == is_met


def test_a_large_fleet_is_represented_by_some_replicas() -> None:
    """Each gets its share of the requests. With a row each, 8 s of work arrive per second, for two
    seconds: more replicas are needed than are simulated."""
    run = run_at(40.0)
    row = Run(run.requests, "none", Hardware(FAST), SimLimits(1, prefill_chunk=64)).search(
        [parse_target("p50 ttft < 100 ms")]
    )
    assert row["simulated_replicas"] == 4
    assert row["num_replicas"] > 4
    share = 4 / row["num_replicas"]
    assert row["num_requests"] == pytest.approx(share * len(run.requests), abs=1)


def test_a_target_below_the_fastest_step_has_no_answer() -> None:
    row = run_at(10.0).search([parse_target("p50 ttft < 1 ms")])
    assert row["num_replicas"] is None
    assert "ttft_ms" not in row
