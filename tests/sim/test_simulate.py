"""Simulations: a queue whose mean wait is known, small cases by hand, and conservation."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from smartspec_py.constants import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_sim.arrivals import RatePhase, arrival_times, poisson_gaps
from smartspec_sim.simulate import SimLimits, SimResult, Simulation
from smartspec_sim.workload import KindSpec, LengthSpec, PhaseSpec, SimRequest, WorkloadSpec, draw

FLAT = CostModel(PassTable((1,), (1, 16), ((1.0, 1.0),)))
"""Every pass takes a second; drafting is free."""

COST = CostModel(
    target=PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))),
    draft=PassTable((1, 64), (1,), ((0.001,), (0.002,))),
    host_s=0.0005,
    draft_prefill_s=0.00002,
)

LIMITS = SimLimits(max_sequences=8, prefill_chunk=64)
ONE_ROW = replace(LIMITS, max_sequences=1)


def requests_at(
    times: list[float], prompt_len: int = 4, output_len: int = 1, run: int = 0
) -> list[SimRequest]:
    """run: right drafts of the draft model from every position on."""
    runs = {DRAFT_MODEL: [run] * output_len}
    return [SimRequest(n, time, prompt_len, output_len, runs) for n, time in enumerate(times, 1)]


def workload(rate: float, *, accept: float = 0.7, duration_s: float = 8.0) -> list[SimRequest]:
    kind = KindSpec(
        prompt=LengthSpec(mean=60, sd=60, most=300),
        output=LengthSpec(mean=40, sd=30, most=150),
        accept=accept,
        accept_sd=0.05,
    )
    return draw(WorkloadSpec(kinds=(kind,), phases=(PhaseSpec(duration_s=duration_s, rate=rate),)))


def run(
    requests: list[SimRequest],
    policy: str = "none",
    cost: CostModel = FLAT,
    limits: SimLimits = LIMITS,
    num_replicas: int = 1,
) -> SimResult:
    return Simulation(requests, policy, cost, limits, num_replicas=num_replicas).run()


def test_mean_wait_of_a_queue_with_one_server() -> None:
    """M/D/1: one row, a pass of 1 s per request, 0.5 requests per second. The mean wait is
    rho D / (2 (1 - rho)) = 0.5 s, and with the pass the first token comes after 1.5 s. The standard
    deviation over 3,000 requests is about 0.034 s (variance 0.58, six neighbours alike): 0.16 s
    fails in 3e-6 of cases."""
    times = list(islice(arrival_times(poisson_gaps(7), [RatePhase(1e9, 0.5)]), 3000))
    result = run(requests_at(times), limits=ONE_ROW)
    waits = [timing.ttft_s for timing in result.timings]
    assert sum(waits) / len(waits) == pytest.approx(1.5, abs=0.16)
    assert result.num_steps == 3000


@pytest.mark.parametrize(("policy", "num_changes"), [("none", 2), ("fixed:3", 3)])
def test_another_number_of_tokens_takes_longer(policy: str, num_changes: int) -> None:
    """Passes without drafts have 5, 1, .. 1 tokens: the prompt, then one each. With three correct
    drafts each they have 5, 4, 4, and 1 for the last token."""
    requests = requests_at([0.0], prompt_len=5, output_len=10, run=9)
    changing = replace(FLAT, shape_change_s=0.25)
    extra_s = run(requests, policy, changing).elapsed_s - run(requests, policy).elapsed_s
    assert extra_s == pytest.approx(0.25 * num_changes)


def test_the_draft_prefill_of_one_request_does_not_stop_the_others() -> None:
    """A prompt of 8,000 tokens comes to four short requests. Its draft prefill takes 1.2 s, of
    which each step does at most what takes the time of a prompt chunk, 0.15 s."""
    cost = replace(COST, draft_prefill_s=0.00015, prompt=PassTable((1,), (1, 512), ((0.02, 0.17),)))
    requests = [SimRequest(n, 0.0, 50, 400, {DRAFT_MODEL: [5] * 400}) for n in range(1, 5)]
    requests.append(SimRequest(5, 1.0, 8000, 400, {DRAFT_MODEL: [5] * 400}))
    limits = SimLimits(max_draft_len=5, prefill_chunk=512)
    simulation = Simulation(requests, "goodput", cost, limits)
    simulation.run()
    steps = simulation.servers[0].loop.records
    late = [step.draft_s for step in steps if step.draft_s > 0.05]
    assert len(late) == 8
    assert max(late) < 0.17
    assert sum(late) == pytest.approx(1.2, rel=0.05)
    assert any(step.drafted.get(5) for step in steps)


def test_a_request_by_hand() -> None:
    """Prompt of 100 tokens in chunks of 64, so two passes; then 9 tokens, of which the first came
    with the prompt. `fixed:3` with two correct drafts in a row gains 3 per step: 1 + 3 + 3, and
    then 2 are left, one of them drafted. Passes take 1 s: 2 + 3 in all."""
    result = run(requests_at([5.0], 100, 9, run=2), "fixed:3")
    timing = result.timings[0]
    assert (timing.first_s, timing.last_s, timing.num_tokens) == (7.0, 10.0, 9)
    assert result.draft_lens == {3: 2, 1: 1}
    assert (result.num_drafted, result.num_accepted) == (7, 5)


def test_a_short_prompt_waits_for_two_chunks_of_a_long_one() -> None:
    """The long prompt is read in 37 chunks of 512, a second each. Two short ones arrive in the
    21st: they are read beside the 22nd, and the last chunk has room for what this delays."""
    long, *short = requests_at([0.0, 20.5, 20.5], prompt_len=30)
    requests = [replace(long, prompt_len=18_700), *short]
    timings = run(requests, limits=replace(LIMITS, prefill_chunk=512)).timings
    assert [timing.first_s for timing in timings] == [37.0, 22.0, 22.0]


@pytest.mark.parametrize("policy", ["none", "fixed:3", "goodput"])
@pytest.mark.parametrize(("rate", "num_replicas"), [(2.0, 1), (30.0, 1), (30.0, 3)])
def test_every_request_ends_once_with_all_its_tokens(
    policy: str, rate: float, num_replicas: int
) -> None:
    """The simulation itself asserts that no request ends twice and all are released. The same
    arguments give the same result."""
    requests = workload(rate, duration_s=2.0)
    result = run(requests, policy, COST, num_replicas=num_replicas)
    assert [timing.num_tokens for timing in result.timings] == [r.output_len for r in requests]
    assert all(timing.error is None for timing in result.timings)
    assert result.num_generated == sum(request.output_len for request in requests)
    for timing, request in zip(result.timings, requests, strict=True):
        assert timing.first_s is not None
        assert timing.last_s is not None
        assert request.arrival_s < timing.first_s <= timing.last_s
    assert result == run(requests, policy, COST, num_replicas=num_replicas)


def test_policies_in_an_obvious_case() -> None:
    """Light load and nearly all drafts right: speculation is much faster than none, and `goodput`
    is about as good as the best. Nearly all drafts wrong: none is best."""
    good, bad = (workload(2.0, accept=accept, duration_s=10.0) for accept in (0.93, 0.05))

    def mean_s(requests: list[SimRequest], policy: str) -> float:
        timings = run(requests, policy, COST).timings
        return sum(t.e2e_s for t in timings) / len(timings)

    none, fixed, adaptive = (mean_s(good, p) for p in ("none", "fixed:2", "goodput"))
    assert fixed < 0.7 * none
    assert adaptive < 1.02 * fixed
    none, fixed, adaptive = (mean_s(bad, p) for p in ("none", "fixed:5", "goodput"))
    assert fixed > 1.15 * none
    assert adaptive < 1.05 * none


@pytest.mark.parametrize(
    ("times", "num_replicas", "ends"),
    [
        ([0.0, 0.0], 2, [5.0, 5.0]),
        ([0.0, 0.0], 1, [5.0, 10.0]),
        # At 6 s both replicas are idle. At 4.5 s both are busy, so the third request waits.
        ([0.0, 0.0, 6.0], 2, [5.0, 5.0, 11.0]),
        ([0.0, 0.0, 4.5], 2, [5.0, 5.0, 10.0]),
        # A place in the queue each, and no step begins before all three have come.
        ([0.0, 0.0, 0.0], 2, [5.0, 5.0, None]),
    ],
)
def test_replicas_share_the_load(
    times: list[float], num_replicas: int, ends: list[float | None]
) -> None:
    """5 tokens each, 1 s per token."""
    limits = replace(ONE_ROW, max_queue=1 if ends[-1] is None else 9)
    result = run(requests_at(times, output_len=5), "none", FLAT, limits, num_replicas)
    assert [timing.last_s for timing in result.timings] == ends
    refused = ["refused" in (timing.error or "") for timing in result.timings]
    assert refused == [end is None for end in ends]


def test_priorities_and_deadlines_are_the_servers() -> None:
    """All come at 0. The one with the higher priority is first; the deadline of the last one passes
    while it waits."""
    first, second, third = requests_at([0.0] * 3, output_len=2)
    requests = [first, replace(second, priority=1), replace(third, deadline_s=3.5)]
    result = run(requests, limits=ONE_ROW)
    assert [timing.last_s for timing in result.timings] == [4.0, 2.0, None]
    assert "deadline" in (result.timings[2].error or "")


def test_a_tight_cache_preempts_and_loses_nothing() -> None:
    limits = replace(LIMITS, target_bytes=2, draft_bytes=1, cache_bytes=1000)
    requests = workload(30.0, duration_s=2.5)
    tight = run(requests, "goodput", COST, limits)
    assert tight.num_preemptions > 0
    assert tight.num_generated == run(requests, "goodput", COST).num_generated


def test_a_request_longer_than_the_cache_is_refused() -> None:
    """11 tokens of a byte each, in a cache of 10; the other has 10."""
    limits = replace(LIMITS, target_bytes=1, cache_bytes=10)
    first, second = requests_at([0.0, 0.0], 4, 6)
    result = run([first, replace(second, output_len=7)], limits=limits)
    assert [timing.num_tokens for timing in result.timings] == [6, 0]
    assert result.timings[1].error == "refused: longer than the cache"


def test_of_two_proposers_the_better_one_drafts() -> None:
    """The draft model is always wrong, and prompt lookup always right, and free."""
    runs = {DRAFT_MODEL: [0] * 200, PROMPT_LOOKUP: [9] * 200}
    result = run([SimRequest(1, 0.0, 8, 200, runs)], "goodput", COST)
    assert result.num_accepted > 0.9 * result.num_drafted > 100


AVX2 = CostModel(
    target=PassTable(
        (1, 8),
        (1, 2, 3, 4, 5, 8, 16),
        (
            (0.050, 0.054, 0.058, 0.064, 0.115, 0.125, 0.24),
            (0.12, 0.25, 0.4, 0.5, 0.6, 0.9, 1.8),
        ),
    ),
    host_s=0.001,
)
"""Qwen2.5-Coder 1.5 B on two cores of an AMD Zen 3; the second row is rough."""


@pytest.mark.parametrize(("match_len", "pause_len"), [(8, 1), (20, 8), (60, 3)])
def test_drafts_that_come_and_go(match_len: float, pause_len: float) -> None:
    """A file that is copied with changes: drafts are nearly always right, but at the changes there
    are none. One request at a time."""
    kind = KindSpec(
        prompt=LengthSpec(mean=600),
        output=LengthSpec(mean=170, sd=60, most=250),
        accept=0.95,
        accept_sd=0.01,
        proposer=PROMPT_LOOKUP,
        match_len=match_len,
        pause_len=pause_len,
    )
    phase = PhaseSpec(duration_s=160, rate=0.05)
    requests = draw(WorkloadSpec(kinds=(kind,), phases=(phase,), arrivals="constant"))

    def mean_s(policy: str) -> float:
        timings = run(requests, policy, AVX2).timings
        return sum(timing.e2e_s for timing in timings) / len(timings)

    best = min(mean_s(f"fixed:{length}") for length in (3, 7))
    assert best < 0.7 * mean_s("none")
    assert mean_s("goodput") < 1.02 * best


@pytest.mark.parametrize("has_limit", [True, False])
def test_short_answers_to_long_prompts(has_limit: bool) -> None:
    """The draft model would have to read 3,000 tokens for an answer of 12. Whether clients say how
    long it may be, or not: no speculation is best."""
    kind = KindSpec(
        prompt=LengthSpec(mean=3000, sd=300, most=4000),
        output=LengthSpec(mean=12, sd=4, most=4096),
        accept=0.8,
        has_limit=has_limit,
    )
    phase = PhaseSpec(duration_s=100, rate=0.5)
    requests = draw(WorkloadSpec(kinds=(kind,), phases=(phase,), arrivals="constant"))
    cost = replace(COST, draft_prefill_s=0.0002)
    limits = replace(LIMITS, prefill_chunk=512)

    def mean_s(policy: str) -> float:
        timings = run(requests, policy, cost, limits).timings[10:]
        return sum(timing.e2e_s for timing in timings) / len(timings)

    assert mean_s("goodput") < 1.01 * mean_s("none")
