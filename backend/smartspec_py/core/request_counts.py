"""What every live request has shown of its drafts, and whether its text has changed.

Counts are forgotten at every step. Where the text changes, waiting for them to fade takes too long:
two CUSUM tests (Page, 1954) watch for odds three times lower and three times higher, and on alarm
the request begins anew with what it showed since the change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CHANGED_PRIOR_TRIALS = 8.0
"""Largest weight of its kind in a request whose text has changed: it has shown that it is not like
its kind."""

REQUEST_FORGETTING = 0.98
"""Kept of a request's counts at each of its steps: half of the evidence is 34 steps old."""

REQUEST_IDLE_FORGETTING = 0.99
"""The same at a step in which it drafted nothing, and nothing contradicts what is known of it."""

CHANGE_ODDS = 3.0
"""The change that the tests look for: odds so many times as high, or as low."""

LOG_CHANGE = math.log(CHANGE_ODDS)

ALARM = 5.0
"""Log-likelihood ratio at which a change is believed: simulated, one false alarm in about 1,000
steps of 4 drafts; 0.8 -> 0.5 is seen after 12 steps (median), 0.3 -> 0.8 after 9."""


class RequestCounts:
    """What is counted of each live sequence: a row of an array that grows to the most at once.

    Columns: accepted, trials, and the weight of the kind in trials; then of each of the two CUSUM
    tests, for worse and for better, the statistic, and what was accepted and tried since it last
    was 0. A sequence begins with its first step.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._state = np.zeros((0, 9))

    @property
    def sequences(self) -> set[int]:
        return set(self._rows)

    def rates(self, sequences: Sequence[int], means: Floats) -> Floats:
        """Acceptance of each of n; means: of their kinds, [n] or [1], which those not begun are
        given."""
        rows = [self._rows.get(sequence, -1) for sequence in sequences]
        if not len(self._state):
            return np.broadcast_to(means, len(rows))
        found = _rates(self._state[rows], means)
        if -1 in rows:
            found = np.where(np.array(rows) < 0, means, found)
        return found

    def observe(
        self,
        sequences: Sequence[int],
        accepted: Ints,
        trials: Ints,
        means: Floats,
        prior_trials: Floats,
    ) -> None:
        """means: of their kinds, before this step. prior_trials: what these weigh for those that
        begin with this step. Both [n] or [1]."""
        rows = self._rows_of(sequences, prior_trials)
        state = self._state[rows]
        if trials.any():
            _test(state, _rates(state, means), accepted, trials)
        state[:, :2] *= np.where(trials > 0, REQUEST_FORGETTING, REQUEST_IDLE_FORGETTING)[:, None]
        state[:, 0] += accepted
        state[:, 1] += trials
        statistics = state[:, 3::3]
        if statistics.max() > ALARM:
            for index in np.flatnonzero(statistics.max(axis=1) > ALARM):
                _begin_anew(state[index])
        self._state[rows] = state

    def release(self, sequence: int) -> tuple[float, float]:
        """Drafts that it accepted and tried, as far as they are not forgotten."""
        row = self._rows.pop(sequence, None)
        if row is None:
            return 0.0, 0.0
        self._free.append(row)
        return float(self._state[row, 0]), float(self._state[row, 1])

    def _rows_of(self, sequences: Sequence[int], prior_trials: Floats) -> list[int]:
        """Of each, given to it now where it has none."""
        for index, sequence in enumerate(sequences):
            if sequence not in self._rows:
                if not self._free:
                    self._grow()
                row = self._rows[sequence] = self._free.pop()
                self._state[row] = 0.0
                self._state[row, 2] = prior_trials[index if len(prior_trials) > 1 else 0]
        return [self._rows[sequence] for sequence in sequences]

    def _grow(self) -> None:
        size = len(self._state)
        more = max(32, size)
        self._state = np.concatenate([self._state, np.zeros((more, 9))])
        self._free.extend(range(size, size + more))


def _rates(state: Floats, means: Floats) -> Floats:
    """state: as in `_Requests`, [n, 9]. means: of their kinds, [n] or [1]."""
    weights = state[:, 2]
    found: Floats = (weights * means + state[:, 0]) / (weights + state[:, 1])
    return found


def _test(state: Floats, rates: Floats, accepted: Ints, trials: Ints) -> None:
    """A step of the CUSUM tests, in place; rates: estimated before it.

    With odds c times as high, an acceptance is c / (1 + (c - 1) rate) times as likely and a
    rejection 1 / (1 + (c - 1) rate) times; likewise, from the other side, with odds c times as low.
    """
    grown = (CHANGE_ODDS - 1) * rates
    state[:, 3] += (trials - accepted) * LOG_CHANGE - trials * np.log(CHANGE_ODDS - grown)
    state[:, 6] += accepted * LOG_CHANGE - trials * np.log(1 + grown)
    tests = state[:, 3:].reshape(-1, 2, 3)
    tests[:, :, 1] += accepted[:, None]
    tests[:, :, 2] += trials[:, None]
    tests *= tests[:, :, :1] > 0
    state[:, 3:] = tests.reshape(-1, 6)


def _begin_anew(row: Floats) -> None:
    """Of one sequence, in place: count what it showed since the change, and nothing else."""
    since = row[4:6] if row[3] > ALARM else row[7:9]
    row[:2], row[2] = since.copy(), min(row[2], CHANGED_PRIOR_TRIALS)
    row[3:] = 0.0
