"""Step traces: what the planner saw at every step, what it chose, and what came of it.

A plan is a pure function of views, cost model and settings, so a recorded step can be decided
again: as it was recorded the plan must be the same, and with another cost the difference is what
that change does. JSON keeps every float as it was. docs/traces.md has the fields. They are read by
`smartspec_sim.traces.steps`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import BatchTable
from smartspec_py.core.types import SequenceView, SpecPlan
from smartspec_py.serving.step import StepRecord

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


def steps_text(trace: StepTraceFile) -> str:
    """The file as text."""
    table = None if trace.batch_table is None else asdict(trace.batch_table)
    header = {
        "about": dict(trace.about),
        "profile": cost_to_json(trace.profile),
        "batch_table": table,
    }
    return lines_text(STEP_FORMAT, STEP_VERSION, header, map(step_to_json, trace.steps))


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


def view_to_json(view: SequenceView) -> dict[str, Any]:
    return asdict(view) | {"options": [option._asdict() for option in view.options]}


def plan_to_json(spec_plan: SpecPlan) -> dict[str, Any]:
    return asdict(spec_plan) | {
        "draft_lens": list(spec_plan.draft_lens.items()),
        "choices": list(spec_plan.choices.items()),
    }


def _table_from_json(raw: Mapping[str, Any]) -> PassTable:
    return PassTable(**{name: tupled(value) for name, value in raw.items()})


def tupled(value: Any) -> Any:
    """Lists, however deep, as the tuples that JSON made them from."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def lines_text(
    file_format: str, version: int, header: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]
) -> str:
    """What such a file holds."""
    objects = ({"format": file_format, "version": version, **header}, *lines)
    return "".join(map(line_text, objects))


def line_text(line: Mapping[str, Any]) -> str:
    """One line of such a file."""
    return json.dumps(line, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Arrays as lists, and NumPy's numbers as numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written")
