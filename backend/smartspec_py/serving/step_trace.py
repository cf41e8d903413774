"""Step traces: the planner's inputs, its choice and the result, for each step.

A plan is a pure function of views, cost model and settings. So a recorded step can be planned
again. The same inputs must give the same plan. With another cost model, the difference shows the
effect of that model. Floats in the JSON are exact. docs/operate/troubleshooting.md describes the
fields. `smartspec_sim.traces` reads these files.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

import numpy as np

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.planner import BatchTable
from smartspec_py.serving.step import StepRecord

STEP_FORMAT = "smartspec step trace"
STEP_VERSION = 11
"""Increase it if the meaning of a stored number changes."""

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
"""Fields of a `StepRecord` that are stored unchanged."""

FACTORS = tuple(
    field.name for field in fields(CostModel) if field.name not in ("target", "draft", "prompt")
)
"""Fields of a cost model that are stored per step, because they are learned while serving."""


MAX_BYTES = 4 * 2**20
"""Size limit of an explanation. Older steps are left out."""

MAX_LINES = 1024
"""Steps that are kept for explanations."""


def header_line(profile: CostModel, batch_table: BatchTable | None) -> str:
    """The first line of the file.

    profile: the cost model without corrections. batch_table: table of the policy `batch_table`.
    """
    header = {
        "format": STEP_FORMAT,
        "version": STEP_VERSION,
        "profile": asdict(profile),
        "batch_table": batch_table and asdict(batch_table),
    }
    return _line(header)


def step_line(step: StepRecord) -> str:
    """The line of a step in the file.

    Mappings by sequence are stored as lists of pairs, because the keys of a JSON object are
    strings. For events, the number of tokens is stored, but not the tokens.
    """
    decision, settings, planned = step.decision, step.decision.settings, step.decision.plan
    return _line(
        {
            "reason": decision.reason,
            "views": [
                asdict(view) | {"options": [option._asdict() for option in view.options]}
                for view in decision.views
            ],
            "plan": asdict(planned)
            | {
                "draft_lens": list(planned.draft_lens.items()),
                "choices": list(planned.choices.items()),
            },
            "factors": {name: getattr(decision.cost, name) for name in FACTORS},
            "num_prefilling": settings.num_prefilling,
            "warm_shapes": [*settings.warm_shapes],
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
    )


def _line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Convert NumPy arrays to lists, and NumPy numbers to Python numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON")


class StepLog:
    """The lines of recent steps, for explanations. Used by the responder's thread only."""

    def __init__(self, profile: CostModel, batch_table: BatchTable | None) -> None:
        """profile: the loop's cost model without corrections. batch_table: the planner's table."""
        self._header = header_line(profile, batch_table)
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    def add(self, step: StepRecord) -> None:
        """Steps without planned sequences are left out."""
        if step.batch_size:
            self._lines.append(step_line(step))

    def text(self, num_steps: int) -> str:
        """A step trace of the last num_steps steps, or fewer if they exceed MAX_BYTES."""
        lines: list[str] = []
        num_left = MAX_BYTES
        for line in islice(reversed(self._lines), num_steps):
            num_left -= len(line)
            if num_left < 0:
                break
            lines.append(line)
        return self._header + "".join(reversed(lines))
