"""An account of time that is lost to learn something.

Each step earns SHARE of its time. What may be time without a gain is charged in seconds: a probe, a
plan that gains less than its own time, a trial in which speculation loses. An account in debt pays
for nothing more. So it costs SHARE of the time.

Time is an argument; this module does not read a clock.
"""

from __future__ import annotations

SHARE = 0.01
"""Share of the time that may be lost. Losses of this size are within measurement noise."""


class LossAccount:
    """`earn` accounts for a step, after `charge` for what the step lost."""

    def __init__(self, most_saved: float = 0.0, longest_debt: float = 32768.0) -> None:
        """most_saved: largest balance, in steps. longest_debt: largest number of steps until a debt
        is paid. Both are in steps as long as the last one."""
        self._most_saved = most_saved
        self._longest_debt = longest_debt
        self._balance_s = 0.0

    @property
    def is_in_debt(self) -> bool:
        return self._balance_s < 0.0

    def charge(self, lost_s: float) -> None:
        self._balance_s -= lost_s

    def earn(self, step_s: float) -> None:
        earned_s = SHARE * step_s
        balance_s = max(self._balance_s + earned_s, -self._longest_debt * earned_s)
        self._balance_s = min(balance_s, self._most_saved * step_s)

    def settle(self) -> None:
        """End a debt."""
        self._balance_s = max(self._balance_s, 0.0)
