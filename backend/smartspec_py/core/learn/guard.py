"""Disables speculation if measurements show that it is slower than no speculation.

The planner compares plans by its model of acceptance and cost, which may be wrong. The guard uses
measured tokens and seconds only. In each bucket of (rows, context), it compares steps with drafts
to steps without drafts. The profile is the unit, so that steps of 8 and of 15 rows can be combined:

    earned    number of steps without drafts that would generate the tokens of the step
    spent     duration of the step, divided by that of a step without drafts by the profile
    rate      earned / spent

The guard compares the rates with and without drafts. A constant factor in the errors of the profile
therefore cancels out.

A bucket has three states:

    watch     Each window of speculating steps is compared to a reference of steps without drafts.
              Old reference steps lose weight. SUSPECT_ERRORS below BAR: a trial starts.
    trial     Every fourth step has no drafts. Only steps of the trial count, with and without
              drafts, because the speed of the machine may have changed. The result is checked
              after 32, 64, 128, .. speculating steps. OFF_ERRORS below BAR: off. SUSPECT_ERRORS
              above: watch.
    off       No drafts but tokens that a grammar forces, until the time that the trial lost is
              earned, see `core.account`. Then a trial starts.

False alarms: a trial has at most 11 checks, each with more evidence. If speculation is exactly as
fast as BAR, less than 2 % of trials disable it. These rates assume that steps vary independently.

This module does not read a clock. There are a few dozen buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from smartspec_py.core.account import LONG_STEP, LossAccount
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import MeasuredStep

BAR = 0.98
"""Smallest accepted rate with speculation, relative to the rate without."""

OUTLIER_SHARE = 1 / 32
"""Steps of more than LONG_STEP times the usual duration are ignored while they are less than this
share. More frequent long steps may be caused by speculation, so they count."""

WINDOW = 64
"""Speculating steps per window. A large loss is found in the first one, and a loss of 5 % in one of
the next five."""

FIRST_CHECK = 32
"""Speculating steps of a trial before its first check."""

MEMORY = 512
"""Averaging length of the reference, in steps of the bucket."""

LONGEST = 32768
"""Largest length of a trial, in steps."""

SUSPECT_ERRORS = 2.0
"""Distance from BAR, in standard errors, at which a window below it starts a trial and a trial
above it ends with speculation enabled."""

OFF_ERRORS = 3.5
"""Distance below BAR, in standard errors, at which a trial disables speculation. A trial has up to
11 checks, and each is wrong once in 4,000 times."""

REFERENCE_EVERY = 4
"""In a trial, one step in this many has no drafts, also in debt. As far as is known, speculation is
not faster there, so these steps lose no time and are not charged."""

STEP_SD = 0.2
"""Relative deviation of one step that is assumed in addition to the measured deviations. It matters
only while there are few steps."""


class Guard:
    """`observe` learns from a step. `is_off` says whether the next step may not speculate.

    profile: the profile of the machine, without corrections. The caller charges to `account` what
    steps lost, and calls `earn` after each.
    """

    def __init__(self, profile: CostModel) -> None:
        self._profile = profile
        self._cells: dict[tuple[int, int], _Cell] = {}
        self.num_switches = 0

    def account(self, batch_size: int, context_len: float) -> LossAccount:
        """The account of the bucket."""
        return self._cell(batch_size, context_len).account

    def earn(self, batch_size: int, context_len: float, step_s: float) -> None:
        """The step earns, see `LossAccount.earn`. If that ends the debt, a trial ends *off*."""
        cell = self._cell(batch_size, context_len)
        cell.account.earn(step_s)
        if cell.state is State.OFF and not cell.account.is_in_debt:
            cell.begin_trial()
            self.num_switches += 1

    def is_off(self, batch_size: int, context_len: float) -> bool:
        return self._cell(batch_size, context_len).state is State.OFF

    def is_in_trial(self, batch_size: int, context_len: float) -> bool:
        return self._cell(batch_size, context_len).state is State.TRIAL

    def wants_reference(self, batch_size: int, context_len: float) -> bool:
        """Whether a step should run without its planned drafts, as a reference."""
        cell = self._cell(batch_size, context_len)
        if cell.state is State.TRIAL:
            return cell.num_unreferenced >= REFERENCE_EVERY - 1
        return not cell.account.is_in_debt

    def observe(self, step: MeasuredStep) -> None:
        """Learn from a step without prompt chunks."""
        if min(step.batch_size, step.num_generated) <= 0 or step.spent_s <= 0.0:
            return
        cell = self._cell(step.batch_size, step.context_len)
        was_off = cell.state is State.OFF
        none_s = self._profile.target_s(step.batch_size, step.batch_size, step.context_len)
        if not (step.is_speculating or step.is_warm):
            # Without speculation, all steps of the batch would have this size, and be warm.
            none_s += self._profile.shape_change_s
        cell.observe(step, none_s if none_s > 0.0 else 1.0)
        self.num_switches += cell.state is State.OFF and not was_off

    def _cell(self, batch_size: int, context_len: float) -> _Cell:
        return self._cells.setdefault(_bucket(batch_size, context_len), _Cell())


class State(Enum):
    WATCH = "watch"
    TRIAL = "trial"
    OFF = "off"


class _Evidence:
    """Sums over steps of 1, earned, spent, and their products. The guard runs in every step, and
    Python's floats are faster than such small arrays."""

    def __init__(self) -> None:
        self.sums = [0.0] * 6

    @property
    def num(self) -> float:
        return self.sums[0]

    def add(self, earned: float, spent: float) -> None:
        new = (1.0, earned, spent, earned * earned, spent * spent, earned * spent)
        self.sums = [old + value for old, value in zip(self.sums, new, strict=True)]

    def fade(self, kept: float) -> None:
        self.sums = [kept * value for value in self.sums]

    def rate(self) -> tuple[float, float]:
        """The rate and its relative variance. The variance is that of earned - rate * spent, whose
        mean is 0."""
        num, earned, spent, earned_squared, spent_squared, earned_spent = self.sums
        rate = earned / spent
        squares = earned_squared - 2 * rate * earned_spent + rate**2 * spent_squared
        squares = max(squares, 0.0) / (earned / num) ** 2
        return rate, (STEP_SD**2 + squares) / (1.0 + num) / num


@dataclass(slots=True)
class _Cell:
    """The state and the measurements of one bucket.

    reference: evidence of steps without drafts. window: evidence of the window.
    trial, trial_reference: evidence of the steps with and without drafts in the current trial.
    usual: mean of spent, with outliers limited. outlier_share: share of outliers.
    num_unreferenced: speculating steps since the last step without drafts.
    next_check: speculating steps of the trial at which it is checked next.
    account: see `core.account`.
    """

    state: State = State.WATCH
    reference: _Evidence = field(default_factory=_Evidence)
    trial: _Evidence = field(default_factory=_Evidence)
    trial_reference: _Evidence = field(default_factory=_Evidence)
    window: _Evidence = field(default_factory=_Evidence)
    usual: float = 1.0
    outlier_share: float = 0.0
    num_unreferenced: int = 0
    next_check: int = 0
    account: LossAccount = field(default_factory=LossAccount)

    def observe(self, step: MeasuredStep, none_s: float) -> None:
        """none_s: seconds of the step without drafts, by the profile."""
        spent, longest = step.spent_s / none_s, LONG_STEP * self.usual
        self.usual += (min(spent, longest) - self.usual) / FIRST_CHECK
        self.outlier_share += ((spent > longest) - self.outlier_share) / MEMORY
        earned = step.num_generated / step.batch_size
        self.reference.fade(1.0 - 1.0 / MEMORY)
        self.num_unreferenced = self.num_unreferenced + 1 if step.is_speculating else 0
        if spent > longest and self.outlier_share < OUTLIER_SHARE:
            return
        if not step.is_speculating:
            self.reference.add(earned, spent)
            self.trial_reference.add(earned, spent)
        elif self.state is State.TRIAL:
            self.trial.add(earned, spent)
            if self.trial.num >= self.next_check and self.trial_reference.num:
                self._check_trial(none_s)
        elif self.state is State.WATCH:  # while off, only forced tokens are drafted
            self.window.add(earned, spent)
            if self.window.num >= WINDOW and self.reference.num:
                self._check_window()

    def _check_window(self) -> None:
        mean, error = _log_ratio(self.window, self.reference)
        self.window = _Evidence()
        if mean + SUSPECT_ERRORS * error < 0.0:
            self.begin_trial()

    def begin_trial(self) -> None:
        self.state, self.num_unreferenced = State.TRIAL, 0
        self.next_check = FIRST_CHECK
        self.trial, self.trial_reference = _Evidence(), _Evidence()

    def _check_trial(self, none_s: float) -> None:
        mean, error = _log_ratio(self.trial, self.trial_reference)
        self.next_check *= 2
        if mean + OFF_ERRORS * error < 0.0:
            self.state = State.OFF
            _, earned, spent, *_ = self.trial.sums
            self.account.charge((spent - earned / self.trial_reference.rate()[0]) * none_s)
        elif mean > SUSPECT_ERRORS * error or self.trial.num >= LONGEST:
            self.state = State.WATCH


def _log_ratio(speculating: _Evidence, none: _Evidence) -> tuple[float, float]:
    """Log of (ratio of both rates / BAR), and its standard error. A loss is below 0."""
    (rate, variance), (none_rate, none_variance) = speculating.rate(), none.rate()
    return math.log(rate / none_rate / BAR), math.sqrt(variance + none_variance)


def _bucket(batch_size: int, context_len: float) -> tuple[int, int]:
    """Bucket of rows, in powers of 2, and of context, in powers of 4 from 256 on."""
    return batch_size.bit_length(), ((int(context_len) >> 8).bit_length() + 1) // 2
