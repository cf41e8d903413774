"""Step traces, which `smartspec_py.serving.step_trace` writes, read and decided again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smartspec_py.core.cost import CostModel, cost_from_json, tupled
from smartspec_py.core.plan.planner import BatchTable, PlannerSettings, plan
from smartspec_py.core.types import NO_TOKEN, DraftOption, SequenceId, SequenceView, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.serving.step import Decision, Reason, StepRecord
from smartspec_py.serving.step_trace import (
    NUMBERS,
    STEP_FORMAT,
    STEP_VERSION,
    StepTraceFile,
    steps_text,
)
from smartspec_sim.traces.files import naming, parse_lines, read_lines, write_text


def decide(step: StepRecord, cost: CostModel | None = None) -> SpecPlan:
    """What the planner decides today from what it saw then; cost: None is what it had."""
    decision = step.decision
    return plan(decision.views, cost or decision.cost, decision.settings)


def unexplained(steps: Sequence[StepRecord]) -> list[int]:
    """Indices of the steps whose recorded plan is not what `decide` says with their own cost
    model, in draft lengths or in what is expected."""
    return [i for i, step in enumerate(steps) if decide(step) != step.decision.plan]


def write_steps(path: Path, trace: StepTraceFile) -> None:
    write_text(path, steps_text(trace))


def read_steps(path: Path) -> StepTraceFile:
    """Raises TraceError, naming the line, for what is no trace of this version."""
    return _parsed(path.name, *read_lines(path, STEP_FORMAT, STEP_VERSION))


def parse_steps(name: str, text: str) -> StepTraceFile:
    """`read_steps` of a file's text; name: of where it comes from, for errors."""
    return _parsed(name, *parse_lines(name, text, STEP_FORMAT, STEP_VERSION))


def _parsed(
    place: str, header: dict[str, Any], lines: Iterator[tuple[int, dict[str, Any]]]
) -> StepTraceFile:
    with naming(f"{place}, line 1"):
        profile = cost_from_json(header["profile"])
        about, table = header["about"], header["batch_table"]
        batch_table = table and BatchTable(**{k: tupled(v) for k, v in table.items()})
    steps = []
    for number, raw in lines:
        with naming(f"{place}, line {number}"):
            steps.append(step_from_json(raw, profile, batch_table))
    return StepTraceFile(about, profile, steps, batch_table)


def step_from_json(
    raw: Mapping[str, Any], profile: CostModel, batch_table: BatchTable | None
) -> StepRecord:
    """Raises KeyError, TypeError or ValueError for what is no step. Tokens of events come back as
    NO_TOKEN."""
    settings = PlannerSettings(
        batch_table=batch_table,
        num_prefilling=raw["num_prefilling"],
        last_num_tokens=raw["last_num_tokens"],
        forced=dict(raw["forced"]),
    )
    decision = Decision(
        plan=plan_from_json(raw["plan"]),
        views=[view_from_json(view) for view in raw["views"]],
        cost=replace(profile, **raw["factors"]),
        settings=settings,
        reason=Reason(raw["reason"]),
    )
    return StepRecord(
        decision=decision,
        events=[_event_from_json(event) for event in raw["events"]],
        drafted=dict(raw["drafted"]),
        **{name: raw[name] for name in NUMBERS},
    )


def _event_from_json(raw: Mapping[str, Any]) -> Event:
    tokens = (NO_TOKEN,) * raw["num_tokens"]
    path = tuple(raw.get("path", ()))
    return Event(raw["sequence"], tokens, raw["num_drafted"], raw["num_accepted"], path=path)


def view_from_json(raw: Mapping[str, Any]) -> SequenceView:
    """Probabilities come back as tuples, whatever they were: the plan is the same."""
    options = tuple(
        DraftOption(**{name: tupled(value) for name, value in option.items()})
        for option in raw["options"]
    )
    return SequenceView(**{**raw, "options": options})


def plan_from_json(raw: Mapping[str, Any]) -> SpecPlan:
    by_sequence: dict[str, dict[SequenceId, int]] = {
        name: dict(raw[name]) for name in ("draft_lens", "choices")
    }
    return SpecPlan(**{**raw, **by_sequence})
