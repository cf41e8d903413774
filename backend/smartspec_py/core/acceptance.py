"""Estimates of the probability that a draft is accepted, per request with a shared prior.

How good a request drafts is one number, r = (w * m + accepted) / (w + trials), where m is the mean
of all requests and w the weight of that prior. How acceptance changes with the position is learned
from all requests together, a_j, likewise shrunk to m: a draft that was right so far is more likely
to be right again than the first one, so that one rate for all positions underrates deep drafts. The
estimate for position j of a request is a_j with its log-odds shifted by those of r against the
mean of a_j over the drafts that were tried.

Counts are forgotten by a constant factor at every step, also at steps without speculation: evidence
that is not renewed fades, a request that was switched off drifts back to the shared mean, and that
drifts back to `INITIAL_MEAN`. So "off" is never for good. Time is counted in steps; nothing here
reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.goodput import accept_trials

INITIAL_MEAN = 0.7
"""Assumed before anything was seen: published draft models range over 0.5 to 0.9."""

PRIOR_TRIALS = 32.0
"""Weight of the shared mean in a request's own estimate, in trials. Requests of one kind differ
less than a dozen steps of one of them do: at 4 trials the plan followed that noise, and lost 2 to 4
% of goodput on the shipped pair (docs/log.md)."""

INITIAL_TRIALS = 8.0
"""Weight of INITIAL_MEAN in the shared mean, in trials."""

POSITION_TRIALS = 16.0
"""Weight of the shared mean in the rate of a position, in trials."""

MAX_POSITIONS = 64
"""Positions that are told apart; no engine drafts deeper."""

MIN_PROB = 1e-6
"""Estimates stay this far from 0 and 1, so that their log-odds are finite."""

REQUEST_FORGETTING = 0.98
"""Kept of a request's counts at each of its steps: half of the evidence is 34 steps old."""

SHARED_FORGETTING = 0.999
"""Kept of the shared counts for each step of a request: half is 693 request steps old."""


@dataclass(slots=True)
class _Counts:
    accepted: float = 0.0
    trials: float = 0.0

    def fade(self, kept: float) -> None:
        self.accepted *= kept
        self.trials *= kept

    def add(self, accepted: int, trials: int) -> None:
        self.accepted += accepted
        self.trials += trials

    def mean_with(self, prior_mean: float, prior_trials: float) -> float:
        return (prior_trials * prior_mean + self.accepted) / (prior_trials + self.trials)


class AcceptanceTracker:
    """Keeps one estimate for each live sequence. `observe` writes, `accept_probs` reads."""

    def __init__(self) -> None:
        self._shared = _Counts()
        self._requests: dict[int, _Counts] = {}
        # Accepted and trials by position, shape [2, MAX_POSITIONS].
        self._by_position = np.zeros((2, MAX_POSITIONS))
        self._profile: tuple[NDArray[np.float64], float] | None = None

    @property
    def shared_mean(self) -> float:
        return self._shared.mean_with(INITIAL_MEAN, INITIAL_TRIALS)

    @property
    def sequences(self) -> set[int]:
        """Those of which an estimate of their own is kept."""
        return set(self._requests)

    def accept_prob(self, sequence: int) -> float:
        """Conditional acceptance probability of the sequence over all positions, in (0, 1)."""
        counts = self._requests.get(sequence)
        if counts is None:
            return self.shared_mean
        return counts.mean_with(self.shared_mean, PRIOR_TRIALS)

    def accept_probs(self, sequence: int, num_positions: int) -> tuple[float, ...]:
        """The same for each of the first positions of a step."""
        if self._profile is None:
            self._profile = self._shared_profile()
        odds_by_position, typical = self._profile
        shift = _log_odds(self.accept_prob(sequence)) - _log_odds(typical)
        odds: NDArray[np.float64] = odds_by_position[:num_positions] * math.exp(shift)
        return tuple((odds / (1 + odds)).tolist())

    def _shared_profile(self) -> tuple[NDArray[np.float64], float]:
        """Odds of acceptance by position, and the mean rate that they amount to: a request that is
        like all others is given them as they are. The same for every request of a step."""
        mean = self.shared_mean
        accepted, trials = self._by_position
        rates = (POSITION_TRIALS * mean + accepted) / (POSITION_TRIALS + trials)
        num_trials = float(trials.sum())
        typical = float(rates @ trials) / num_trials if num_trials > 0 else mean
        rates = np.clip(rates, MIN_PROB, 1 - MIN_PROB)
        return rates / (1 - rates), typical

    def observe(self, sequence: int, num_drafted: int, num_accepted: int) -> None:
        """Take in one decoding step of the sequence; both counts are 0 where none was drafted."""
        counts = self._requests.setdefault(sequence, _Counts())
        trials = accept_trials(num_drafted, num_accepted)
        counts.fade(REQUEST_FORGETTING)
        counts.add(num_accepted, trials)
        self._shared.fade(SHARED_FORGETTING)
        self._shared.add(num_accepted, trials)
        self._profile = None
        self._by_position *= SHARED_FORGETTING
        self._by_position[0, :num_accepted] += 1.0
        self._by_position[1, :trials] += 1.0

    def release(self, sequence: int) -> None:
        self._requests.pop(sequence, None)


def _log_odds(prob: float) -> float:
    prob = min(max(prob, MIN_PROB), 1 - MIN_PROB)
    return math.log(prob / (1 - prob))
