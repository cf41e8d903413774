"""Whether to plan at all: planning takes time that a server which never speculates is spared.

Time is given; nothing here reads a clock.
"""

from __future__ import annotations

POOR_PLAN_SHARE = 0.01
"""Of the time, for plans that are not worth it."""

MAX_RESTED = 64
"""Steps without a plan after such a one, at most."""

PLAN_WEIGHT = 0.05
"""Of a step in the mean times of plans."""

NO_DEBT_S = 1e-9
"""What sums of seconds may leave for rounding."""


class PlanBudget:
    """Time for plans that are not worth it: a share of all.

    Where steps are short and drafts bring little, planning anew at every step would itself be what
    makes a server slower than one that does not speculate. After a plan that drafts nothing, or
    brings less than it takes to plan, nothing is drafted until the next plan would be within
    POOR_PLAN_SHARE, for MAX_RESTED steps at most, and until there are half or twice the sequences.
    """

    def __init__(self) -> None:
        self._owed_s = 0.0
        self._num_rows = 0
        """Of the last plan."""
        self._plan_s = 0.0
        """Mean of the plans that were made."""
        self._spent_s = 0.0
        """Mean over all steps, which is what the host's learned time has of it."""

    def allows(self, num_rows: int) -> bool:
        is_alike = num_rows < 2 * self._num_rows and self._num_rows < 2 * num_rows
        return self._owed_s < NO_DEBT_S or not is_alike

    def pays(self, tokens: float, seconds: float, none_tokens: float, none_s: float) -> bool:
        """Whether a plan brings more than it takes to plan. tokens, seconds: expected of it;
        none_tokens, none_s: of a step without drafts. Seconds with the host's learned time."""
        with_plan_s = seconds - self._spent_s + self._plan_s
        return tokens * (none_s - self._spent_s) > none_tokens * with_plan_s

    def observe(
        self, num_rows: int, plan_s: float | None, step_s: float, is_poor: bool = False
    ) -> None:
        """plan_s: None where nothing was planned. is_poor: whether the plan was not worth it."""
        if plan_s is not None:
            self._num_rows = num_rows
            is_first = self._plan_s == 0.0
            self._plan_s += (1.0 if is_first else PLAN_WEIGHT) * (plan_s - self._plan_s)
        self._spent_s += PLAN_WEIGHT * ((plan_s or 0.0) - self._spent_s)
        if plan_s is not None and not is_poor:
            self._owed_s = 0.0
            return
        earned_s = POOR_PLAN_SHARE * step_s
        owed_s = max(0.0, self._owed_s + (plan_s or 0.0) - earned_s)
        self._owed_s = min(owed_s, MAX_RESTED * earned_s)
