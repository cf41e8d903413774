"""Step traces: what the planner saw at every step, what it chose, and what came of it.

A plan is a pure function of views, cost model and settings, so a recorded step can be decided
again: as it was recorded the plan must be the same, and with another cost the difference is what
that change does. JSON keeps every float as it was. docs/traces.md has the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import BatchTable, PlannerSettings, plan
from smartspec_py.core.types import NO_TOKEN, DraftOption, SequenceId, SequenceView, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.serving.step import Decision, Reason, StepRecord
from smartspec_py.serving.trace_files import (
    line_text,
    lines_text,
    naming,
    parse_lines,
    read_lines,
    tupled,
    write_text,
)

STEP_FORMAT = "smartspec step trace"
STEP_VERSION = 3
"""Raise it when the meaning of a stored number changes."""

NUMBERS = (
    "num_prefill_tokens",
    "num_generated",
    "start_s",
    "between_s",
    "views_s",
    "plan_s",
    "draft_s",
    "target_s",
    "total_s",
)
"""Fields of a `StepRecord` that are stored as they are."""

FACTORS = (
    "host_s",
    "host_row_s",
    "catch_up_s",
    "target_base",
    "target_slope",
    "target_extra_s",
    "draft_factor",
)
"""Fields of a cost model that live corrections move; the others are tables."""


@dataclass(frozen=True, slots=True)
class StepTraceFile:
    """profile: what costs were corrected from. about: models, machine, settings, date, as the
    caller has them. batch_table: of the policy of that name."""

    about: Mapping[str, Any]
    profile: CostModel
    steps: Sequence[StepRecord]
    batch_table: BatchTable | None = None


def decide(step: StepRecord, cost: CostModel | None = None) -> SpecPlan:
    """What the planner decides today from what it saw then; cost: None is what it had."""
    decision = step.decision
    return plan(decision.views, cost or decision.cost, decision.settings)


def unexplained(steps: Sequence[StepRecord]) -> list[int]:
    """Indices of the steps whose recorded plan is not what `decide` says with their own cost
    model, in draft lengths or in what is expected."""
    return [i for i, step in enumerate(steps) if decide(step) != step.decision.plan]


def cost_to_json(cost: CostModel) -> dict[str, Any]:
    return asdict(cost)


def cost_from_json(raw: Mapping[str, Any]) -> CostModel:
    """Raises KeyError, TypeError or ValueError for what is no cost model.

    One that was written before prompts were measured has no `prompt`.
    """
    draft, prompt = raw["draft"], raw.get("prompt")
    tables = {
        "target": _table_from_json(raw["target"]),
        "draft": draft and _table_from_json(draft),
        "prompt": prompt and _table_from_json(prompt),
    }
    return CostModel(**{**raw, **tables})


def write_steps(path: Path, trace: StepTraceFile) -> None:
    write_text(path, steps_text(trace))


def steps_text(trace: StepTraceFile) -> str:
    """The file as text."""
    table = None if trace.batch_table is None else asdict(trace.batch_table)
    header = {
        "about": dict(trace.about),
        "profile": cost_to_json(trace.profile),
        "batch_table": table,
    }
    return lines_text(STEP_FORMAT, STEP_VERSION, header, map(step_to_json, trace.steps))


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


def step_to_json(step: StepRecord) -> dict[str, Any]:
    """Mappings by sequence are lists of pairs: the keys of a JSON object would be text. Of events
    no tokens are kept, but how many there were."""
    decision, settings = step.decision, step.decision.settings
    return {
        "reason": decision.reason,
        "views": [view_to_json(view) for view in decision.views],
        "plan": plan_to_json(decision.plan),
        "factors": {name: getattr(decision.cost, name) for name in FACTORS},
        "num_background": settings.num_background,
        "num_reading": settings.num_reading,
        "forced": list(settings.forced.items()),
        "events": [
            {
                "sequence": event.sequence,
                "num_drafted": event.num_drafted,
                "num_accepted": event.num_accepted,
                "num_tokens": len(event.tokens),
            }
            for event in step.events
        ],
        "drafted": list(step.drafted.items()),
        **{name: getattr(step, name) for name in NUMBERS},
    }


def step_line(step: StepRecord) -> str:
    """The line of a step in the file."""
    return line_text(step_to_json(step))


def step_from_json(
    raw: Mapping[str, Any], profile: CostModel, batch_table: BatchTable | None
) -> StepRecord:
    """Raises KeyError, TypeError or ValueError for what is no step. Tokens of events come back as
    NO_TOKEN."""
    settings = PlannerSettings(
        batch_table=batch_table,
        num_background=raw["num_background"],
        num_reading=raw["num_reading"],
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
    return Event(raw["sequence"], tokens, raw["num_drafted"], raw["num_accepted"])


def view_to_json(view: SequenceView) -> dict[str, Any]:
    return asdict(view) | {"options": [option._asdict() for option in view.options]}


def view_from_json(raw: Mapping[str, Any]) -> SequenceView:
    """Probabilities come back as tuples, whatever they were: the plan is the same."""
    options = tuple(
        DraftOption(**{name: tupled(value) for name, value in option.items()})
        for option in raw["options"]
    )
    return SequenceView(**{**raw, "options": options})


def plan_to_json(spec_plan: SpecPlan) -> dict[str, Any]:
    return asdict(spec_plan) | {
        "draft_lens": list(spec_plan.draft_lens.items()),
        "choices": list(spec_plan.choices.items()),
    }


def plan_from_json(raw: Mapping[str, Any]) -> SpecPlan:
    by_sequence: dict[str, dict[SequenceId, int]] = {
        name: dict(raw[name]) for name in ("draft_lens", "choices")
    }
    return SpecPlan(**{**raw, **by_sequence})


def _table_from_json(raw: Mapping[str, Any]) -> PassTable:
    return PassTable(**{name: tupled(value) for name, value in raw.items()})
