"""May contradict the planner: is speculating faster than not speculating, by what was measured?

The planner compares plans by its own model of acceptance and cost; where that is wrong, it is wrong
about both sides. The guard knows tokens and seconds only: those of steps that speculated, and those
of steps that did not, in the same bucket of (rows, context). The profile serves as the unit, so
that steps of 8 and of 15 rows can be put together: a step *earns* the seconds that its tokens would
take without drafts by the profile, and a rate is seconds earned per second spent. Rates of both
kinds are compared, so that a profile that is off by a factor does not matter.

    watch     windows of speculating steps against a reference of k = 0 steps that ages; a suspicion
              (2 standard errors below `BAR`) begins a trial
    trial     every fourth step is one without drafts, and only what is measured now counts, on both
              sides: a machine that became slower does so for both. 3.5 standard errors below `BAR`
              after 32, 48, 72, .. sequence steps: off. 1.5 above: watch
    off       no speculation for a pause that is 100 times what the trial lost, so that trying again
              costs 1 % of the time; pauses in a row double up to 4096 steps. Then a trial

False alarms: a trial has at most 20 looks, at growing evidence. Speculation that is exactly as fast
as BAR is turned off in less than 2 % of trials. One that gains 5 % has first to be suspected, and
then to be mistaken by 3.5 standard errors from a truth that lies further away: less than 1 % of
trials, and trials are rare; from 10 % on no switch was seen in 100,000 steps. The odds hold for
steps that vary independently; where a few sequences of poor acceptance stay for long, turning off
is right for as long.

Stalls are left out, one step in 20 at most: more of them are no accident, and count. Time is
counted in steps of a bucket; nothing here reads a clock, and there are at most 55 buckets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from enum import Enum
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import MeasuredStep

BAR = 0.98
"""Least rate of speculating relative to not speculating that is let pass: the promise."""

FIRST_LOOK, LAST_LOOK = 32, 65536
"""Speculating sequence steps (a step of B rows is B) at which a trial is looked at first and,
doubling, last. With 32, drafts that are mostly rejected do not look like drafts that always are."""

LOOK_GROWTH = 1.5
"""Evidence at a look, in times of the look before."""

WINDOWS = (32, 512, 4096, 32768)
"""Speculating sequence steps of a window: the short one sees a great loss soon, the long ones a
small one."""

CLEAR_PART = 4
"""A trial is won no sooner than with a part of the evidence that raised the suspicion: a loss by
rare long steps shows in no short trial."""

MIN_STEPS = 16
"""Steps of a window or trial at least, however many rows they have."""

SUSPECT_ERRORS, OFF_ERRORS, CLEAR_ERRORS = 2.0, 3.5, 1.5
"""Standard errors from BAR at which a window is suspicious, a trial is lost, a trial is won."""

TRIAL_REFERENCE_EVERY = 4
"""In a trial, one step of so many has no drafts. Not paid from the budget: as far as is known,
speculation is no faster."""

PAUSES = (256, 32768)
"""Steps of the shortest and of the longest pause. At 30 ms a step the latter is 16 minutes; only a
loss that took thousands of steps to prove gets it."""

GROWN_PAUSE = 4096
"""Pauses that follow one another double up to here."""

TRIAL_SHARE = 0.01
"""Of the time, for what lost trials lose."""

REFERENCE_KEPT = 0.998
"""Kept of a reference at each step of its bucket: half of it is 350 steps old."""

MIN_REFERENCE = 3.0
"""Steps of reference, faded, below which more are wanted. With a probe every 100 steps there
are about 5."""

STEP_SD = 0.1
"""Assumed relative deviation of one step, worth PRIOR_STEPS steps beside the deviation measured."""

PRIOR_STEPS = 4.0

BUCKET_SD = 0.05
"""Added uncertainty of a reference for each bucket that it was taken away."""

PROFILE_SD = 0.2
"""Uncertainty of the profile where no step without drafts was seen at all."""

STALL = 3.0
"""Times the median of NUM_PENDING steps of its kind from which a step is a stall."""

NUM_PENDING = 5
"""Steps of a kind that are compared for stalls; two of them may be stalls."""

STALL_SHARE, SAVED_STALLS = 0.05, 5.0
"""Steps that may be left out as stalls: their share, and how many of them may come at once."""

PROBE_SHARE = 0.01
"""Of the time, for steps that are run for what they teach."""

SAVED_PROBES = 5.0
"""Probes that a budget may save up."""

LARGEST_PROBE = 2.0
"""Usual steps that a probe is charged for at most: what one takes beyond that, the machine stood
still. Charged in full, a stall left nothing for probes for 500 steps, and taught nothing."""

FIRST_PROBES = 1.0
"""Probes that it has at the start: short runs should not be made of them."""

LEAST_S = 1e-9
"""Of a pass by the profile, which may say that it takes no time at all."""

ROW_BUCKETS = 11
CONTEXT_EDGES = (256.0, 1024.0, 4096.0, 16384.0)


class ProbeBudget:
    """Seconds for probes: a share of all seconds, saved up for a few of them."""

    def __init__(self, share: float = PROBE_SHARE) -> None:
        self._share = share
        self._saved_probes = FIRST_PROBES
        self._mean_s = 0.0

    def allows(self) -> bool:
        return self._saved_probes >= 1.0

    def observe(self, step_s: float, is_probe: bool) -> None:
        """Account for a step. A probe costs all its seconds up to LARGEST_PROBE, in units of the
        usual step: what it loses is less, but to know how much takes the model that it is to test.
        """
        if self._mean_s == 0.0:
            self._mean_s = step_s
        size = min(step_s / self._mean_s, 1.0 / self._share) if self._mean_s > 0 else 1.0
        self._mean_s += self._share * (min(size, 2.0) - 1.0) * self._mean_s
        self._saved_probes = min(self._saved_probes + self._share * size, SAVED_PROBES)
        if is_probe:
            self._saved_probes -= min(size, LARGEST_PROBE)


class Guard:
    """`observe` takes in a step, `allows` says whether the next may speculate.

    profile: of the machine, uncorrected. budget: shared with whoever else probes; the caller
    accounts for every step there.
    """

    def __init__(self, profile: CostModel, budget: ProbeBudget) -> None:
        self._profile = profile
        self._budget = budget
        self._cells: dict[tuple[int, int], _Cell] = {}
        self.num_switches = 0

    def allows(self, num_rows: int, context_len: float) -> bool:
        """False where speculating was found to lose time, until it is tried again."""
        cell = self._cells.get(_bucket(num_rows, context_len))
        return cell is None or cell.state is not State.OFF

    def wants_reference(self, num_rows: int, context_len: float) -> bool:
        """Whether a step that is to speculate had better not, for comparison."""
        cell = self._cells.get(_bucket(num_rows, context_len))
        if cell is None:
            return self._budget.allows()
        if cell.state is State.TRIAL:
            return cell.num_unreferenced >= TRIAL_REFERENCE_EVERY - 1
        return cell.reference.num_steps < MIN_REFERENCE and self._budget.allows()

    def observe(self, step: MeasuredStep) -> None:
        """Learn from a step that read no prompt chunks."""
        if step.num_rows <= 0 or step.spent_s <= 0.0:
            return
        key = _bucket(step.num_rows, step.context_len)
        cell = self._cells.setdefault(key, _Cell())
        was_off = cell.state is State.OFF
        none_s = self._profile.target_s(step.num_rows, step.num_rows, step.context_len)
        cell.observe(step, max(none_s, LEAST_S) * step.num_generated / step.num_rows)
        if cell.state is State.WATCH:
            self._watch(key, cell)
        self.num_switches += was_off is not (cell.state is State.OFF)

    def state(self) -> dict[str, Any]:
        """Where speculation is off, and what steps without it brought; as JSON has it."""
        return {
            f"{rows} {context}": {
                "is_off": cell.state is State.OFF,
                "pause": [cell.pause, cell.num_paused],
                "reference": astuple(cell.reference),
            }
            for (rows, context), cell in self._cells.items()
        }

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """kept: of the evidence, and of the pauses that are left."""
        for key, of_one in state.items():
            rows, context = map(int, key.split())
            pause, num_paused = of_one["pause"]
            cell = self._cells[rows, context] = _Cell(reference=_Rate(*of_one["reference"]))
            cell.reference.fade(kept)
            cell.pause = int(pause)
            if of_one["is_off"]:
                cell.state, cell.num_paused = State.OFF, pause - int(kept * (pause - num_paused))

    def _watch(self, key: tuple[int, int], cell: _Cell) -> None:
        for window, length in zip(cell.windows, WINDOWS, strict=True):
            if window.has(length):
                reference, extra_sd = self._reference(key)
                mean, error = _log_ratio(window, reference, extra_sd)
                window.clear()
                if mean + SUSPECT_ERRORS * error < 0.0:
                    cell.begin_trial(length // CLEAR_PART)
                    return

    def _reference(self, key: tuple[int, int]) -> tuple[_Rate, float]:
        """The nearest bucket's, if any has enough, and what its distance adds to the deviation."""
        near = [
            (abs(rows - key[0]) + abs(context - key[1]), cell.reference)
            for (rows, context), cell in self._cells.items()
            if cell.reference.num_steps >= 1.0
        ]
        if not near:
            return PROFILE_RATE, PROFILE_SD
        distance, rate = min(near, key=lambda found: found[0])
        return rate, BUCKET_SD * distance


class State(Enum):
    WATCH = "watch"
    TRIAL = "trial"
    OFF = "off"


@dataclass(slots=True)
class _Rate:
    """Seconds earned per second spent over some steps, by sums that can fade."""

    num_steps: float = 0.0
    num_rows: float = 0.0
    earned_s: float = 0.0
    spent_s: float = 0.0
    earned_sq: float = 0.0
    product: float = 0.0
    spent_sq: float = 0.0

    @property
    def value(self) -> float:
        return self.earned_s / self.spent_s

    @property
    def relative_variance(self) -> float:
        """Of `value`, a ratio of sums: that of earned - value * spent, which has no mean."""
        value = self.value
        squares = self.earned_sq - 2 * value * self.product + value**2 * self.spent_sq
        mean_sq = (value * self.spent_s / self.num_steps) ** 2
        per_step = (PRIOR_STEPS * STEP_SD**2 + max(0.0, squares) / mean_sq) / (
            PRIOR_STEPS + self.num_steps
        )
        return per_step / self.num_steps

    def add(self, step: MeasuredStep, earned_s: float) -> None:
        """earned_s: what its tokens take without drafts by the profile."""
        spent_s = step.spent_s
        self.num_steps += 1.0
        self.num_rows += step.num_rows
        self.earned_s += earned_s
        self.spent_s += spent_s
        self.earned_sq += earned_s**2
        self.product += earned_s * spent_s
        self.spent_sq += spent_s**2

    def fade(self, kept: float) -> None:
        self.num_steps *= kept
        self.num_rows *= kept
        self.earned_s *= kept
        self.spent_s *= kept
        self.earned_sq *= kept
        self.product *= kept
        self.spent_sq *= kept

    def clear(self) -> None:
        self.fade(0.0)

    def has(self, num_rows: float) -> bool:
        """Whether that many sequence steps, and enough steps, were added."""
        return self.num_rows >= num_rows and self.num_steps >= MIN_STEPS


PROFILE_RATE = _Rate(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9)
"""As the profile has it, known without error; PROFILE_SD is added to it."""


def _log_ratio(speculating: _Rate, none: _Rate, extra_sd: float = 0.0) -> tuple[float, float]:
    """Log of the ratio of both rates to BAR, and its standard error; below 0 is a loss."""
    if speculating.earned_s <= 0.0:
        return -math.inf, 0.0
    variance = speculating.relative_variance + none.relative_variance + extra_sd**2
    return math.log(speculating.value / none.value / BAR), math.sqrt(variance)


class _StallFilter:
    """Passes steps on four later, when it is known whether they were far off their neighbours."""

    def __init__(self) -> None:
        self._pending: deque[tuple[MeasuredStep, float]] = deque()
        self._allowance = SAVED_STALLS

    def put(self, step: MeasuredStep, earned_s: float) -> tuple[MeasuredStep, float] | None:
        """The oldest step that is pending, unless it was a stall. Catching up takes long without
        being one."""
        self._pending.append((step, earned_s))
        if len(self._pending) < NUM_PENDING:
            return None
        self._allowance = min(self._allowance + STALL_SHARE, SAVED_STALLS)
        median_s = sorted(pending.spent_s for pending, _ in self._pending)[NUM_PENDING // 2]
        oldest, earned_s = self._pending.popleft()
        is_stall = not oldest.num_catch_up_tokens and oldest.spent_s > STALL * median_s
        if is_stall and self._allowance >= 1.0:
            self._allowance -= 1.0
            return None
        return oldest, earned_s


@dataclass(slots=True)
class _Cell:
    """What is known of one bucket.

    num_unreferenced: speculating steps since one without drafts. clear_from: sequence steps from
    which a trial may be won. num_paused: steps since the last
    trial was lost, of `pause`.
    """

    state: State = State.WATCH
    reference: _Rate = field(default_factory=_Rate)
    windows: tuple[_Rate, ...] = field(default_factory=lambda: tuple(_Rate() for _ in WINDOWS))
    trial: _Rate = field(default_factory=_Rate)
    trial_reference: _Rate = field(default_factory=_Rate)
    filters: tuple[_StallFilter, _StallFilter] = field(
        default_factory=lambda: (_StallFilter(), _StallFilter())
    )
    num_unreferenced: int = 0
    next_look: float = FIRST_LOOK
    clear_from: int = FIRST_LOOK
    pause: int = 0
    num_paused: int = 0

    def observe(self, step: MeasuredStep, earned_s: float) -> None:
        is_speculating = step.is_speculating
        self.reference.fade(REFERENCE_KEPT)
        self.num_unreferenced = self.num_unreferenced + 1 if is_speculating else 0
        if self.state is State.OFF:
            self._count_pause()
        kept = self.filters[is_speculating].put(step, earned_s)
        if kept is None:
            return
        if is_speculating:
            self._add_speculating(*kept)
        else:
            self.reference.add(*kept)
            if self.state is State.TRIAL:
                self.trial_reference.add(*kept)

    def begin_trial(self, clear_from: int = FIRST_LOOK) -> None:
        """Windows go on filling: short ones that cry wolf must not starve the long ones."""
        self.state, self.next_look, self.num_unreferenced = State.TRIAL, FIRST_LOOK, 0
        self.clear_from = clear_from
        self.filters = _StallFilter(), _StallFilter()
        self.trial.clear()
        self.trial_reference.clear()

    def _count_pause(self) -> None:
        self.num_paused += 1
        if self.num_paused >= self.pause:
            self.begin_trial()

    def _add_speculating(self, step: MeasuredStep, earned_s: float) -> None:
        if self.state is not State.OFF:
            for window in self.windows:
                window.add(step, earned_s)
        if self.state is State.TRIAL:
            self.trial.add(step, earned_s)
            if self.trial.has(self.next_look) and self.trial_reference.num_steps > 0:
                self._look()

    def _look(self) -> None:
        mean, error = _log_ratio(self.trial, self.trial_reference)
        is_last = self.next_look >= LAST_LOOK
        while self.trial.has(self.next_look):
            self.next_look *= LOOK_GROWTH
        if mean + OFF_ERRORS * error < 0.0:
            self._turn_off()
        elif is_last or (mean - CLEAR_ERRORS * error > 0.0 and self.trial.has(self.clear_from)):
            self.state, self.pause = State.WATCH, self.pause // 2

    def _turn_off(self) -> None:
        none = self.trial_reference
        lost_s = self.trial.spent_s - self.trial.earned_s / none.value
        num_lost = lost_s / (none.spent_s / none.num_steps)
        pause = max(min(2 * self.pause, GROWN_PAUSE), math.ceil(num_lost / TRIAL_SHARE))
        self.pause = min(max(pause, PAUSES[0]), PAUSES[1])
        self.state, self.num_paused = State.OFF, 0
        for window in self.windows:
            window.clear()


def _bucket(num_rows: int, context_len: float) -> tuple[int, int]:
    """Rows by powers of two, context by powers of four."""
    context = sum(context_len >= edge for edge in CONTEXT_EDGES)
    return min(num_rows.bit_length() - 1, ROW_BUCKETS - 1), context
