"""Decides whether to plan a step at all. A server that never speculates has no planning time.

Times are arguments; this module does not read a clock.
"""

from __future__ import annotations

from smartspec_py.core.account import LossAccount
from smartspec_py.core.types import SpecPlan

MAX_RESTED = 64
"""Largest number of steps without planning after a plan that was not worth its time. At 30 ms per
step, a plan that stalled stops planning for 2 s at most. It is also the averaging length of
planning times, similar to that of the learned host time."""


class PlanBudget:
    """Limits the time for plans that are not worth it to a share of the total time.

    If steps are short and drafts gain little, planning at every step can make the server slower
    than one that does not speculate. A plan is poor if it drafts nothing or gains less than the
    planning time. After a poor plan, steps draft nothing until its time is earned.
    Planning resumes earlier after MAX_RESTED steps of the usual duration, or if the number of
    sequences halves or doubles.
    """

    def __init__(self) -> None:
        self._account = LossAccount(longest_debt=MAX_RESTED)
        self._batch_size = 0
        """Batch size of the last plan."""
        self._plan_s = 0.0
        """Mean planning time per plan."""
        self._spent_s = 0.0
        """Mean planning time per step, over all steps. The learned host time contains this
        time."""

    def allows(self, batch_size: int) -> bool:
        is_alike = batch_size < 2 * self._batch_size and self._batch_size < 2 * batch_size
        return not self._account.is_in_debt or not is_alike

    def pays(self, plan: SpecPlan, none: SpecPlan) -> bool:
        """Whether a plan gains more than its planning time. none: the plan without drafts. The
        expected times of both include the learned host time."""
        plan_s = plan.expected_s - self._spent_s + self._plan_s
        none_s = none.expected_s - self._spent_s
        return plan.expected_tokens * none_s > none.expected_tokens * plan_s

    def observe(
        self, batch_size: int, plan_s: float | None, step_s: float, is_poor: bool = False
    ) -> None:
        """Account for a step. plan_s: None if the step was not planned. is_poor: whether the plan
        gained less than its planning time."""
        self._spent_s += ((plan_s or 0.0) - self._spent_s) / MAX_RESTED
        if plan_s is not None:
            self._batch_size = batch_size
            self._plan_s += (plan_s - self._plan_s) / (MAX_RESTED if self._plan_s else 1)
            if not is_poor:
                self._account.settle()
                return
            self._account.charge(plan_s)
        self._account.earn(step_s)
