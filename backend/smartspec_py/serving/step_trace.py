"""Step traces: the planner's inputs, its choice and the result, for each step.

A plan is a pure function of views, cost model and settings. So a recorded step can be planned
again. The same inputs must give the same plan. With another cost model, the difference shows the
effect of that model. Floats in the JSON are exact. docs/reference/traces.md describes the fields.
`smartspec_sim.traces` reads these files.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.planner import BatchTable
from smartspec_py.serving.step import StepRecord

logger = logging.getLogger(__name__)

STEP_FORMAT = "smartspec step trace"
STEP_VERSION = 5
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

FACTORS = (
    "host_s",
    "host_row_s",
    "catch_up_s",
    "target_base",
    "target_slope",
    "target_extra_s",
    "draft_factor",
)
"""Fields of a cost model that are stored per step, because they are learned while serving."""


MAX_BYTES = 4 * 2**20
"""Size limit of an explanation. Older steps are left out. The last step added may exceed it."""

REST = 4.0
"""Seconds that the thread sleeps per second of work, so that it uses at most a fifth of a core."""


@dataclass(frozen=True, slots=True)
class StepTraceFile:
    """The content of a step trace.

    about: models, machine, settings and date, from the caller. profile: the cost model without
    corrections. batch_table: table of the policy `batch_table`.
    """

    about: Mapping[str, Any]
    profile: CostModel
    steps: Sequence[StepRecord]
    batch_table: BatchTable | None = None


def steps_text(trace: StepTraceFile) -> str:
    """The file as text."""
    table = None if trace.batch_table is None else asdict(trace.batch_table)
    header = {"about": dict(trace.about), "profile": asdict(trace.profile), "batch_table": table}
    return lines_text(STEP_FORMAT, STEP_VERSION, header) + "".join(map(step_line, trace.steps))


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
            "num_background": settings.num_background,
            "num_prefilling": settings.num_prefilling,
            "last_num_tokens": settings.last_num_tokens,
            "forced": list(settings.forced.items()),
            "events": [
                {
                    "sequence": event.sequence,
                    "num_drafted": event.num_drafted,
                    "num_accepted": event.num_accepted,
                    "num_tokens": len(event.tokens),
                    "path": event.path,
                }
                for event in step.events
            ],
            "drafted": list(step.drafted.items()),
            **{name: getattr(step, name) for name in NUMBERS},
        }
    )


def lines_text(
    file_format: str,
    version: int,
    header: Mapping[str, Any],
    lines: Iterable[Mapping[str, Any]] = (),
) -> str:
    """The text of a trace file: a header line, then one line per object."""
    objects = ({"format": file_format, "version": version, **header}, *lines)
    return "".join(map(_line, objects))


def _line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Convert NumPy arrays to lists, and NumPy numbers to Python numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON")


class Explainer:
    """Makes step traces for clients that ask for an explanation, one at a time.

    It works in a thread beside the step loop. Conversion to JSON holds Python's global interpreter
    lock, which the loop needs too. So after each step the thread sleeps several times as long as
    the conversion took. The size of an explanation is limited.

    profile: the loop's cost model without corrections. batch_table: the planner's table.
    """

    def __init__(self, profile: CostModel, batch_table: BatchTable | None) -> None:
        self._header = steps_text(StepTraceFile({}, profile, [], batch_table))
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(
        self, records: Sequence[StepRecord], num_steps: int, done: Callable[[str | None], None]
    ) -> bool:
        """Begin the trace of the last num_steps records with planned sequences; False if another
        one is being made.

        done: called in the explainer's thread with the trace, or with None after `stop`.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        planned = [record for record in records if record.batch_size][-num_steps:]
        self._thread = threading.Thread(
            target=self._run, args=(planned, done), name="smartspec-explainer", daemon=True
        )
        self._thread.start()
        return True

    def _run(self, records: Sequence[StepRecord], done: Callable[[str | None], None]) -> None:
        trace = None
        try:
            trace = self.trace(records)
        except Exception:
            logger.exception("an explanation cannot be made")
        done(trace)

    def trace(self, records: Sequence[StepRecord]) -> str | None:
        """The trace as text; None if the explainer is stopped."""
        lines: list[str] = []
        num_bytes = 0
        for record in reversed(records):
            start_s = time.perf_counter()
            lines.append(step_line(record))
            num_bytes += len(lines[-1])
            if num_bytes >= MAX_BYTES:
                break
            if self._stopped.wait(REST * (time.perf_counter() - start_s)):
                return None
        return self._header + "".join(reversed(lines))

    def stop(self, timeout_s: float) -> None:
        """Stop the current explanation. Waits at most timeout_s."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
