"""Types for one step of the loop: the decision, and the record of its results and durations.

The loop creates one record per step. The controller, metrics, traces and explanations read it. It
is not changed after it is created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.planner import PlannerSettings
from smartspec_py.core.types import SequenceId, SequenceView, SpecPlan
from smartspec_py.engines.base import Event


class Mode(Enum):
    """How a step decides the draft lengths of policies that use the cost model."""

    SEARCH = auto()  # the planner chooses
    REST = auto()  # no drafts, and no proposer is asked: this cost more time than it gained
    GUARD = auto()  # no drafts but forced tokens: by measurement, they lose. Acceptance is learned


class Reason(StrEnum):
    """The reason for the draft lengths of a step."""

    PLANNED = "planned"  # chosen by the planner
    GUARD = "guard"  # no drafts: by measurement, speculation loses time
    PROBE = "probe"  # run to measure the difference that drafts make
    FAILED = "failed"  # no drafts: the planner or a proposer raised an exception


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and its inputs. The planner returns `plan` for these views, cost and settings.

    settings: includes the draft lengths that the planner did not choose (`forced`); see
        `PlannerSettings`.
    """

    plan: SpecPlan
    views: Sequence[SequenceView]
    cost: CostModel
    settings: PlannerSettings
    reason: Reason = Reason.PLANNED


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The decision, results and durations of a step. Times are in seconds by the loop's clock.

    events: events of the step, including those of prompt chunks. They have no hidden states and no
        log-probabilities, because records are kept for longer than a step.
    num_prefill_tokens: prompt tokens of the step.
    num_generated: tokens that were added to requests.
    drafted: number of drafts by sequence, for sequences with drafts. It may be less than planned.
    start_s: start time of the step, before its views are made.
    between_s: time from the end of the previous step to start_s; 0 if the loop was idle.
    views_s, plan_s, draft_s: durations of making the views, planning and drafting. Drafting ends
        when the device has the drafts, which may be after the target's pass was launched.
    target_s: duration of the target pass of the decoding work.
    total_s: time from start_s until the events have been applied. The remainder, without the parts
        above, is the loop's own work.
    """

    decision: Decision
    events: Sequence[Event]
    num_prefill_tokens: int
    num_generated: int
    drafted: Mapping[SequenceId, int]
    start_s: float
    between_s: float
    views_s: float
    plan_s: float
    draft_s: float
    target_s: float
    total_s: float

    @property
    def batch_size(self) -> int:
        """Number of planned sequences."""
        return len(self.decision.views)

    @property
    def num_target_tokens(self) -> int:
        """Tokens of the target pass: prompt chunks, one token per sequence, and drafts."""
        return self.num_prefill_tokens + self.batch_size + sum(self.drafted.values())

    @property
    def num_drafted(self) -> int:
        """Number of verified drafts, counted in the step's events."""
        return sum(event.num_drafted for event in self.events)

    @property
    def verifications(self) -> list[tuple[int, int]]:
        """(num_drafted, num_accepted) of each sequence with verified drafts."""
        return [(e.num_drafted, e.num_accepted) for e in self._decoding if e.num_drafted]

    @property
    def num_undrafted(self) -> int:
        """Number of tokens generated without drafts. Each counts as one step of its sequence."""
        return sum(len(event.tokens) for event in self._decoding if not event.num_drafted)

    @property
    def _decoding(self) -> list[Event]:
        planned = self.decision.plan.draft_lens
        return [event for event in self.events if event.sequence in planned]


class StepWatch:
    """Measures the parts of a step, in the fields of `StepRecord`. `mark` ends a part."""

    def __init__(self, clock: Callable[[], float], last_end_s: float | None) -> None:
        """last_end_s: end of the previous step; None if the loop was idle since then."""
        self._clock = clock
        self.start_s = self.end_s = clock()
        between_s = 0.0 if last_end_s is None else self.start_s - last_end_s
        self.times = {
            "start_s": self.start_s,
            "between_s": between_s,
            **dict.fromkeys(("views_s", "plan_s", "draft_s"), 0.0),
        }

    def mark(self, part: str) -> None:
        """End this part. total_s is the time since the start, other parts follow each other."""
        now = self._clock()
        self.times[part] = now - (self.start_s if part == "total_s" else self.end_s)
        self.end_s = now

    def extend(self, part: str, pass_s: float) -> None:
        """Add the time since the end of this part, without that of a pass which has just ended: the
        device was still busy with this part when the pass was launched."""
        now = self._clock()
        self.times[part] += max(0.0, now - self.end_s - pass_s)
        self.end_s = now
