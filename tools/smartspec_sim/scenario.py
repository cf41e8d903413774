"""What is simulated side by side: loads and changes to them, each under every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_sim.hardware import Hardware, HardwareError, check_chunk, check_fits, check_room
from smartspec_sim.latency import Slo, summarise
from smartspec_sim.record import repeat_faster
from smartspec_sim.simulate import CostChange, SimLimits, SimResult, Simulation
from smartspec_sim.traces.oracle import OracleSequence
from smartspec_sim.workload import (
    LengthSpec,
    SimRequest,
    WorkloadSpec,
    draw,
    longest_context,
    offered_rate,
    with_texts,
)

BASE = "as given"


@dataclass(frozen=True)
class Load:
    """A spec to draw requests from, or requests that were recorded.

    texts: of an oracle trace, which then say how long the spec's requests are and how they draft.
    """

    spec: WorkloadSpec | None = None
    record: tuple[SimRequest, ...] = ()
    texts: tuple[OracleSequence, ...] = ()

    def requests(self) -> list[SimRequest]:
        """Raises WorkloadError where no text can be used."""
        if self.spec is None:
            return list(self.record)
        requests = draw(self.spec)
        return with_texts(requests, self.texts, self.spec.seed) if self.texts else requests

    def faster(self, factor: float) -> Load:
        """The same requests, at `factor` times the rate."""
        if self.spec is not None:
            return replace(self, spec=self.spec.scaled(factor))
        return Load(record=tuple(repeat_faster(self.record, factor)))


@dataclass(frozen=True)
class Deviation:
    """How steps differ, from time_s on, from what the planner was told at the start.

    draft, base, slope: factors, on all that the draft model does, on the target's pass of one token
    a row, and on what further tokens add to it. extra_ms, host_ms: added to each pass of the
    target, and to each step beside it.
    """

    time_s: float = 0.0
    draft: float = 1.0
    base: float = 1.0
    slope: float = 1.0
    extra_ms: float = 0.0
    host_ms: float = 0.0

    def applied_to(self, cost: CostModel) -> CostModel:
        """Raises HardwareError where it changes a draft model that is not there."""
        if self.draft != 1.0 and cost.draft is None:
            raise HardwareError(f"--wrong: draft={self.draft:g}, but there is no draft model")
        return replace(
            cost,
            draft_factor=cost.draft_factor * self.draft,
            catch_up_s=cost.catch_up_s * self.draft,
            target_base=cost.target_base * self.base,
            target_slope=cost.target_slope * self.slope,
            target_extra_s=cost.target_extra_s + self.extra_ms / 1e3,
            prefill_factor=cost.prefill_factor * self.slope,
            host_s=cost.host_s + self.host_ms / 1e3,
        )


def parse_deviation(text: str) -> Deviation:
    """Such as `draft=2,extra_ms=5@40`: all of it from second 40 on, or from the start without `@`.

    Raises ValueError, whose message is the reason.
    """
    changes, at, time = text.partition("@")
    found = {"time_s": _in_range(text, time, 0.0, 1e9)} if at else {}
    names = [field.name for field in fields(Deviation)][1:]
    for part in changes.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names:
            raise ValueError(f"{part!r}: must change {', '.join(names)}")
        if name in found:
            raise ValueError(f"{text!r}: {name} twice")
        low, high = (0.0, 1e6) if name.endswith("_ms") else (0.01, 100.0)
        found[name] = _in_range(part, value, low, high)
    return Deviation(**found)


@dataclass(frozen=True)
class Scenario:
    """label: what differs from the load as it was given. max_cache_tokens: of both caches of all
    live requests; 0 is what the hardware has room for, where that is known. deviations: of what
    steps take; each is told from the profile, and takes the place of the one before."""

    load: Load
    limits: SimLimits
    label: str = BASE
    max_cache_tokens: int = 0
    deviations: tuple[Deviation, ...] = ()


def change(scenario: Scenario, text: str) -> Scenario:
    """The scenario with changes such as `rate=2x,rows=64`.

    rate=NUMx; prompt=NUMx, output=NUMx, accept=NUM (of every kind of a spec); rows=NUM,
    draft_len=NUM. Raises ValueError, whose message is the reason.
    """
    load, limits = scenario.load, scenario.limits
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "rate":
            load = load.faster(_factor(part, value))
        elif name in ("prompt", "output", "accept"):
            load = _change_kinds(load, part, name, value)
        elif name in ("rows", "draft_len"):
            number = _number(part, value)
            most = {"rows": 512, "draft_len": 64}[name]
            if not number.is_integer() or not 1 <= number <= most:
                raise ValueError(f"{part!r}: must be a whole number in 1..{most}")
            field = {"rows": "max_sequences", "draft_len": "max_draft_len"}[name]
            size: dict[str, Any] = {field: int(number)}
            limits = replace(limits, **size)
        else:
            raise ValueError(f"{part!r}: must change rate, prompt, output, accept, rows, draft_len")
    return replace(scenario, load=load, limits=limits, label=text)


def _change_kinds(load: Load, part: str, name: str, value: str) -> Load:
    if load.spec is None or load.texts:
        raise ValueError(f"{part!r}: what was recorded cannot be changed so, only its rate")
    kinds = []
    for kind in load.spec.kinds:
        if name == "accept":
            accept = _number(part, value)
            if not 0 <= accept <= 1:
                raise ValueError(f"{part!r}: must be in 0..1")
            # The spread that was given may be wider than this mean allows.
            most = 0.5 * (accept * (1 - accept)) ** 0.5
            changes: dict[str, Any] = {"accept": accept, "accept_sd": min(kind.accept_sd, most)}
        else:
            changes = {name: _longer(getattr(kind, name), _factor(part, value))}
        kinds.append(kind.model_copy(update=changes))
    return Load(load.spec.model_copy(update={"kinds": tuple(kinds)}))


def _longer(length: LengthSpec, factor: float) -> LengthSpec:
    return LengthSpec(
        mean=max(1.0, length.mean * factor),
        sd=length.sd * factor,
        most=max(1, round(length.most * factor)),
    )


def _factor(part: str, value: str) -> float:
    if not value.endswith("x"):
        raise ValueError(f"{part!r}: must be a factor, such as 2x")
    factor = _number(part, value[:-1])
    if not 0 < factor <= 1000:
        raise ValueError(f"{part!r}: the factor must be above 0 and at most 1000")
    return factor


def _in_range(part: str, value: str, low: float, high: float) -> float:
    number = _number(part, value)
    if not low <= number <= high:
        raise ValueError(f"{part!r}: must be in {low:g}..{high:g}")
    return number


def _number(part: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{part!r}: {value!r} is no number") from None


@dataclass(frozen=True)
class Run:
    """One policy under one scenario; can be sent to another process. cost: what the planner is told
    that steps take. changes: to what they do take."""

    scenario: Scenario
    policy: str
    cost: CostModel
    limits: SimLimits
    slo: Slo | None
    changes: tuple[CostChange, ...] = ()

    def row(self, progress: Callable[[float], None] = lambda share: None) -> dict[str, Any]:
        """progress: told what share of the requests is over."""
        requests = self.scenario.load.requests()
        result = Simulation(
            requests, self.policy, self.cost, self.limits, changes=self.changes
        ).run(lambda num_over: progress(num_over / max(1, len(requests))))
        row = as_row(result, self.scenario.label, self.limits, offered_rate(requests), self.slo)
        return row | {"deviations": [asdict(one) for one in self.scenario.deviations]}


def runs_of(
    scenarios: Iterable[Scenario],
    policies: Sequence[str],
    hardware: Callable[[int], Hardware],
    slo: Slo | None = None,
) -> list[Run]:
    """A run for each scenario and policy, checked. hardware: by the number of rows that it must
    serve. Raises HardwareError or WorkloadError before anything is simulated."""
    runs = []
    for scenario in scenarios:
        machine = hardware(scenario.limits.max_sequences)
        requests = scenario.load.requests()
        limits = fitted(scenario.limits, machine, requests, scenario.max_cache_tokens)
        changes = tuple(
            CostChange(one.time_s, one.applied_to(machine.cost)) for one in scenario.deviations
        )
        runs += [Run(scenario, policy, machine.cost, limits, slo, changes) for policy in policies]
    return runs


Tell = Callable[[str, float], None]
"""Told what runs now, and how many runs are over; of one that is not, the share that is."""


def run_all(runs: Sequence[Run], tell: Tell, num_jobs: int = 1) -> list[dict[str, Any]]:
    """Their rows, as JSON documents, in order; in num_jobs processes at once."""
    if num_jobs == 1:
        return [_row(run, number, tell) for number, run in enumerate(runs)]
    # Spawned, not forked: whoever shows the progress has a thread.
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run.row) for run in runs]
        for num_over, _ in enumerate(as_completed(futures), start=1):
            tell(f"{num_jobs} processes", num_over)
        return [future.result() for future in futures]


def _row(run: Run, number: int, tell: Tell) -> dict[str, Any]:
    """number: of runs before it."""
    label = f"{run.scenario.label}, {run.policy}"
    tell(label, number)
    return run.row(lambda share: tell(label, number + share))


def fitted(
    limits: SimLimits, hardware: Hardware, requests: Sequence[SimRequest], max_cache_tokens: int = 0
) -> SimLimits:
    """The limits with the room that there is. Raises HardwareError where it is too little.

    max_cache_tokens: see `Scenario`.
    """
    check_chunk(hardware.cost, limits.prefill_chunk)
    if not hardware.cache_bytes:
        return limits
    each = hardware.target_bytes + hardware.draft_bytes
    limits = replace(limits, target_bytes=hardware.target_bytes, draft_bytes=hardware.draft_bytes)
    longest = longest_context(requests) + limits.max_draft_len
    if max_cache_tokens:
        check_room(hardware, max_cache_tokens, longest)
        return replace(limits, cache_bytes=max_cache_tokens * each)
    check_fits(hardware, limits.max_sequences, longest)
    return replace(limits, cache_bytes=hardware.cache_bytes)


def as_row(
    result: SimResult, label: str, limits: SimLimits, rate: float, slo: Slo | None
) -> dict[str, Any]:
    """The result as a JSON document: what `sim.latency` reports, and how it was speculated."""
    kinds = sorted(set(result.kinds))
    by_kind = {
        kind: summarise(
            [t for t, name in zip(result.timings, result.kinds, strict=True) if name == kind], slo
        )
        for kind in kinds
    }
    return {
        "scenario": label,
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
