"""Step traces: what the planner saw at every step, what it chose, and what came of it.

A plan is a pure function of views, cost model and settings, so a recorded step can be decided
again: as it was recorded the plan must be the same, and with another cost the difference is what
that change does. JSON keeps every float as it was. docs/reference/traces.md has the fields. They
are read by `smartspec_sim.traces.steps`.
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

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import BatchTable
from smartspec_py.serving.request import ErrorCode, RequestError
from smartspec_py.serving.step import StepRecord

logger = logging.getLogger(__name__)

STEP_FORMAT = "smartspec step trace"
STEP_VERSION = 5
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


MAX_BYTES = 4 * 2**20
"""Of an answer, its last step aside; older steps are left out."""

REST = 4.0
"""Seconds of rest for a second of work: the thread takes a fifth of a core at most."""


@dataclass(frozen=True, slots=True)
class StepTraceFile:
    """profile: what costs were corrected from. about: models, machine, settings, date, as the
    caller has them. batch_table: of the policy of that name."""

    about: Mapping[str, Any]
    profile: CostModel
    steps: Sequence[StepRecord]
    batch_table: BatchTable | None = None


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
    header = {"about": dict(trace.about), "profile": asdict(trace.profile), "batch_table": table}
    return lines_text(STEP_FORMAT, STEP_VERSION, header) + "".join(map(step_line, trace.steps))


def step_line(step: StepRecord) -> str:
    """The line of a step in the file. Mappings by sequence are lists of pairs: the keys of a JSON
    object would be text. Of events no tokens are kept, but how many there were."""
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
                }
                for event in step.events
            ],
            "drafted": list(step.drafted.items()),
            **{name: getattr(step, name) for name in NUMBERS},
        }
    )


def _table_from_json(raw: Mapping[str, Any]) -> PassTable:
    return PassTable(**{name: tupled(value) for name, value in raw.items()})


def tupled(value: Any) -> Any:
    """Lists, however deep, as the tuples that JSON made them from."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def lines_text(
    file_format: str,
    version: int,
    header: Mapping[str, Any],
    lines: Iterable[Mapping[str, Any]] = (),
) -> str:
    """What such a file holds."""
    objects = ({"format": file_format, "version": version, **header}, *lines)
    return "".join(map(_line, objects))


def _line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Arrays as lists, and NumPy's numbers as numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written")


class Explainer:
    """Step traces for clients that ask for an explanation, one at a time, beside the step loop.

    Turning steps into JSON holds Python's lock, which the loop needs too. So its thread rests after
    each step several times as long as the step took, and an answer is bounded in bytes.

    profile: what the loop's cost model began with. batch_table: that of the planner."""

    def __init__(self, profile: CostModel, batch_table: BatchTable | None) -> None:
        self._profile = profile
        self._batch_table = batch_table
        self._busy = threading.Lock()
        self._stopped = threading.Event()

    def reserve(self) -> None:
        """Begin an explanation. Raises RequestError(UNAVAILABLE) while another is being made."""
        if not self._busy.acquire(blocking=False):
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                "explain_steps: another explanation is being made, ask again when it has ended",
            )

    def release(self) -> None:
        """End it."""
        self._busy.release()

    def make(
        self, records: Sequence[StepRecord], num_steps: int, done: Callable[[str | None], None]
    ) -> None:
        """Make the trace of the last num_steps records that planned something, and release.

        done: given the trace, or None where the server stops; in a thread of its own.
        """

        def run() -> None:
            try:
                done(self.trace(records, num_steps))
            except Exception:
                logger.exception("an explanation could not be made")
                done(None)
            finally:
                self.release()

        threading.Thread(target=run, name="smartspec-explainer", daemon=True).start()

    def trace(self, records: Sequence[StepRecord], num_steps: int) -> str | None:
        """The trace as text; None where the explainer was stopped."""
        header = StepTraceFile({}, self._profile, [], self._batch_table)
        lines: list[str] = []
        num_bytes = 0
        planned = [record for record in records if record.batch_size][-num_steps:]
        for record in reversed(planned):
            start_s = time.perf_counter()
            lines.append(step_line(record))
            num_bytes += len(lines[-1])
            if num_bytes >= MAX_BYTES:
                break
            if self._stopped.wait(REST * (time.perf_counter() - start_s)):
                return None
        return steps_text(header) + "".join(reversed(lines))

    def stop(self, timeout_s: float) -> None:
        """End what is being made, and make no more."""
        self._stopped.set()
        self._busy.acquire(timeout=timeout_s)
