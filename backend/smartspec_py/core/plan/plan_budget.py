"""Whether to plan at all. Planning takes time that a server without speculation does not spend.

Nothing here reads a clock; times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanBudgetSettings:
    share: float = 0.01
    """Share of the time for plans that are not worth it: as little as noise."""

    max_rested: int = 64
    """Most steps without a plan after such a plan: about 2 s with steps of 30 ms. Mean times of
    plans are also over this many steps."""


class PlanBudget:
    """Limits the time for plans that are not worth it to a share of all time.

    With short steps and little gain from drafts, planning at every step would make a server slower
    than one without speculation. A plan is not worth it if it drafts nothing, or gains less time
    than planning takes. After such a plan, nothing is planned or drafted until the next plan is
    within `share`. This lasts at most `max_rested` steps. It ends earlier if the number of
    sequences halves or doubles.
    """

    def __init__(self, settings: PlanBudgetSettings = PlanBudgetSettings()) -> None:
        self._settings = settings
        self._owed_s = 0.0
        self._batch_size = 0
        """Batch size of the last plan."""
        self._plan_s = 0.0
        """Mean seconds of the plans that were made."""
        self._spent_s = 0.0
        """Mean planning seconds over all steps. The learned host time contains this."""

    def allows(self, batch_size: int) -> bool:
        is_alike = batch_size < 2 * self._batch_size and self._batch_size < 2 * batch_size
        return self._owed_s <= 0.0 or not is_alike

    def pays(self, tokens: float, seconds: float, none_tokens: float, none_s: float) -> bool:
        """Whether a plan gains more time than planning takes. tokens, seconds: expected with the
        plan. none_tokens, none_s: expected without drafts. Both contain the learned host time."""
        with_plan_s = seconds - self._spent_s + self._plan_s
        return tokens * (none_s - self._spent_s) > none_tokens * with_plan_s

    def observe(
        self, batch_size: int, plan_s: float | None, step_s: float, is_poor: bool = False
    ) -> None:
        """plan_s: None if nothing was planned. is_poor: whether the plan was not worth it."""
        share, most = self._settings.share, self._settings.max_rested
        if plan_s is not None:
            self._batch_size = batch_size
            is_first = self._plan_s == 0.0
            self._plan_s += (plan_s - self._plan_s) / (1 if is_first else most)
        self._spent_s += ((plan_s or 0.0) - self._spent_s) / most
        if plan_s is not None and not is_poor:
            self._owed_s = 0.0
            return
        earned_s = share * step_s
        owed_s = max(0.0, self._owed_s + (plan_s or 0.0) - earned_s)
        self._owed_s = min(owed_s, most * earned_s)
