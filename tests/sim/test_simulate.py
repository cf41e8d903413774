"""The simulator: a queue whose mean wait is known, policies in an obvious case, conservation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from dataclasses import replace
from itertools import islice

import pytest

from smartspec_py.config import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.engines.base import Decode, DraftTask, Prefill, Verify, Work
from smartspec_sim.acceptance import DraftRuns
from smartspec_sim.arrivals import arrival_times, poisson_gaps, steady
from smartspec_sim.engine import SimProposer, SimTarget, sim_capabilities
from smartspec_sim.hardware import Hardware, HardwareError, gpu_hardware
from smartspec_sim.latency import Slo
from smartspec_sim.scenario import Load, fitted, runs_of
from smartspec_sim.simulate import (
    SAMPLING,
    CostChange,
    SimLimits,
    SimResult,
    Simulation,
)
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

COST = CostModel(
    target=PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))),
    draft=PassTable((1, 64), (1,), ((0.001,), (0.002,))),
    host_s=0.0005,
    catch_up_s=0.00002,
)

LIMITS = SimLimits(max_sequences=8, prefill_chunk=64)
CAPABILITIES = sim_capabilities(LIMITS.max_sequences, 100, LIMITS.max_draft_len)


def requests_at(
    times: list[float],
    prompt_len: int = 4,
    output_len: int = 1,
    run: int = 0,
    proposer: str = DRAFT_MODEL,
) -> list[SimRequest]:
    """run: right drafts from every position on."""
    runs = only(proposer, DraftRuns([run] * output_len))
    return [
        SimRequest(number, time, prompt_len, output_len, runs)
        for number, time in enumerate(times, start=1)
    ]


def workload(rate: float, *, accept: float = 0.7, duration_s: float = 20.0) -> list[SimRequest]:
    kind = KindSpec(
        prompt=LengthSpec(mean=60, sd=60, most=300),
        output=LengthSpec(mean=40, sd=30, most=150),
        accept=accept,
        accept_sd=0.05,
    )
    return draw(WorkloadSpec(kinds=(kind,), phases=(PhaseSpec(duration_s=duration_s, rate=rate),)))


def run(requests: list[SimRequest], policy: str, limits: SimLimits = LIMITS) -> SimResult:
    return Simulation(requests, policy, COST, limits).run()


def test_the_pass_is_packed_and_its_seconds_are_by_hand() -> None:
    """Sequence 1 has 10 tokens known and verifies 3 drafts, of which 2 are right; 2 has 20 and
    decodes; 3 reads 5 tokens of its prompt: 3 rows, 4 + 1 + 5 = 10 tokens, a context of
    (10 + 20 + 0) / 3 = 10, at 1 s and 0.1 s a row and token of context: 1 + 3 x 10 x 0.1 = 4 s."""
    table = PassTable((1,), (1, 16), ((1.0, 1.0),), context_s=0.1)
    clock = VirtualClock()
    texts = {1: SimRequest(1, 0.0, 9, 9, only(DRAFT_MODEL, DraftRuns([9, 2])))}
    target = SimTarget(
        CAPABILITIES,
        CostModel(table, host_s=0.5),
        clock,
        texts,
    )
    for sequence, length in ((1, 9), (2, 19), (3, 30)):
        target.begin(sequence, [0] * length, length, SAMPLING)
    target.submit([Prefill(1, (0,) * 9, 0, True), Prefill(2, (0,) * 19, 0, True)])
    assert [event.tokens for event in target.poll(0.0)] == [(0,), (0,)]
    start = clock.now()
    target.submit([Verify(1, (0,) * 3), Decode(2, 1), Prefill(3, (0,) * 5, 0, False)])
    verified, decoded, read = target.poll(0.0)
    assert (verified.num_drafted, verified.num_accepted, len(verified.tokens)) == (3, 2, 3)
    assert (len(decoded.tokens), read.tokens) == (1, ())
    assert clock.now() - start == pytest.approx(4.5)
    assert verified.pass_s == pytest.approx(4.0)
    assert target.poll(0.0) == []


PROMPT = PassTable((1,), (1, 5, 9), ((2.0, 4.0, 8.0),))
"""A prompt's tokens beyond the first: 0.5 s each up to 5, and 1 s each from there."""


@pytest.mark.parametrize(
    ("is_decoding", "chunks", "seconds"),
    [
        (True, (), 4.0),  # two rows with 15 tokens of context each: 1 + 15 x 2 x 0.1
        (True, (5,), 4.0 + 2.0),
        (True, (3, 4), 4.0 + 4.0),  # as 7 tokens of one prompt
        (False, (5,), 1.0 + 2.0),  # the pass of one row without context
        (False, (1,), 1.0),
    ],
)
def test_prompt_tokens_are_charged_as_measured(
    is_decoding: bool, chunks: tuple[int, ...], seconds: float
) -> None:
    """They are no rows of the pass, and no tokens like drafts: those would cost 10 s each."""
    table = PassTable((1, 2), (1, 3, 4), ((1.0, 1.0, 11.0),) * 2, context_s=0.1)
    clock = VirtualClock()
    texts = {1: SimRequest(1, 0.0, 9, 9, only(DRAFT_MODEL, DraftRuns([9, 2])))}
    cost = CostModel(table, host_s=0.5, prompt=PROMPT)
    target = SimTarget(CAPABILITIES, cost, clock, texts)
    for sequence, length in ((1, 9), (2, 19)):
        target.begin(sequence, [0] * length, length, SAMPLING)
    target.submit([Prefill(1, (0,) * 9, 0, True), Prefill(2, (0,) * 19, 0, True)])
    target.poll(0.0)
    work: list[Work] = [Verify(1, (0,) * 3), Decode(2, 1)] if is_decoding else []
    for sequence, num_tokens in enumerate(chunks, start=3):
        target.begin(sequence, [0] * 30, 30, SAMPLING)
        work.append(Prefill(sequence, (0,) * num_tokens, 0, False))
    start = clock.now()
    target.submit(work)
    events = target.poll(0.0)
    assert [event.pass_s for event in events] == pytest.approx([seconds] * len(work))
    assert clock.now() - start == pytest.approx(seconds + 0.5)


def test_drafting_takes_its_passes_and_its_lag() -> None:
    """Lengths 3, 1 and 3 of three sequences: a pass of 3 rows and two of 2. All 10 + 6 + 8 known
    tokens but the last of each are lag: 21, read in a pass of all three before. Draft passes take 1
    s and 0.5 s a row."""
    cost = CostModel(FLAT.target, draft=PassTable((1, 3), (1,), ((1.5,), (2.5,))), catch_up_s=0.01)
    clock = VirtualClock()
    proposer = SimProposer(DRAFT_MODEL, {}, 7, cost, clock)
    lengths = {1: (10, 3), 2: (6, 1), 3: (8, 3)}
    assert [proposer.draft_lag(s, n) for s, (n, _) in lengths.items()] == [9, 5, 7]
    drafts = proposer.propose(
        [DraftTask(s, [0] * n, 4, k, SAMPLING) for s, (n, k) in lengths.items()]
    )
    assert [len(draft.tokens) for draft in drafts] == [3, 1, 3]
    assert clock.now() == pytest.approx(2.5 + 2.5 + 2 * 2.0 + 21 * 0.01)
    proposer.observe(1, 3)  # all kept: the last draft was never read, and one more token came
    proposer.observe(2, 0)
    assert proposer.draft_lag(1, 14) == 1
    assert proposer.draft_lag(2, 7) == 0
    assert proposer.draft_lag(2, 9) == 2


def test_mean_wait_of_a_queue_with_one_server() -> None:
    """M/D/1: one row, a pass of 1 s a request, 0.5 requests a second. The mean wait is
    rho D / (2 (1 - rho)) = 0.5 s, and with the pass the first token comes after 1.5 s. Its
    deviation over 3,000 requests is about 0.034 s (variance 0.58, six neighbours alike): 0.16 s is
    4.7 of them, 3e-6 of false alarm."""
    times = list(islice(arrival_times(poisson_gaps(7), steady(0.5)), 3000))
    limits = replace(LIMITS, max_sequences=1)
    result = Simulation(requests_at(times), "none", FLAT, limits).run()
    waits = [timing.ttft_s(timing.scheduled_s) for timing in result.timings]
    assert sum(waits) / len(waits) == pytest.approx(1.5, abs=0.16)
    assert result.num_steps == 3000


@pytest.mark.parametrize(("policy", "num_changes"), [("none", 2), ("fixed:3", 3)])
def test_another_number_of_tokens_takes_longer(policy: str, num_changes: int) -> None:
    """Passes without drafts have 5, 1, .. 1 tokens: the prompt, then one each. With three correct
    drafts each they have 5, 4, 4, and 1 for the last token."""
    requests = requests_at([0.0], prompt_len=5, output_len=10, run=9)
    flat = Simulation(requests, policy, FLAT, LIMITS).run()
    changing = replace(FLAT, target=replace(FLAT.target, change_s=(0.25,)))
    found = Simulation(requests, policy, changing, LIMITS).run()
    assert found.elapsed_s - flat.elapsed_s == pytest.approx(0.25 * num_changes)


def test_a_request_by_hand() -> None:
    """Prompt of 100 tokens in chunks of 64, so two passes; then 9 tokens, of which the first came
    with the prompt. `fixed:3` where two drafts in a row are right gains 3 a step: 1 + 3 + 3, and
    then 2 are left, one of them drafted. Passes take 1 s: 2 + 3 in all."""
    result = Simulation(requests_at([5.0], 100, 9, run=2), "fixed:3", FLAT, LIMITS).run()
    timing = result.timings[0]
    assert (timing.first_s, timing.last_s, timing.num_tokens) == (7.0, 10.0, 9)
    assert result.draft_lens == {3: 2, 1: 1}
    assert (result.num_drafted, result.num_accepted) == (7, 5)


@pytest.mark.parametrize("policy", ["none", "fixed:3", "goodput"])
@pytest.mark.parametrize("rate", [2.0, 30.0])
def test_every_request_ends_once_with_all_its_tokens(policy: str, rate: float) -> None:
    """That nobody ends twice and nothing stays held is asserted by the simulation itself."""
    requests = workload(rate, duration_s=8.0)
    result = run(requests, policy)
    assert [timing.num_tokens for timing in result.timings] == [r.output_len for r in requests]
    assert all(timing.error is None for timing in result.timings)
    assert result.num_generated == sum(request.output_len for request in requests)
    for timing, request in zip(result.timings, requests, strict=True):
        assert timing.first_s is not None
        assert timing.last_s is not None
        assert request.arrival_s < timing.first_s <= timing.last_s


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (run(workload(6.0, duration_s=8.0), "goodput") for _ in range(2))
    assert first == second


def test_policies_in_an_obvious_case() -> None:
    """Light load and drafts nearly always right: every speculation beats none by far, and `goodput`
    is about as good as the best. Drafts nearly always wrong: it is none that wins."""
    good = workload(2.0, accept=0.93, duration_s=10.0)
    bad = workload(2.0, accept=0.05, duration_s=10.0)

    def mean_s(requests: list[SimRequest], policy: str) -> float:
        timings = run(requests, policy).timings
        return sum(t.e2e_s(t.scheduled_s) for t in timings) / len(timings)

    none, fixed, adaptive = (mean_s(good, p) for p in ("none", "fixed:2", "goodput"))
    assert fixed < 0.7 * none
    assert adaptive < 1.02 * fixed
    none, fixed, adaptive = (mean_s(bad, p) for p in ("none", "fixed:5", "goodput"))
    assert fixed > 1.15 * none
    assert adaptive < 1.05 * none


def test_more_rows_than_fit_wait_and_a_full_queue_refuses() -> None:
    limits = replace(LIMITS, max_sequences=1, max_queue=2)
    result = Simulation(requests_at([1.0] * 4), "none", FLAT, limits).run()
    assert [timing.last_s for timing in result.timings] == [2.0, 3.0, None, None]
    assert [bool(timing.error) for timing in result.timings] == [False, False, True, True]


def test_priorities_and_deadlines_are_the_servers() -> None:
    """All come at 0. The first in rank is the one of higher priority; the last one's deadline
    passes while it waits."""
    first, second, third = requests_at([0.0] * 3, output_len=2)
    requests = [first, replace(second, priority=1), replace(third, deadline_s=3.5)]
    limits = replace(LIMITS, max_sequences=1)
    result = Simulation(requests, "none", FLAT, limits).run()
    assert [timing.last_s for timing in result.timings] == [4.0, 2.0, None]
    assert "deadline" in (result.timings[2].error or "")


def test_a_tight_cache_preempts_and_loses_nothing() -> None:
    limits = replace(LIMITS, target_bytes=2, draft_bytes=1, cache_bytes=1000)
    requests = workload(30.0, duration_s=2.5)
    tight = run(requests, "goodput", limits)
    assert tight.num_preemptions > 0
    assert tight.num_generated == run(requests, "goodput").num_generated


def test_what_the_cache_could_never_hold_is_refused() -> None:
    """11 tokens of a byte each, in a cache of 10; the other has 10."""
    limits = replace(LIMITS, target_bytes=1, cache_bytes=10)
    requests = [*requests_at([0.0], 4, 6), replace(requests_at([0.0], 4, 7)[0], sequence=2)]
    result = Simulation(requests, "none", FLAT, limits).run()
    assert [timing.num_tokens for timing in result.timings] == [6, 0]
    assert result.timings[1].error == "refused: longer than the cache"


def test_what_the_planner_believes_may_be_wrong() -> None:
    """Told that drafting costs ten times as much, it drafts less; steps still take what they do."""
    dear = CostModel(COST.target, PassTable((1, 64), (1,), ((0.01,), (0.02,))), COST.host_s)
    requests = workload(2.0)
    told = Simulation(requests, "goodput", COST, LIMITS, believed=dear).run()
    assert told.mean_draft_len < run(requests, "goodput").mean_draft_len


def test_costs_change_in_mid_run() -> None:
    """A prompt's pass and then a token a pass, of 1 s each up to second 3, and of 2 s from the
    change at 2.5 s on, which the step that begins at 3 is the first to feel; from 7 on again 1 s.
    The step that begins at 5 takes 2, so it is over at 7: 1, 2, 3, 5, 7, 8."""
    slow = replace(FLAT, target_base=2.0, target_slope=2.0)
    changes = [CostChange(6.0, FLAT), CostChange(2.5, slow)]
    requests = requests_at([0.0], output_len=6)
    simulation = Simulation(requests, "none", FLAT, LIMITS, changes=changes)
    result = simulation.run()
    starts = [record.start_s for record in simulation.loop.records]
    assert starts == [0.0, 1.0, 2.0, 3.0, 5.0, 7.0]
    assert result.timings[0].last_s == 8.0


def test_drafts_that_are_looked_up() -> None:
    """The prompt's pass gives a token, and two passes 4 tokens each."""
    requests = requests_at([0.0], 8, 9, run=3, proposer=PROMPT_LOOKUP)
    result = Simulation(requests, "fixed:3", FLAT, LIMITS).run()
    assert result.timings[0].last_s == 3.0
    assert result.num_accepted == 6


def test_of_two_proposers_the_better_one_drafts() -> None:
    """The draft model is always wrong, and prompt lookup always right, and free."""
    both = (DraftRuns([0] * 200), DraftRuns([9] * 200))
    requests = [SimRequest(1, 0.0, 8, 200, both)]
    result = Simulation(requests, "goodput", COST, LIMITS).run()
    assert result.num_accepted > 0.9 * result.num_drafted > 100


def test_a_look_up_that_was_poor_at_first_is_not_left_for_good() -> None:
    """The draft model is right six times of seven. Look-ups are all wrong in the first 20 texts and
    all right in the others, which is known before one is tried again."""
    drafted = DraftRuns([n % 7 for n in range(60, 0, -1)])
    requests = [
        SimRequest(n, 0.0, 8, 60, (drafted, DraftRuns([0 if n <= 20 else 60] * 60)))
        for n in range(1, 61)
    ]
    simulation = Simulation(requests, "goodput", COST, SimLimits(1, prefill_chunk=64))
    records = simulation.loop.records = deque()
    simulation.run()
    late = [r for r in records if any(s > 40 for s in r.decision.plan.draft_lens)]
    looked_up = [r for r in late if r.num_drafted and r.draft_s == 0.0]
    assert len(looked_up) > 0.9 * len(late)
    assert sum(r.num_generated for r in looked_up) > 3 * len(looked_up) > 100


def test_hindsight_is_what_the_target_says() -> None:
    """Of 4 drafts at the second position 2 are right; 3 tokens were generated by other means."""
    request = SimRequest(1, 0.0, 8, 20, only(PROMPT_LOOKUP, DraftRuns([0, 2] * 10, [0, 4] * 10)))
    lookup = SimProposer(PROMPT_LOOKUP, {1: request}, 7, COST, VirtualClock())
    tokens = [0] * 9
    assert lookup.capabilities.has_hindsight
    assert lookup.hindsight(1, tokens, [0]) == (1, 1)
    assert lookup.hindsight(1, tokens, [0, 0, 0]) == (3, 2)
    assert lookup.hindsight(1, tokens, [0] * 9) == (4, 2)
    assert lookup.hindsight(1, [0] * 10, [0]) == (0, 0)


def test_a_simulation_wakes_no_threads_of_numpy() -> None:
    """In a process of its own, whose NumPy nobody has limited before."""
    script = (
        "import numpy, threadpoolctl\n"
        "from smartspec_py.core.cost import CostModel, PassTable\n"
        "from smartspec_sim.simulate import SimLimits, Simulation\n"
        "cost = CostModel(PassTable((1,), (1, 16), ((1.0, 1.0),)))\n"
        "Simulation([], 'none', cost, SimLimits()).run()\n"
        "print([one['num_threads'] for one in threadpoolctl.threadpool_info()"
        " if 'numpy' in one['filepath']])"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() in ("[1]", "[]"), "[]: a NumPy without OpenBLAS"


def test_runs_are_every_load_under_every_policy() -> None:
    kind = KindSpec(output=LengthSpec(mean=20))
    specs = [WorkloadSpec(kinds=(kind,), phases=(PhaseSpec(duration_s=4, rate=r),)) for r in (3, 6)]
    machine = gpu_hardware("h100", 1, "llama-3-8b", "eagle", 4)
    runs = runs_of(map(Load, specs), ["none", "fixed:2"], machine, SimLimits(4), Slo(ttft_ms=1e6))
    heard: list[float] = []
    rows = [run.row(heard.append) for run in runs]
    assert [row["policy"] for row in rows] == ["none", "fixed:2"] * 2
    assert heard[-1] == 1.0
    assert rows[2]["num_requests"] > rows[0]["num_requests"] == rows[1]["num_requests"]
    assert all(row["num_slo_met"] == row["num_finished"] == row["num_requests"] for row in rows)


def test_a_load_that_does_not_fit_is_refused() -> None:
    """A prompt table up to 9 tokens is extrapolated to 64 times that."""
    machine = gpu_hardware("l4", 1, "llama-3-8b", None, 32)
    with pytest.raises(HardwareError, match="--rows to at most"):
        fitted(SimLimits(512), machine, requests_at([0.0], 2000, 48))
    measured = Hardware(replace(FLAT, prompt=PROMPT))
    assert fitted(SimLimits(prefill_chunk=64 * 9), measured, ()).cache_bytes == 0
    with pytest.raises(HardwareError, match="must be at most 576"):
        fitted(SimLimits(prefill_chunk=64 * 9 + 1), measured, ())
