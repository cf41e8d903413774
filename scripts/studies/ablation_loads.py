"""What the mechanisms of `ablation` are tried on: a load, what steps take, and what is believed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.engines.base import Verify
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.controller import LEARNING
from smartspec_py.serving.kinds import PromptKinds
from smartspec_py.serving.profile import load_cost
from smartspec_py.sim.acceptance import DraftRuns
from smartspec_py.sim.hardware import gpu_hardware
from smartspec_py.sim.latency import RequestTiming
from smartspec_py.sim.scenario import Deviation
from smartspec_py.sim.simulate import CostChange, SimLimits, Simulation
from smartspec_py.sim.workload import (
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

PROMPT = LengthSpec(mean=120, sd=60, most=400)
OUTPUT = LengthSpec(mean=120, sd=60, most=400)
CHAT = KindSpec(prompt=PROMPT, output=OUTPUT, accept=0.67, accept_sd=0.1)
SHORT = LengthSpec(mean=50, sd=20, most=100)
APPLICATIONS = tuple(
    KindSpec(name=name, prompt=PROMPT, output=SHORT, accept=accept, accept_sd=0.05)
    for name, accept in (("a", 0.9), ("b", 0.65), ("c", 0.4), ("d", 0.15))
)
PREFIX_LEN = 24
"""Tokens of an application's system prompt."""

STRETCH = 60
"""Tokens of a text after which it drafts well, or badly."""

ROWS = 32
OPEN_S = 60.0
HIDDEN_SHARE = 0.25
"""Of a pass, spent beside it in every step that verifies drafts."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one run: tokens a second, and of an open load latencies in seconds."""

    tokens_per_s: float
    latency_s: float
    p99_s: float
    ttft_s: float


@dataclass(frozen=True)
class Condition:
    """requests: by seed. cost: what steps take; believed: what the planner is told, None the same.
    later: a time in seconds, and what steps take from then on; nobody is told.
    plan_s: charged for each plan of a policy that learns. is_open: whether requests come in time,
    so that latencies say something. is_hidden: see HIDDEN_SHARE. is_noisy: passes scatter and
    stall; what that adds is known, and not counted in the result."""

    name: str
    requests: Callable[[int], Sequence[SimRequest]]
    cost: CostModel
    num_rows: int
    believed: CostModel | None = None
    later: CostChange | None = None
    plan_s: float = 0.0
    is_open: bool = False
    is_hidden: bool = False
    is_noisy: bool = False

    def run(
        self, seed: int, policy: str, *, has_kinds: bool = True, has_host: bool = True
    ) -> Measured:
        """has_kinds: whether requests say which are alike. has_host: whether the host's time is
        known at the start."""
        requests = self.requests(seed)
        if not has_kinds:
            requests = [replace(request, kind="") for request in requests]
        cost = noisy(self.cost, seed) if self.is_noisy else self.cost
        believed = (self.believed or self.cost).of_profile
        if not has_host:
            believed = replace(believed, host_s=0.0, host_row_s=0.0)
        limits = SimLimits(max_sequences=self.num_rows)
        changes = [self.later] if self.later else []
        simulation = Simulation(requests, policy, cost, limits, believed=believed, changes=changes)
        with self._charged(simulation):
            result = simulation.run()
        assert all(timing.is_finished for timing in result.timings), "a request was not served"
        elapsed_s = result.elapsed_s
        if isinstance(cost, NoisyCost):
            elapsed_s -= sum(cost.excess)
        return _measured(result.timings, elapsed_s)

    @contextmanager
    def _charged(self, simulation: Simulation) -> Iterator[None]:
        from smartspec_py.serving import controller

        clock, plan, poll = simulation._clock, controller.plan, simulation.target.poll

        def slow_plan(views: Any, *args: Any) -> Any:
            if any(view.policy in LEARNING for view in views):
                clock.sleep(self.plan_s)
            return plan(views, *args)

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


def _measured(timings: Sequence[RequestTiming], elapsed_s: float) -> Measured:
    latencies = [timing.e2e_s(timing.scheduled_s) for timing in timings]
    firsts = [(t.first_s or 0.0) - t.scheduled_s for t in timings]
    return Measured(
        sum(timing.num_tokens for timing in timings) / elapsed_s,
        float(np.mean(latencies)),
        float(np.quantile(latencies, 0.99)),
        float(np.mean(firsts)),
    )


def conditions() -> list[Condition]:
    cpu, gpu = _cpu(), _gpu()
    third = replace(cpu, draft=_scaled(cpu.target, 1 / 3), catch_up_s=cpu.catch_up_s * 3)
    fast = _faster(cpu, 5.0)
    h100 = gpu_hardware("h100", 1, "llama-3.2-3b", "llama-3.2-1b", ROWS).cost
    l4 = gpu_hardware("l4", 1, "llama-3.2-3b", "llama-3.2-1b", ROWS).cost
    far = replace(cpu, target=_scaled(cpu.target, 1.5, 8))
    with_host = replace(gpu, host_s=0.002, host_row_s=0.0002)
    many_rows = _open(cpu, (0.3, 1.1, 0.3))
    return [
        Condition("1 sequence", _waiting(15), cpu, 1),
        Condition("8 sequences", _waiting(60), cpu, 8),
        Condition("32 sequences", _waiting(200), cpu, 32),
        Condition("8B H100, 1 sequence", _waiting(15), gpu, 1),
        Condition("8B H100, 32 sequences", _waiting(200), gpu, 32),
        Condition("mixed texts, 8", _mixed(60), cpu, 8),
        Condition("mixed texts, 32", _mixed(200), cpu, 32),
        Condition("four applications, 1", _applications(80), cpu, 1),
        Condition("four applications with look-ups, 8", _applications(120, True), cpu, 8),
        Condition("text changes within, 1", _changing(10), cpu, 1),
        Condition("text changes within, 8", _changing(40), cpu, 8),
        Condition("text changes over time, 8", _shifting(80), cpu, 8),
        Condition("look-ups beside drafts, 8", _look_ups(80), cpu, 8),
        Condition("open, 0.7", _open(cpu, (0.7,)), cpu, ROWS, is_open=True),
        Condition("open, 1.1", _open(cpu, (1.1,)), cpu, ROWS, is_open=True),
        Condition("8B H100 open, 0.7", _open(gpu, (0.7,)), gpu, ROWS, is_open=True),
        Condition("8B H100 open, 1.1", _open(gpu, (1.1,)), gpu, ROWS, is_open=True),
        Condition("step in load", many_rows, cpu, ROWS, is_open=True),
        Condition("8+ rows x 1.5, step in load", many_rows, far, ROWS, cpu, is_open=True),
        Condition("drafts x 3, 8", _waiting(60), Deviation(draft=3.0).applied_to(cpu), 8, cpu),
        Condition("another processor, 16", _waiting(100), l4, 16, h100),
        Condition("useless draft, 8", _waiting(40, accept=0.05, accept_sd=0.02), cpu, 8),
        Condition("draft of a third, 1", _waiting(15), third, 1),
        Condition("draft of a third, 8", _waiting(60), third, 8),
        Condition("first 60 requests", _waiting(60, accept=0.4, output=SHORT), cpu, 8),
        Condition("noise and stalls, 8", _waiting(80), cpu, 8, is_noisy=True),
        Condition(
            "noise, 8+ rows x 1.5, 16", _waiting(120), far, 16, cpu, is_noisy=True
        ),
        Condition("hidden cost of drafts, 1", _waiting(15, accept=0.3), cpu, 1, is_hidden=True),
        Condition("hidden cost of drafts, 8", _waiting(60, accept=0.3), cpu, 8, is_hidden=True),
        Condition("drafts x 2 in mid-run, 16", _waiting(120, accept=0.5), h100, 16, later=CostChange(2.5, Deviation(draft=2.0).applied_to(h100))),
        Condition("drafts checked x 3 in mid-run, 8", _waiting(80), cpu, 8, later=CostChange(20.0, Deviation(slope=3.0).applied_to(cpu))),
        Condition("all x 2 in mid-run, 8", _waiting(80), cpu, 8, later=CostChange(20.0, Deviation(draft=2.0, base=2.0, slope=2.0).applied_to(cpu))),
        Condition("first 60 requests, host time", _waiting(60), with_host, 8),
        Condition("short steps, good draft", _waiting(20), fast, 1, plan_s=0.002),
        Condition("short steps, bad draft", _waiting(10, accept=0.1, accept_sd=0.05), fast, 1, plan_s=0.002),
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
    """Half draft well and half badly; nothing tells them apart beforehand."""
    kinds = [
        CHAT.model_copy(update={"name": "", "accept": a, "accept_sd": 0.05}) for a in (0.9, 0.3)
    ]
    return _each(num_requests, lambda n, rng: kinds[int(rng.integers(2))].draw(n, 0.0, rng))


def _applications(
    num_requests: int, has_look_ups: bool = False
) -> Callable[[int], Sequence[SimRequest]]:
    """Four, whose prompts begin with their own tokens; kinds as the server finds them. Look-ups are
    right in two of them."""

    def requests(seed: int) -> Sequence[SimRequest]:
        kinds, rng = PromptKinds(), np.random.default_rng([seed, 0])
        found = []
        for n in range(1, num_requests + 1):
            which = int(rng.integers(len(APPLICATIONS)))
            request = APPLICATIONS[which].draw(n, 0.0, np.random.default_rng([seed, n]))
            own = rng.integers(1000, 30000, request.prompt_len).tolist()
            prompt = [which] * PREFIX_LEN + own
            request = replace(request, kind=kinds.of(prompt))
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
        return replace(request, kind="", output_len=length, acceptances=only(DRAFT_MODEL, text))

    return _each(num_requests, one)


def _shifting(num_requests: int) -> Callable[[int], Sequence[SimRequest]]:
    """The first half of the requests drafts well, the second badly."""
    kinds = [
        CHAT.model_copy(update={"name": "", "accept": a, "accept_sd": 0.05}) for a in (0.85, 0.35)
    ]
    return _each(num_requests, lambda n, rng: kinds[2 * n > num_requests].draw(n, 0.0, rng))


def _look_ups(num_requests: int) -> Callable[[int], Sequence[SimRequest]]:
    """Both proposers; look-ups are right in half of the texts, and hardly ever in the others."""

    def one(number: int, rng: np.random.Generator) -> SimRequest:
        request = CHAT.draw(number, 0.0, rng)
        return replace(_with_look_ups(request, bool(rng.integers(2)), rng), kind="")

    return _each(num_requests, one)


def _with_look_ups(
    request: SimRequest, is_repeating: bool, rng: np.random.Generator
) -> SimRequest:
    of_draft, _ = request.acceptances
    found = matches(rng, request.output_len, 0.5, 0.95 if is_repeating else 0.05)
    return replace(request, acceptances=(of_draft, found))


def _open(
    cost: CostModel, shares: Sequence[float]
) -> Callable[[int], Sequence[SimRequest]]:
    """Poisson arrivals in phases of equal length, at these shares of saturation."""

    def requests(seed: int) -> Sequence[SimRequest]:
        rate = _saturation(cost is _gpu())
        seconds = 160 / rate / sum(shares)
        phases = tuple(PhaseSpec(duration_s=seconds, rate=rate * share) for share in shares)
        kind = CHAT.model_copy(update={"name": ""})
        return draw(WorkloadSpec(kinds=(kind,), phases=phases, seed=seed))

    return requests


@lru_cache
def _saturation(is_gpu: bool) -> float:
    """Requests a second that are served where ROWS wait at any time."""
    cost = _gpu() if is_gpu else _cpu()
    found = Condition("", _waiting(300), cost, ROWS).run(1, "goodput")
    requests = _waiting(300)(1)
    return found.tokens_per_s / float(np.mean([request.output_len for request in requests]))


def seeds(first: int = 1) -> Iterator[int]:
    rng = random.Random(first)
    while True:
        yield rng.randrange(1 << 30)
