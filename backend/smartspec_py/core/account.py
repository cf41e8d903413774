"""The account of time that is lost to learn something.

What may be time without a gain is charged in seconds: a probe, a plan that gains less than its own
time, a trial in which speculation loses. Each step earns SHARE of its time. In debt, there are no
probes, and no speculation after a lost trial. After a plan that did not pay, none is made while
such plans owe more than a step. So all of them together cost SHARE of the time. Draft prefill of
probes adds up to PREFILL_SHARE. What a probe owes stops no plans: one token without a match of
prompt lookup would end drafts for hundreds of steps.

Times of steps do not include planning. This module does not read a clock.
"""

from __future__ import annotations

SHARE = 0.01
"""Share of the time that may be lost. Losses of this size are within measurement noise."""

PLAN_SHARE = SHARE / 2
"""The part of it that plans may take. The other is left for probes and trials."""

PREFILL_SHARE = SHARE / 2
"""Share of the time that draft prefill of probes may take. A probe waits until it is covered, so it
is not charged: a debt of hundreds of steps would end all references for the guard."""

MAX_SAVED = 4.0
"""Largest balance, in steps. With the probe that leads to a debt, five are enough to measure the
cost of drafts."""

LONG_STEP = 3.0
"""A step that takes more than this multiple of the usual time counts as one that takes so long."""

LONGEST_DEBT = 32768
"""Largest number of usual steps in which a debt is paid."""

MAX_RESTED = 64
"""Largest number of steps that pay for a plan. At 30 ms per step, a plan that stalled stops
planning for 2 s at most."""


class LossAccount:
    """The account of similar steps. Charge what a step lost, then call `earn`."""

    def __init__(self) -> None:
        self._balance_s = 0.0
        self._usual_s = 0.0
        """Mean duration of a step."""
        self._has_poor_plan = False
        self._plan_debt_s = 0.0
        """What plans that did not pay owe."""

    @property
    def is_in_debt(self) -> bool:
        return self._balance_s < 0.0

    @property
    def allows_plan(self) -> bool:
        return not self._has_poor_plan or self._plan_debt_s <= self._usual_s

    def charge(self, lost_s: float) -> None:
        self._balance_s -= lost_s

    def charge_probe(self, step_s: float) -> None:
        """Charge a whole step. The time that it loses is shorter. But computing it needs the model
        that the probe tests."""
        self.charge(self._limited(step_s))
        self._has_poor_plan = False

    def charge_plan(self, plan_s: float, step_s: float, pays: bool) -> None:
        """plan_s: seconds of the plan. pays: whether it gains more than that. A plan that was made
        although it was not allowed is not charged, so the debt does not grow by it."""
        if not pays and self.allows_plan:
            lost_s = min(plan_s, MAX_RESTED * PLAN_SHARE * step_s)
            self._plan_debt_s += lost_s
            self.charge(lost_s)
        self._has_poor_plan = not pays

    def earn(self, step_s: float) -> None:
        limited_s = self._limited(step_s)
        self._usual_s += (limited_s - self._usual_s) * (SHARE if self._usual_s else 1.0)
        self._plan_debt_s = max(0.0, self._plan_debt_s - PLAN_SHARE * limited_s)
        most_s = MAX_SAVED * self._usual_s
        least_s = -LONGEST_DEBT * SHARE * self._usual_s
        self._balance_s = min(max(self._balance_s + SHARE * limited_s, least_s), most_s)

    def _limited(self, step_s: float) -> float:
        return min(step_s, LONG_STEP * (self._usual_s or step_s))
