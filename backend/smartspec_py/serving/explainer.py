"""Step traces for clients that ask for an explanation, one at a time, beside the step loop.

Turning steps into JSON holds Python's lock, which the loop needs too. So this thread rests after
each step several times as long as the step took, and an answer is bounded in bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.policies import BatchTable
from smartspec_py.serving.request import ErrorCode, RequestError
from smartspec_py.serving.step import StepRecord
from smartspec_py.serving.step_trace import StepTraceFile, step_line, steps_text

logger = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**20
"""Of an answer, its last step aside; older steps are left out."""

REST = 4.0
"""Seconds of rest for a second of work: the thread takes a fifth of a core at most."""


class Explainer:
    """profile: what the loop's cost model began with. batch_table: that of the planner."""

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
        planned = [record for record in records if record.num_rows][-num_steps:]
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
