"""One step of the loop, as values: what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from smartspec_py.core.confidence import StepPrices
from smartspec_py.core.cost import CostModel
from smartspec_py.core.policies import PlannerSettings
from smartspec_py.core.types import SequenceView, SpecPlan


class Reason(StrEnum):
    """Why a step was planned as it was."""

    PLANNED = "planned"  # the planner's choice
    GUARD = "guard"  # speculation was measured to lose time here
    PROBE = "probe"  # run for what it teaches


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and all that it was made of: `plan` is what the planner says to views, cost, settings.

    settings: with the requests that wait for the step (`num_delayed`), the sequences that generate
    beside those of the views (`num_background`), and the draft lengths that the planner was not
    free to choose (`forced`); see `PlannerSettings`.
    prices: of drafts, for sequences whose draft confidence decides how deep to draft; None where
    none asks for that, or the plan must be kept to.
    """

    plan: SpecPlan
    views: Sequence[SequenceView]
    cost: CostModel
    settings: PlannerSettings
    reason: Reason = Reason.PLANNED
    prices: StepPrices | None = None

    @property
    def num_rows(self) -> int:
        """Sequences that generate in the step."""
        return len(self.views) + self.settings.num_background
