"""Runs: one policy under one load on one machine, and their results as JSON documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from smartspec_py.core.cost import FAR_TOKENS, CostModel
from smartspec_sim.hardware import Hardware, HardwareError, check_fits
from smartspec_sim.latency import Slo, summarise
from smartspec_sim.record import repeat_faster
from smartspec_sim.simulate import SimLimits, SimResult, Simulation
from smartspec_sim.workload import (
    SimRequest,
    WorkloadSpec,
    draw,
    longest_context,
    offered_rate,
)


@dataclass(frozen=True)
class Load:
    """A spec to draw requests from, or recorded requests."""

    spec: WorkloadSpec | None = None
    record: tuple[SimRequest, ...] = ()

    def requests(self) -> list[SimRequest]:
        return list(self.record) if self.spec is None else draw(self.spec)

    def faster(self, factor: float) -> Load:
        """The same requests, at `factor` times the rate."""
        if self.spec is not None:
            return Load(self.spec.scaled(factor))
        return Load(record=tuple(repeat_faster(self.record, factor)))


@dataclass(frozen=True)
class Run:
    """cost: times of steps, which the planner knows."""

    load: Load
    policy: str
    cost: CostModel
    limits: SimLimits
    slo: Slo | None = None

    def row(self, progress: Callable[[float], None] = lambda share: None) -> dict[str, Any]:
        """progress: called with the share of the requests that have ended."""
        requests = self.load.requests()
        result = Simulation(requests, self.policy, self.cost, self.limits).run(
            lambda num_over: progress(num_over / max(1, len(requests)))
        )
        return as_row(result, self.limits, offered_rate(requests), self.slo)


def runs_of(
    loads: Iterable[Load],
    policies: Sequence[str],
    machine: Hardware,
    limits: SimLimits,
    slo: Slo | None = None,
) -> list[Run]:
    """A run for each load and policy. Raises HardwareError if a load does not fit."""
    runs = []
    for load in loads:
        known = fitted(limits, machine, load.requests())
        runs += [Run(load, policy, machine.cost, known, slo) for policy in policies]
    return runs


def fitted(limits: SimLimits, hardware: Hardware, requests: Sequence[SimRequest]) -> SimLimits:
    """The limits with the cache of this hardware. Raises HardwareError if it is too small."""
    measured = (hardware.cost.prompt or hardware.cost.target).tokens_per_row[-1]
    if limits.prefill_chunk > FAR_TOKENS * measured:
        raise HardwareError(
            f"prefill_chunk: got {limits.prefill_chunk}, must be at most {FAR_TOKENS * measured}: "
            f"the profile was measured up to {measured} tokens per row"
        )
    if not hardware.cache_bytes:
        return limits
    longest = longest_context(requests) + limits.max_draft_len
    check_fits(hardware, limits.max_sequences, longest)
    return replace(
        limits,
        target_bytes=hardware.target_bytes,
        draft_bytes=hardware.draft_bytes,
        cache_bytes=hardware.cache_bytes,
    )


def as_row(result: SimResult, limits: SimLimits, rate: float, slo: Slo | None) -> dict[str, Any]:
    """The result as a JSON document: the summary of `latency`, and how it was speculated."""
    kinds = sorted(set(result.kinds))
    by_kind = {
        kind: summarise(
            [t for t, name in zip(result.timings, result.kinds, strict=True) if name == kind], slo
        )
        for kind in kinds
    }
    return {
        "policy": result.policy,
        "offered_rps": rate,
        **summarise(result.timings, slo),
        "mean_rows": result.mean_rows,
        "mean_draft_len": result.mean_draft_len,
        "mean_acceptance_len": result.mean_acceptance_len,
        "draft_lens": {str(k): n for k, n in sorted(result.draft_lens.items())},
        "num_steps": result.num_steps,
        "num_preemptions": result.num_preemptions,
        "target_busy": result.busy_s / result.elapsed_s if result.elapsed_s > 0 else 0.0,
        "limits": asdict(limits),
        "by_kind": by_kind if len(kinds) > 1 else {},
    }
