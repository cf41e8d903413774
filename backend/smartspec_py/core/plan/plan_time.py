"""Decides whether a plan is worth the time to make it.

Times are arguments; this module does not read a clock.
"""

from __future__ import annotations

from smartspec_py.core.types import SpecPlan

AVERAGED_STEPS = 64
"""Averaging length of planning times, similar to that of the learned host time."""


class PlanTime:
    """Mean planning times. A plan is worth its time if it gains more than that."""

    def __init__(self) -> None:
        self._plan_s = 0.0
        """Mean planning time per plan."""
        self._spent_s = 0.0
        """Mean planning time per step, over all steps. The learned host time contains this
        time."""

    def pays(self, plan: SpecPlan, none: SpecPlan) -> bool:
        """Whether a plan gains more than its planning time. none: the plan without drafts. The
        expected times of both include the learned host time."""
        plan_s = plan.expected_s - self._spent_s + self._plan_s
        none_s = none.expected_s - self._spent_s
        return plan.expected_tokens * none_s > none.expected_tokens * plan_s

    def observe(self, plan_s: float | None) -> None:
        """Account for a step. plan_s: None if the step was not planned."""
        self._spent_s += ((plan_s or 0.0) - self._spent_s) / AVERAGED_STEPS
        if plan_s is not None:
            self._plan_s += (plan_s - self._plan_s) / (AVERAGED_STEPS if self._plan_s else 1)
