"""May contradict the planner: is speculating faster than not speculating, by what was measured?

The planner compares plans by its own model of acceptance and cost; where that is wrong, it is wrong
about both sides. The guard knows tokens and seconds only: those of steps that speculated, and those
of steps that did not, in the same bucket of (rows, context). The profile serves as the unit, so
that steps of 8 and of 15 rows can be put together: a step *earns* the steps without drafts that its
tokens would take, *spends* its seconds over those of such a step by the profile, and a rate is what
is earned over what is spent. Rates of both kinds are compared, so that a profile that is off by a
factor does not matter.

    watch     windows of speculating steps against a reference of k = 0 steps that ages; a suspicion
              (2 standard errors below `bar`) begins a trial
    trial     every fourth step is one without drafts, and only what is measured now counts, on both
              sides: a machine that became slower does so for both. 3.5 standard errors below `bar`
              after 32, 64, 128, .. speculating steps: off. 2 above: watch
    off       no speculation for a pause that is 100 times what the trial lost, so that trying again
              costs 1 % of the time. Then a trial

False alarms: a trial has at most 11 looks, at growing evidence. Speculation that is exactly as fast
as `bar` is turned off in less than 2 % of trials. One that gains 5 % has first to be suspected, and
then to be mistaken by 3.5 standard errors from a truth that lies further away: less than 1 % of
trials, and trials are rare. The odds hold for steps that vary independently; where a few sequences
of poor acceptance stay for long, turning off is right for as long.

Steps of more than three times the usual one are left out as outliers, unless they are more than one
in 32: then they are no accident, but perhaps the price of speculating, and count. A price that is
paid more seldom is not seen.

Time is counted in steps of a bucket; nothing here reads a clock, and there are a few dozen buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import MeasuredStep

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GuardSettings:
    bar: float = 0.98
    """Least rate of speculating relative to not speculating that is let pass: the promise."""

    share: float = 0.01
    """Of the time for probes, and again for what lost trials lose: noise hides that much."""

    most_probes: float = 5.0
    """Probes that may be saved up: enough of them to see what drafts cost."""

    windows: tuple[int, ...] = (32, 512, 4096, 32768)
    """Speculating steps of a window: the short ones see a great loss soon, the long ones a small
    one. A reference fades over the second, a trial and a pause last as long as the last at most."""

    suspect_errors: float = 2.0
    """Standard errors from `bar` at which a window is suspicious, and a trial is won: a wrong
    suspicion costs a trial of that many steps, a quarter of them without drafts."""

    off_errors: float = 3.5
    """The same at which a trial is lost: 11 looks at it, each wrong once in 4,000 times."""

    reference_every: int = 4
    """In a trial, one step in this many has no drafts, even if the probe budget is used up: as far
    as is known, speculation is not faster there."""

    step_sd: float = 0.2
    """Relative deviation of one step that is assumed beside those seen, for the first few."""

    long_step: float = 3.0
    """Usual steps from which one is long: an outlier, or the price of speculating. Left out while
    they are fewer than one in the shortest window: counted, 1 % of outliers of 20 steps hid a loss
    of 20 % for 1,500 steps. A probe is charged for no more, either."""


class ProbeBudget:
    """Seconds for probes: a share of all seconds, saved up for a few of them."""

    def __init__(self, settings: GuardSettings = GuardSettings()) -> None:
        self._settings = settings
        self._saved = 1.0
        """Probes. Short runs should not be made of them, so it begins with one."""
        self._mean_s = 0.0

    def allows(self) -> bool:
        return self._saved >= 1.0

    def observe(self, step_s: float, is_probe: bool) -> None:
        """Account for a step. A probe costs its seconds, in units of the usual step: what it loses
        is less, but to know how much takes the model that it is to test."""
        share, largest = self._settings.share, self._settings.long_step
        self._mean_s = self._mean_s or step_s
        size = min(step_s / self._mean_s, 1.0 / share) if self._mean_s > 0 else 1.0
        self._mean_s += share * (min(size, largest) - 1.0) * self._mean_s
        self._saved = min(self._saved + share * size, self._settings.most_probes)
        if is_probe:
            self._saved -= min(size, largest)


class Guard:
    """`observe` takes in a step, `allows` says whether the next may speculate.

    profile: of the machine, uncorrected. budget: shared with whoever else probes; the caller
    accounts for every step there.
    """

    def __init__(
        self, profile: CostModel, budget: ProbeBudget, settings: GuardSettings = GuardSettings()
    ) -> None:
        self._profile = profile
        self._budget = budget
        self._settings = settings
        self._cells: dict[tuple[int, int], _Cell] = {}
        self.num_switches = 0

    def allows(self, batch_size: int, context_len: float) -> bool:
        """False where speculating was found to lose time, until it is tried again."""
        cell = self._cells.get(_bucket(batch_size, context_len))
        return cell is None or cell.state is not State.OFF

    def wants_reference(self, batch_size: int, context_len: float) -> bool:
        """Whether a step that is to speculate had better not, for comparison."""
        cell = self._cells.get(_bucket(batch_size, context_len))
        if cell is not None and cell.state is State.TRIAL:
            return cell.num_unreferenced >= self._settings.reference_every - 1
        return self._budget.allows()

    def observe(self, step: MeasuredStep) -> None:
        """Learn from a step that read no prompt chunks."""
        if min(step.batch_size, step.num_generated) <= 0 or step.spent_s <= 0.0:
            return
        key = _bucket(step.batch_size, step.context_len)
        cell = self._cells.setdefault(key, _Cell(self._settings))
        was_off = cell.state is State.OFF
        none_s = self._profile.target_s(step.batch_size, step.batch_size, step.context_len)
        cell.observe(step, none_s if none_s > 0.0 else 1.0)
        self.num_switches += was_off is not (cell.state is State.OFF)

    def state(self) -> dict[str, Any]:
        """Where speculation is off for how many steps, and what steps without it brought; as JSON
        has it."""
        return {
            f"{rows} {context}": {"pause": cell.pause, "reference": cell.reference.tolist()}
            for (rows, context), cell in self._cells.items()
        }

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """kept: of the evidence, and of the pauses that are left. Raises ValueError for a state of
        another form."""
        for key, of_one in state.items():
            rows, context = map(int, key.split())
            cell = self._cells[rows, context] = _Cell(self._settings)
            cell.reference += kept * np.array(of_one["reference"]).reshape(3, 3)
            cell.pause = int(kept * of_one["pause"])
            cell.state = State.OFF if cell.pause else State.WATCH


class State(Enum):
    WATCH = "watch"
    TRIAL = "trial"
    OFF = "off"


def _nothing() -> Floats:
    return np.zeros((3, 3))


@dataclass(slots=True)
class _Cell:
    """What is known of one bucket.

    Evidence of some steps is the sum of the outer products of (1, earned, spent), which can fade.
    usual: what a step spends on average. num_unreferenced: speculating steps since one without
    drafts. clear_from: speculating steps from which a trial may be won: a loss by rare long steps
    shows in no short trial. pause: steps without speculation that are left.
    """

    settings: GuardSettings
    state: State = State.WATCH
    usual: float = 1.0
    long_share: float = 0.0
    reference: Floats = field(default_factory=_nothing)
    trial: Floats = field(default_factory=_nothing)
    trial_reference: Floats = field(default_factory=_nothing)
    windows: list[Floats] = field(init=False)
    num_unreferenced: int = 0
    next_look: int = 0
    clear_from: int = 0
    pause: int = 0

    def __post_init__(self) -> None:
        self.windows = [_nothing() for _ in self.settings.windows]

    def observe(self, step: MeasuredStep, none_s: float) -> None:
        """none_s: what the step takes without drafts by the profile."""
        shortest, memory, *_ = self.settings.windows
        spent = step.spent_s / none_s
        longest = self.settings.long_step * self.usual
        self.usual += (min(spent, longest) - self.usual) / shortest
        self.long_share += ((spent > longest) - self.long_share) / memory
        sums = np.array((1.0, step.num_generated / step.batch_size, spent))
        evidence = np.outer(sums, sums)
        self.reference *= 1.0 - 1.0 / memory
        if self.state is State.OFF:
            self.pause -= 1
            if self.pause <= 0:
                self._begin_trial(shortest)
        is_speculating = step.is_speculating
        self.num_unreferenced = self.num_unreferenced + 1 if is_speculating else 0
        if spent > longest and self.long_share < 1.0 / shortest:
            return
        if is_speculating:
            self._add_speculating(evidence)
        else:
            self.reference += evidence
            self.trial_reference += evidence

    def _add_speculating(self, evidence: Floats) -> None:
        """Windows go on filling in a trial: short ones that cry wolf must not starve the long."""
        if self.state is State.TRIAL:
            self.trial += evidence
            if self.trial[0, 0] >= self.next_look and self.trial_reference[0, 0]:
                self._look()
        if self.state is State.OFF:
            return
        for window in self.windows:
            window += evidence
        if self.state is State.WATCH and self.reference[0, 0]:
            self._watch()

    def _watch(self) -> None:
        for window, length in zip(self.windows, self.settings.windows, strict=True):
            if window[0, 0] >= length:
                mean, error = self._log_ratio(window, self.reference)
                window[:] = 0.0
                if mean + self.settings.suspect_errors * error < 0.0:
                    self._begin_trial(length)
                    return

    def _begin_trial(self, clear_from: int) -> None:
        self.state, self.num_unreferenced = State.TRIAL, 0
        self.next_look, self.clear_from = self.settings.windows[0], clear_from
        self.trial, self.trial_reference = _nothing(), _nothing()

    def _look(self) -> None:
        mean, error = self._log_ratio(self.trial, self.trial_reference)
        num_steps = self.trial[0, 0]
        self.next_look *= 2
        is_won = mean - self.settings.suspect_errors * error > 0.0 and num_steps >= self.clear_from
        if mean + self.settings.off_errors * error < 0.0:
            self._turn_off()
        elif is_won or num_steps >= self.settings.windows[-1]:
            self.state = State.WATCH

    def _turn_off(self) -> None:
        """For a pause by what the trial lost, in steps without drafts."""
        _, earned, spent = self.trial[0]
        _, earned_none, spent_none = self.trial_reference[0]
        lost = spent * earned_none / spent_none - earned
        pause = min(lost / self.settings.share, self.settings.windows[-1])
        self.state, self.pause = State.OFF, math.ceil(pause)
        for window in self.windows:
            window[:] = 0.0

    def _log_ratio(self, speculating: Floats, none: Floats) -> tuple[float, float]:
        """Log of the ratio of both rates to the bar, and its standard error; below 0 is a loss."""
        (rate, variance), (none_rate, none_variance) = map(self._rate, (speculating, none))
        return math.log(rate / none_rate / self.settings.bar), math.sqrt(variance + none_variance)

    def _rate(self, evidence: Floats) -> tuple[float, float]:
        """Earned over spent, and its relative variance: that of earned - rate * spent, which has a
        mean of 0."""
        num_steps, earned, spent = evidence[0].tolist()
        rate = earned / spent
        residual = np.array((0.0, 1.0, -rate))
        squares = max(float(residual @ evidence @ residual), 0.0) / (earned / num_steps) ** 2
        per_step = (self.settings.step_sd**2 + squares) / (1.0 + num_steps)
        return rate, per_step / num_steps


def _bucket(batch_size: int, context_len: float) -> tuple[int, int]:
    """Rows by powers of two; context by powers of four, from 256 on."""
    return batch_size.bit_length(), ((int(context_len) >> 8).bit_length() + 1) // 2
