"""Step traces: what the planner saw at every step, what it chose, and what came of it.

A plan is a pure function of views and cost model, so a recorded step can be decided again: with
the recorded cost the plan must be the same, and with another cost or another planner the difference
is what that change does. JSON keeps every float as it was. docs/traces.md has the fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.planner import DEFAULT_SETTINGS, BatchTable, PlannerSettings, plan
from smartspec_py.core.types import DraftOption, SequenceId, SequenceView, SpecPlan
from smartspec_py.tracing.files import (
    TraceError,
    line_text,
    lines_text,
    naming,
    parse_lines,
    read_lines,
    tupled,
    write_text,
)

if TYPE_CHECKING:
    from smartspec_py.serving.loop import StepRecord

STEP_FORMAT = "smartspec step trace"
STEP_VERSION = 2
"""Raise it when the meaning of a stored number changes."""


@dataclass(frozen=True, slots=True)
class SequenceOutcome:
    """What one event of the step brought. num_tokens: as the target emitted them, those behind an
    end included."""

    sequence: SequenceId
    num_drafted: int
    num_accepted: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step. start_s: by the loop's clock, any origin. cost_id: of the profile, see `cost_id`.

    factors: what the profile was corrected by for this step, field by field of `CostModel`. views:
    what `plan` was asked with, in that order. reason: see `serving.step.Reason`.
    num_delayed, num_background, forced: what the planner was told, see `PlannerSettings`.
    outcomes: of all events of the step, those of prompt chunks included. num_generated and the
    times: see `StepRecord`.
    """

    start_s: float
    cost_id: str
    views: tuple[SequenceView, ...]
    plan: SpecPlan
    outcomes: tuple[SequenceOutcome, ...]
    num_prefill_tokens: int
    num_generated: int
    plan_s: float
    draft_s: float
    target_s: float
    total_s: float
    reason: str = "planned"
    num_delayed: int = 0
    num_background: int = 0
    forced: Mapping[SequenceId, int] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)


COPIED = (
    "start_s",
    "num_prefill_tokens",
    "num_generated",
    "plan_s",
    "draft_s",
    "target_s",
    "total_s",
)
"""Fields that a step trace has in common with a `StepRecord`."""

TOLD = ("num_delayed", "num_background", "forced")
"""Fields that it has in common with `PlannerSettings`."""

FACTORS = (
    "host_s",
    "host_row_s",
    "catch_up_s",
    "target_base",
    "target_slope",
    "target_extra_s",
    "draft_factor",
    "prefill_factor",
)
"""Fields of a cost model that live corrections move; the others are tables."""

_BY_SEQUENCE = ("draft_lens", "choices")
"""Fields of a plan that are mappings."""


@dataclass(frozen=True, slots=True)
class StepTraceFile:
    """costs: every profile that a step was planned with, by its id. about: models, machine,
    settings, date, as the caller has them. batch_table: of the policy of that name."""

    about: Mapping[str, Any]
    costs: Mapping[str, CostModel]
    steps: Sequence[StepTrace]
    batch_table: BatchTable | None = None


def trace_step(record: StepRecord, profile_id: str) -> StepTrace:
    """What the loop knows of a step as a trace. profile_id: of the profile that was corrected."""
    decision = record.decision
    return StepTrace(
        cost_id=profile_id,
        factors={name: getattr(decision.cost, name) for name in FACTORS},
        views=tuple(decision.views),
        plan=decision.plan,
        reason=decision.reason,
        outcomes=tuple(
            SequenceOutcome(e.sequence, e.num_drafted, e.num_accepted, len(e.tokens))
            for e in record.events
        ),
        **{name: getattr(record, name) for name in COPIED},
        **{name: getattr(decision.settings, name) for name in TOLD},
    )


def cost_of(step: StepTrace, costs: Mapping[str, CostModel]) -> CostModel:
    """The cost model that the step was planned with."""
    factors: dict[str, Any] = dict(step.factors)
    return replace(costs[step.cost_id], **factors)


def decide(
    step: StepTrace, cost: CostModel, settings: PlannerSettings = DEFAULT_SETTINGS
) -> SpecPlan:
    """What the planner decides today from what it saw then."""
    return plan(step.views, cost, told(step, settings))


def told(step: StepTrace, settings: PlannerSettings = DEFAULT_SETTINGS) -> PlannerSettings:
    """The settings that the planner had in this step."""
    return replace(settings, **{name: getattr(step, name) for name in TOLD})


def settings_of(trace: StepTraceFile) -> PlannerSettings:
    """What the planner was told in every step of the trace."""
    return PlannerSettings(batch_table=trace.batch_table)


def replay(
    steps: Iterable[StepTrace],
    cost: CostModel,
    decides: Callable[[StepTrace, CostModel], SpecPlan] = decide,
) -> list[SpecPlan]:
    """Decide every step again, with this cost model; `decides` may be another planner."""
    return [decides(step, cost) for step in steps]


def unexplained(trace: StepTraceFile) -> list[int]:
    """Indices of the steps whose recorded plan is not what `decide` says with their own cost
    model, in draft lengths or in what is expected."""
    settings = settings_of(trace)
    return [
        index
        for index, step in enumerate(trace.steps)
        if decide(step, cost_of(step, trace.costs), settings) != step.plan
    ]


def cost_id(cost: CostModel) -> str:
    """Tells cost models apart: a digest of every number in it."""
    text = json.dumps(cost_to_json(cost), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    """Raises ValueError where a step was planned with a cost model that the trace does not have."""
    write_text(path, steps_text(trace))


def steps_text(trace: StepTraceFile) -> str:
    """The file as text. Raises ValueError as `write_steps` does."""
    missing = {step.cost_id for step in trace.steps} - trace.costs.keys()
    if missing:
        raise ValueError(f"no cost model for {sorted(missing)}")
    costs = {name: cost_to_json(cost) for name, cost in trace.costs.items()}
    table = None if trace.batch_table is None else asdict(trace.batch_table)
    header = {"about": dict(trace.about), "costs": costs, "batch_table": table}
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
        costs = {name: cost_from_json(raw) for name, raw in header["costs"].items()}
        about, table = header["about"], header["batch_table"]
        batch_table = table and BatchTable(**{k: tupled(v) for k, v in table.items()})
    steps = []
    for number, raw in lines:
        with naming(f"{place}, line {number}"):
            step = step_from_json(raw)
            if step.cost_id not in costs:
                raise TraceError(f"no cost model {step.cost_id!r} in the header")
        steps.append(step)
    return StepTraceFile(about, costs, steps, batch_table)


def step_to_json(step: StepTrace) -> dict[str, Any]:
    """Field by field; views and outcomes are lists of objects."""
    found = {f.name: getattr(step, f.name) for f in fields(step)}
    found["views"] = [asdict(view) for view in step.views]
    found["outcomes"] = [asdict(outcome) for outcome in step.outcomes]
    return found | {"plan": plan_to_json(step.plan), "forced": list(step.forced.items())}


def step_line(step: StepTrace) -> str:
    """The line of a step in the file."""
    return line_text(step_to_json(step))


def step_from_json(raw: Mapping[str, Any]) -> StepTrace:
    """Raises KeyError, TypeError or ValueError for what is no step."""
    return StepTrace(
        **{
            **raw,
            "views": tuple(view_from_json(view) for view in raw["views"]),
            "plan": plan_from_json(raw["plan"]),
            "forced": dict(raw["forced"]),
            "outcomes": tuple(SequenceOutcome(**outcome) for outcome in raw["outcomes"]),
        }
    )


def view_from_json(raw: Mapping[str, Any]) -> SequenceView:
    """Probabilities come back as tuples, whatever they were: the plan is the same."""
    options = tuple(
        DraftOption(**{name: tupled(value) for name, value in option.items()})
        for option in raw["alternatives"]
    )
    plain = {name: tupled(value) for name, value in raw.items()}
    return SequenceView(**(plain | {"alternatives": options}))


def plan_to_json(spec_plan: SpecPlan) -> dict[str, Any]:
    """Mappings by sequence as lists of pairs: the keys of a JSON object would be text."""
    return asdict(spec_plan) | {
        name: list(getattr(spec_plan, name).items()) for name in _BY_SEQUENCE
    }


def plan_from_json(raw: Mapping[str, Any]) -> SpecPlan:
    return SpecPlan(**{**raw, **{name: dict(raw[name]) for name in _BY_SEQUENCE}})


def _table_from_json(raw: Mapping[str, Any]) -> PassTable:
    return PassTable(**{name: tupled(value) for name, value in raw.items()})
