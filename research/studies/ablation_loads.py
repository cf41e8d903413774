"""The conditions of `ablation`: a load, the time of steps, and what the planner believes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import plan
from smartspec_py.engines.base import Verify
from smartspec_py.serving import controller
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.profile import load_cost
from smartspec_sim.acceptance import DraftRuns
from smartspec_sim.hardware import gpu_hardware
from smartspec_sim.latency import RequestTiming
from smartspec_sim.scenario import Deviation
from smartspec_sim.simulate import CostChange, SimLimits, Simulation
from smartspec_sim.workload import (
    KindSpec,
    LengthSpec,
    PhaseSpec,
    SimRequest,
    WorkloadSpec,
    draw,
    only,
)
from studies.adaptation import MEASURED, NoisyCost, noisy
from studies.claims_loads import matches
from studies.claims_runs import tokens_within

PROMPT = LengthSpec(mean=120, sd=60, most=400)
OUTPUT = LengthSpec(mean=120, sd=60, most=400)
CHAT = KindSpec(prompt=PROMPT, output=OUTPUT, accept=0.67, accept_sd=0.1)
SHORT = LengthSpec(mean=50, sd=20, most=100)
APPLICATIONS = tuple(
    KindSpec(name=name, prompt=PROMPT, output=SHORT, accept=accept, accept_sd=0.05)
    for name, accept in (("a", 0.9), ("b", 0.65), ("c", 0.4), ("d", 0.15))
)
STRETCH = 60
"""Tokens of a text after which its acceptance changes between high and low."""

STEADY, TEXTS, LOAD = "steady", "texts", "load"
COST, DRAFT, SHORT_STEPS = "cost", "draft", "8 ms steps"
"""Groups of conditions."""

ROWS = 32
OPEN_S = 60.0
HIDDEN_SHARE = 0.25
"""Share of a pass that every step with drafts takes in addition."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one run: tokens per second and, for an open load, latencies in seconds."""

    tokens_per_s: float
    latency_s: float
    p99_s: float
    ttft_s: float


@dataclass(frozen=True)
class Condition:
    """requests: by seed. cost: time of steps. believed: the planner's cost model; None is the same.
    later: a time in seconds, and the cost from then on, unknown to the planner. plan_s: charged for
    each plan of a policy that learns. is_open: whether requests arrive over time, so that latencies
    have a meaning. is_hidden: see HIDDEN_SHARE. is_noisy: passes vary and stall; the additional
    time is known and not counted in the result. chunk: prompt tokens per step."""

    group: str
    name: str
    requests: Callable[[int], Sequence[SimRequest]]
    cost: CostModel
    batch_size: int
    believed: CostModel | None = None
    later: CostChange | None = None
    plan_s: float = 0.0
    is_open: bool = False
    is_hidden: bool = False
    is_noisy: bool = False
    chunk: int = 512

    @property
    def label(self) -> str:
        return f"{self.group}: {self.name}"

    def run(
        self, seed: int, policy: str, *, has_kinds: bool = True, has_host: bool = True
    ) -> Measured:
        """has_kinds: whether requests have `workload` tags. has_host: whether the host time is
        known at the start."""
        requests = self.requests(seed)
        if not has_kinds:
            requests = [replace(request, cohort="") for request in requests]
        cost = noisy(self.cost, seed) if self.is_noisy else self.cost
        believed = (self.believed or self.cost).of_profile
        if not has_host:
            believed = replace(believed, host_s=0.0, host_row_s=0.0)
        limits = SimLimits(max_sequences=self.batch_size, prefill_chunk=self.chunk)
        changes = [self.later] if self.later else []
        simulation = Simulation(requests, policy, cost, limits, believed=believed, changes=changes)
        with self._charged(simulation):
            result = simulation.run()
        assert all(timing.is_finished for timing in result.timings), "a request was not served"
        excess_s = sum(cost.excess) if isinstance(cost, NoisyCost) else None
        return _measured(result.timings, result.elapsed_s, excess_s)

    @contextmanager
    def _charged(self, simulation: Simulation) -> Iterator[None]:
        clock, poll = simulation._clock, simulation.target.poll

        def slow_plan(views: Any, cost: Any, settings: Any) -> Any:
            free = [view for view in views if view.policy in controller.LEARNING]
            if any(view.sequence not in settings.forced for view in free):
                clock.sleep(self.plan_s)
            return plan(views, cost, settings)

        def slow_poll(timeout_s: float) -> Any:
            work, busy_s = simulation.target._work, simulation.target.busy_s
            is_verifying = any(isinstance(item, Verify) for item in work)
            events = poll(timeout_s)
            if is_verifying:
                clock.sleep(HIDDEN_SHARE * (simulation.target.busy_s - busy_s))
            return events

        with patch.object(controller, "plan", slow_plan if self.plan_s else plan):
            if self.is_hidden:
                simulation.target.poll = slow_poll  # type: ignore[method-assign]
            yield


def _measured(
    timings: Sequence[RequestTiming], elapsed_s: float, excess_s: float | None
) -> Measured:
    """excess_s: additional seconds by noise; None without noise. If all requests are there from the
    start, tokens are counted until the last one begins, because the end of a run depends on the
    lengths."""
    num_tokens, end_s = float(sum(t.num_tokens for t in timings)), elapsed_s - (excess_s or 0.0)
    if excess_s is None and timings[-1].scheduled_s == 0.0:
        end_s = max(timing.first_s or 0.0 for timing in timings)
        num_tokens = sum(tokens_within(timing, 0.0, end_s) for timing in timings)
    latencies = [timing.e2e_s(timing.scheduled_s) for timing in timings]
    firsts = [(t.first_s or 0.0) - t.scheduled_s for t in timings]
    return Measured(
        num_tokens / end_s,
        float(np.mean(latencies)),
        float(np.quantile(latencies, 0.99)),
        float(np.mean(firsts)),
    )


def conditions() -> list[Condition]:
    cpu, gpu = _cpu(), _gpu()
    third = replace(cpu, draft=_scaled(cpu.target, 1 / 3), catch_up_s=cpu.catch_up_s * 3)
    fast = _faster(cpu, 5.0)
    h100 = gpu_hardware("h100", 1, "llama-3.2-3b", "llama-3.2-1b", ROWS).cost
    h200 = gpu_hardware("h200", 1, "llama-3-8b", "llama-3.2-1b", ROWS).cost
    l4 = gpu_hardware("l4", 1, "llama-3.2-3b", "llama-3.2-1b", ROWS).cost
    far = replace(cpu, target=_scaled(cpu.target, 1.5, 8))
    few = replace(cpu, target=_steeper(cpu.target, 3.0, below_rows=4))
    swing = _open(cpu, (0.1, 1.1, 0.1, 1.1))
    with_host = replace(gpu, host_s=0.002, host_row_s=0.0002)
    step = _open(cpu, (0.3, 1.1, 0.3))
    bad = {"accept": 0.1, "accept_sd": 0.05}
    draft_2 = CostChange(0.4, Deviation(draft=2.0).applied_to(h100))
    slope_2 = CostChange(15.0, Deviation(slope=1.5).applied_to(cpu))
    extra = CostChange(0.4, Deviation(extra_ms=5.0).applied_to(h100))
    all_2 = CostChange(20.0, Deviation(draft=2.0, base=2.0, slope=2.0).applied_to(cpu))
    dear = replace(cpu, draft=_scaled(cpu.draft, 8.0)) if cpu.draft else cpu
    steep = replace(cpu, target=_steeper(cpu.target, 4.0))
    times_3 = Deviation(draft=3.0).applied_to(cpu)
    long_16, long_32 = _waiting(200, accept=0.5), _waiting(200, accept=0.5)
    return [
        Condition(STEADY, "1 sequence", _waiting(20), cpu, 1),
        Condition(STEADY, "8 sequences", _waiting(70), cpu, 8),
        Condition(STEADY, "32 sequences", _waiting(200), cpu, 32),
        Condition(STEADY, "H100, 32 sequences", _waiting(200), gpu, 32),
        Condition(STEADY, "first 60 requests, 8", _waiting(60, accept=0.4, output=SHORT), cpu, 8),
        Condition(TEXTS, "mixed, 8", _mixed(70), cpu, 8),
        Condition(TEXTS, "mixed, 32", _mixed(200), cpu, 32),
        Condition(TEXTS, "four applications, 1", _applications(80), cpu, 1),
        Condition(TEXTS, "four applications, look-ups, 8", _applications(120, True), cpu, 8),
        Condition(TEXTS, "change within a request, 1", _changing(10), cpu, 1),
        Condition(TEXTS, "change within a request, 8", _changing(50), cpu, 8),
        Condition(TEXTS, "change over time, 8", _shifting(80), cpu, 8),
        Condition(TEXTS, "look-ups beside drafts, 8", _look_ups(80), cpu, 8),
        Condition(TEXTS, "look-ups alone, 8", _look_ups(80, False), cpu, 8),
        Condition(LOAD, "0.7 of saturation", _open(cpu, (0.7,)), cpu, ROWS, is_open=True),
        Condition(LOAD, "1.1 of saturation", _open(cpu, (1.1,)), cpu, ROWS, is_open=True),
        Condition(LOAD, "H100, 1.1 of saturation", _open(gpu, (1.1,)), gpu, ROWS, is_open=True),
        Condition(LOAD, "step in load", step, cpu, ROWS, is_open=True),
        Condition(LOAD, "1.1, chunks of 64", _open(cpu, (1.1,)), cpu, ROWS, is_open=True, chunk=64),
        Condition(LOAD, "H200, long prompts, 0.7", _long(h200, 0.7), h200, ROWS, is_open=True),
        Condition(COST, "8+ rows x 1.5, step in load", step, far, ROWS, cpu, is_open=True),
        Condition(COST, "checking x 3 at few rows", swing, few, ROWS, cpu, is_open=True),
        Condition(COST, "drafts x 3, 8", _waiting(70), times_3, 8, cpu),
        Condition(COST, "drafts / 8, 1", _waiting(20), cpu, 1, dear),
        Condition(COST, "checking / 4, 8", _waiting(70), cpu, 8, steep),
        Condition(COST, "another processor, 16", _waiting(120), l4, 16, h100),
        Condition(COST, "host time, first 60 requests, 8", _waiting(60), with_host, 8),
        Condition(COST, "noise and stalls, 8", _waiting(80), cpu, 8, is_noisy=True),
        Condition(COST, "noise, 8+ rows x 1.5, 16", _waiting(120), far, 16, cpu, is_noisy=True),
        Condition(COST, "noise, another processor, 16", _waiting(120), l4, 16, h100, is_noisy=True),
        Condition(COST, "drafts x 2 in mid-run, 16", long_16, h100, 16, later=draft_2),
        Condition(COST, "+ 5 ms in mid-run, 16", long_16, h100, 16, later=extra),
        Condition(COST, "checking x 1.5 in mid-run, 32", long_32, cpu, 32, later=slope_2),
        Condition(COST, "all x 2 in mid-run, 8", _waiting(80), cpu, 8, later=all_2),
        Condition(DRAFT, "useless, 8", _waiting(50, accept=0.05, accept_sd=0.02), cpu, 8),
        Condition(DRAFT, "a third of the target, 1", _waiting(20), third, 1),
        Condition(DRAFT, "a third of the target, 8", _waiting(70), third, 8),
        Condition(DRAFT, "hidden cost, 1", _waiting(20, accept=0.3), cpu, 1, is_hidden=True),
        Condition(DRAFT, "hidden cost, 8", _waiting(70, accept=0.3), cpu, 8, is_hidden=True),
        Condition(SHORT_STEPS, "good draft", _waiting(20), fast, 1, plan_s=0.002),
        Condition(SHORT_STEPS, "bad draft", _waiting(15, **bad), fast, 1, plan_s=0.002),
    ]


def saturated() -> list[Condition]:
    """All requests there from the start, with other prompts and chunks."""
    cpu, gpu = _cpu(), _gpu()
    h200 = gpu_hardware("h200", 1, "llama-3-8b", "llama-3.2-1b", ROWS).cost
    some = {"prompt": LengthSpec(mean=500, sd=100), "output": LengthSpec(mean=128, sd=20)}
    many = {"prompt": LengthSpec(mean=2000, sd=200), "output": LengthSpec(mean=64, sd=10)}
    return [
        Condition(STEADY, "CPU", _waiting(200), cpu, ROWS),
        Condition(STEADY, "CPU, chunks of 64", _waiting(200), cpu, ROWS, chunk=64),
        Condition(STEADY, "H100", _waiting(300), gpu, ROWS),
        Condition(STEADY, "H200, prompts of 500", _waiting(200, **some), h200, ROWS),
        Condition(STEADY, "H200, prompts of 2,000", _waiting(200, **many), h200, ROWS),
        Condition(
            STEADY, "H200, 2,000, chunks of 2,048", _waiting(200, **many), h200, ROWS, chunk=2048
        ),
    ]


@lru_cache
def _cpu() -> CostModel:
    """The pair at 88 M on two cores, as measured."""
    return load_cost(MEASURED)


@lru_cache
def _gpu() -> CostModel:
    return gpu_hardware("h100", 1, "llama-3-8b", "eagle", ROWS).cost


def _scaled(table: PassTable, factor: float, from_rows: int = 1) -> PassTable:
    seconds = tuple(
        tuple(s * (factor if rows >= from_rows else 1.0) for s in line)
        for rows, line in zip(table.rows, table.seconds, strict=True)
    )
    return replace(table, seconds=seconds, context_s=factor * table.context_s)


def _steeper(table: PassTable, factor: float, below_rows: int = 1 << 20) -> PassTable:
    """A pass in which tokens after the first of each row take several times as long."""
    seconds = tuple(
        tuple(line[0] + (factor if rows < below_rows else 1.0) * (s - line[0]) for s in line)
        for rows, line in zip(table.rows, table.seconds, strict=True)
    )
    return replace(table, seconds=seconds)


def _faster(cost: CostModel, factor: float) -> CostModel:
    assert cost.draft is not None
    return replace(
        cost,
        target=_scaled(cost.target, 1 / factor),
        draft=_scaled(cost.draft, 1 / factor),
        prompt=cost.prompt and _scaled(cost.prompt, 1 / factor),
        catch_up_s=cost.catch_up_s / factor,
    )


def _each(
    num_requests: int, one: Callable[[int, np.random.Generator], SimRequest]
) -> Callable[[int], Sequence[SimRequest]]:
    """All there from the start."""

    def requests(seed: int) -> Sequence[SimRequest]:
        numbers = range(1, num_requests + 1)
        return [one(n, np.random.default_rng([seed, n])) for n in numbers]

    return requests


def _waiting(num_requests: int, **changes: Any) -> Callable[[int], Sequence[SimRequest]]:
    kind = CHAT.model_copy(update={"name": "", **changes})
    return _each(num_requests, lambda n, rng: kind.draw(n, 0.0, rng))


def _mixed(num_requests: int) -> Callable[[int], Sequence[SimRequest]]:
    """Half of the requests have a high acceptance, half a low one; nothing shows this
    beforehand."""
    kinds = [
        CHAT.model_copy(update={"name": "", "accept": a, "accept_sd": 0.05}) for a in (0.9, 0.3)
    ]
    return _each(num_requests, lambda n, rng: kinds[int(rng.integers(2))].draw(n, 0.0, rng))


def _applications(
    num_requests: int, has_look_ups: bool = False
) -> Callable[[int], Sequence[SimRequest]]:
    """Four applications, whose clients send a `workload` tag. Lookups are right in two of them."""

    def requests(seed: int) -> Sequence[SimRequest]:
        rng = np.random.default_rng([seed, 0])
        found = []
        for n in range(1, num_requests + 1):
            which = int(rng.integers(len(APPLICATIONS)))
            request = APPLICATIONS[which].draw(n, 0.0, np.random.default_rng([seed, n]))
            request = replace(request, cohort=f"application {which}")
            if has_look_ups:
                request = _with_look_ups(request, which % 2 == 0, rng)
            found.append(request)
        return found

    return requests


def _changing(num_requests: int) -> Callable[[int], Sequence[SimRequest]]:
    """Texts with good and bad stretches of STRETCH tokens."""

    def one(number: int, rng: np.random.Generator) -> SimRequest:
        request = CHAT.draw(number, 0.0, rng)
        length = 300
        is_good = bool(rng.integers(2))
        uniform = rng.random(length)
        bars = [0.9 if (i // STRETCH % 2 == 0) is is_good else 0.2 for i in range(length)]
        text = DraftRuns.of((uniform < np.array(bars)).tolist())
        return replace(request, cohort="", output_len=length, acceptances=only(DRAFT_MODEL, text))

    return _each(num_requests, one)


def _shifting(num_requests: int) -> Callable[[int], Sequence[SimRequest]]:
    """The first half of the requests drafts well, the second badly."""
    kinds = [
        CHAT.model_copy(update={"name": "", "accept": a, "accept_sd": 0.05}) for a in (0.85, 0.35)
    ]
    return _each(num_requests, lambda n, rng: kinds[2 * n > num_requests].draw(n, 0.0, rng))


def _look_ups(num_requests: int, has_drafts: bool = True) -> Callable[[int], Sequence[SimRequest]]:
    """Look-ups are right in half of the texts, and hardly ever in the others."""

    def one(number: int, rng: np.random.Generator) -> SimRequest:
        request = CHAT.draw(number, 0.0, rng)
        both = _with_look_ups(request, bool(rng.integers(2)), rng).acceptances
        return replace(request, cohort="", acceptances=both if has_drafts else (None, both[1]))

    return _each(num_requests, one)


def _with_look_ups(request: SimRequest, is_repeating: bool, rng: np.random.Generator) -> SimRequest:
    of_draft, *_ = request.acceptances
    found = matches(rng, request.output_len, 0.5, 0.95 if is_repeating else 0.05)
    return replace(request, acceptances=(of_draft, found))


def _open(cost: CostModel, shares: Sequence[float]) -> Callable[[int], Sequence[SimRequest]]:
    """Poisson arrivals in phases of equal length, at these shares of saturation."""

    def requests(seed: int) -> Sequence[SimRequest]:
        rate = _saturation(cost is _gpu())
        seconds = 160 / rate / sum(shares)
        phases = tuple(PhaseSpec(duration_s=seconds, rate=rate * share) for share in shares)
        kind = CHAT.model_copy(update={"name": ""})
        return draw(WorkloadSpec(kinds=(kind,), phases=phases, seed=seed))

    return requests


def _long(cost: CostModel, share: float) -> Callable[[int], Sequence[SimRequest]]:
    """Prompts of 2,000 tokens and outputs of 64, at this share of saturation."""
    lengths = {"prompt": LengthSpec(mean=2000, sd=200), "output": LengthSpec(mean=64, sd=10)}

    @lru_cache
    def saturation() -> float:
        waiting = _waiting(150, **lengths)
        found = Condition(LOAD, "", waiting, cost, ROWS).run(1, "none")
        return found.tokens_per_s / float(np.mean([one.output_len for one in waiting(1)]))

    def requests(seed: int) -> Sequence[SimRequest]:
        rate = share * saturation()
        phase = PhaseSpec(duration_s=250 / rate, rate=rate)
        kind = CHAT.model_copy(update={"name": "", **lengths})
        return draw(WorkloadSpec(kinds=(kind,), phases=(phase,), seed=seed))

    return requests


@lru_cache
def _saturation(is_gpu: bool) -> float:
    """Requests per second that are served if ROWS wait at any time."""
    cost = _gpu() if is_gpu else _cpu()
    found = Condition(LOAD, "", _waiting(300), cost, ROWS).run(1, "none")
    requests = _waiting(300)(1)
    return found.tokens_per_s / float(np.mean([request.output_len for request in requests]))
