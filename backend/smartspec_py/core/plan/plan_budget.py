"""Whether to plan at all: planning takes time that a server which never speculates is spared.

Time is given; nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanBudgetSettings:
    share: float = 0.01
    """Of the time, for plans that are not worth it: no more than noise hides."""

    max_rested: int = 64
    """Steps without a plan after such a one, at most: after a plan that stalled, 2 s at 30 ms a
    step. Mean times of plans are over as many, as those that the host's time is learned from."""


class PlanBudget:
    """Time for plans that are not worth it: a share of all.

    Where steps are short and drafts bring little, planning anew at every step would itself be what
    makes a server slower than one that does not speculate. After a plan that drafts nothing, or
    brings less than it takes to plan, nothing is drafted until the next plan would be within
    `share`, for `max_rested` steps at most, and until there are half or twice the sequences.
    """

    def __init__(self, settings: PlanBudgetSettings = PlanBudgetSettings()) -> None:
        self._settings = settings
        self._owed_s = 0.0
        self._batch_size = 0
        """Of the last plan."""
        self._plan_s = 0.0
        """Mean of the plans that were made."""
        self._spent_s = 0.0
        """Mean over all steps, which is what the host's learned time has of it."""

    def allows(self, batch_size: int) -> bool:
        is_alike = batch_size < 2 * self._batch_size and self._batch_size < 2 * batch_size
        return self._owed_s <= 0.0 or not is_alike

    def pays(self, tokens: float, seconds: float, none_tokens: float, none_s: float) -> bool:
        """Whether a plan brings more than it takes to plan. tokens, seconds: expected of it;
        none_tokens, none_s: of a step without drafts. Seconds with the host's learned time."""
        with_plan_s = seconds - self._spent_s + self._plan_s
        return tokens * (none_s - self._spent_s) > none_tokens * with_plan_s

    def observe(
        self, batch_size: int, plan_s: float | None, step_s: float, is_poor: bool = False
    ) -> None:
        """plan_s: None where nothing was planned. is_poor: whether the plan was not worth it."""
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
