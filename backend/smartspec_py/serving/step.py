"""One step of the loop, as values: what was decided, and the record of what it did and took.

The loop makes one record for each step. Controller, metrics, traces and explanations read it; it is
not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.policies import PlannerSettings
from smartspec_py.core.types import SequenceId, SequenceView, SpecPlan
from smartspec_py.engines.base import Event


class Reason(StrEnum):
    """Why a step was planned as it was."""

    PLANNED = "planned"  # the planner's choice
    GUARD = "guard"  # speculation was measured to lose time here
    PROBE = "probe"  # run for what it teaches


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and all that it was made of: `plan` is what the planner says to views, cost, settings.

    settings: with what happens beside the views (`num_background`, `num_prefilling`), and the draft
    lengths that the planner was not free to choose (`forced`); see `PlannerSettings`.
    """

    plan: SpecPlan
    views: Sequence[SequenceView]
    cost: CostModel
    settings: PlannerSettings
    reason: Reason = Reason.PLANNED

    @property
    def num_decoding(self) -> int:
        """Sequences that generate in the step, those beside the views included."""
        return len(self.views) + self.settings.num_background


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step decided, did and took. Times are seconds by the loop's clock.

    events: of the step, those of prompt chunks included. num_generated: tokens that requests kept.
    drafted: drafts by sequence, of those that had any; they may be fewer than planned.
    start_s: when its decision began. between_s: from the end of the step before until then, 0 where
    the loop was idle. views_s, plan_s, draft_s: describing the sequences, deciding, drafting.
    target_s: the pass of its decoding work. total_s: from start_s to the events' end, so that what
    the parts leave is the loop's own work.
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
        """Sequences that were planned for."""
        return len(self.decision.views)

    @property
    def num_target_tokens(self) -> int:
        """Of the target's pass: prompt chunks, a token for each sequence, and drafts."""
        return self.num_prefill_tokens + self.decision.num_decoding + sum(self.drafted.values())

    @property
    def num_drafted(self) -> int:
        """Drafts that were verified, by the step's events."""
        return sum(event.num_drafted for event in self.events)

    @property
    def verifications(self) -> list[tuple[int, int]]:
        """(num_drafted, num_accepted) of each sequence that verified drafts."""
        return [(e.num_drafted, e.num_accepted) for e in self._decoding if e.num_drafted]

    @property
    def num_undrafted(self) -> int:
        """Steps of sequences without drafts; each token of a burst is one."""
        return sum(len(event.tokens) for event in self._decoding if not event.num_drafted)

    @property
    def _decoding(self) -> list[Event]:
        planned = self.decision.plan.draft_lens
        return [event for event in self.events if event.sequence in planned]
