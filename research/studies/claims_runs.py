"""Runs of the study: which there are, and what is kept of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context

import numpy as np

from smartspec_bench.progress import tracked
from smartspec_sim.latency import RequestTiming
from smartspec_sim.scenario import fitted
from smartspec_sim.simulate import SimLimits, Simulation
from smartspec_sim.workload import SimRequest
from studies.claims_loads import LOADS, PHASES
from studies.claims_machines import machine

NUM_PROCESSES = 2
ENGINE = "engine 7B"
FIXED = ("fixed:1", "fixed:3", "fixed:5", "fixed:7")
ADAPTIVE = ("goodput_global", "goodput")
SWEPT = ("none", "fixed:1", "fixed:3", "fixed:5", *ADAPTIVE)
ALL = ("none", *FIXED, "batch_table", *ADAPTIVE)


@dataclass(frozen=True, slots=True)
class Case:
    """A policy under a load on a machine. value: of the load; see `claims_loads`."""

    machine: str
    load: str
    value: float
    policy: str
    max_rows: int = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """latency_s: mean from arrival to the last token. by_phase: the same by the phase of arrival.
    steady_tps: tokens/s while all rows are taken and after warm-up, of a load that waits from the
    start; else 0.
    total_tps: over the whole run. undrafted: share of decoding steps and sequences without drafts.
    """

    latency_s: float
    by_phase: tuple[float, ...]
    steady_tps: float
    total_tps: float
    mean_rows: float
    mean_draft_len: float
    undrafted: float
    num_steps: int


Outcomes = Mapping[Case, Outcome]


def run_cases(cases: Iterable[Case]) -> dict[Case, Outcome]:
    """Each once, the longest first, in two processes."""
    ordered = sorted(dict.fromkeys(cases), key=_size, reverse=True)
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        found = tracked("claims", pool.map(run_case, ordered), "cases", len(ordered))
        return dict(zip(ordered, found, strict=True))


def run_case(case: Case) -> Outcome:
    requests, hardware = _requests(case.load, case.value), machine(case.machine)
    room = hardware.cache_bytes // (hardware.target_bytes + hardware.draft_bytes)
    limits = fitted(SimLimits(max_sequences=case.max_rows), hardware, requests, room)
    result = Simulation(requests, case.policy, hardware.cost, limits).run()
    assert all(timing.is_finished for timing in result.timings), "a request was not served"
    num_tokens = sum(timing.num_tokens for timing in result.timings)
    steps = sum(result.draft_lens.values())
    return Outcome(
        latency_s=_mean_s(result.timings),
        by_phase=_by_phase(result.timings, PHASES.get(case.load, ())),
        steady_tps=_steady_tps(result.timings, case.max_rows),
        total_tps=num_tokens / result.elapsed_s,
        mean_rows=result.mean_rows,
        mean_draft_len=result.mean_draft_len,
        undrafted=result.draft_lens[0] / steps,
        num_steps=result.num_steps,
    )


def _size(case: Case) -> float:
    """Roughly what it takes to simulate; only for the order."""
    num_tokens = sum(request.output_len for request in _requests(case.load, case.value))
    return num_tokens * (1.0 if case.policy == "none" else 0.6)


@lru_cache(maxsize=64)
def _requests(load: str, value: float) -> Sequence[SimRequest]:
    return tuple(LOADS[load](value))


def _mean_s(timings: Sequence[RequestTiming]) -> float:
    return float(np.mean([timing.e2e_s(timing.scheduled_s) for timing in timings]))


def _by_phase(timings: Sequence[RequestTiming], ends: Sequence[float]) -> tuple[float, ...]:
    phases: list[list[RequestTiming]] = [[] for _ in range(len(ends) + 1)]
    for timing in timings:
        phases[bisect_right(ends, timing.scheduled_s)].append(timing)
    return tuple(_mean_s(phase) for phase in phases)


def _steady_tps(timings: Sequence[RequestTiming], max_rows: int) -> float:
    """From when a quarter of the requests had begun until the last began, so that filling, the
    controller's learning and draining are left out. A request's tokens are taken to come evenly
    from its first to its last."""
    begun = sorted(t.first_s for t in timings if t.first_s is not None)
    first = max(max_rows, len(begun) // 4)
    if timings[-1].scheduled_s > 0 or len(begun) <= first:
        return 0.0
    start_s, end_s = begun[first], begun[-1]
    return sum(tokens_within(t, start_s, end_s) for t in timings) / (end_s - start_s)


def tokens_within(timing: RequestTiming, start_s: float, end_s: float) -> float:
    """Tokens of a finished request in this time."""
    assert timing.first_s is not None
    assert timing.last_s is not None
    shared = min(timing.last_s, end_s) - max(timing.first_s, start_s)
    if timing.last_s == timing.first_s:
        return float(timing.num_tokens) if start_s <= timing.first_s < end_s else 0.0
    return max(0.0, shared) / (timing.last_s - timing.first_s) * timing.num_tokens
