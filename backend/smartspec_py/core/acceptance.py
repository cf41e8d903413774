"""Estimates of the probability that a draft is accepted, per request with a shared prior.

The estimate of a request is (w * m + accepted) / (w + trials), where m is the mean of all requests
and w the weight of that prior. Counts are forgotten by a constant factor at every step, also at
steps without speculation: evidence that is not renewed fades, a request that was switched off
drifts back to the shared mean, and the shared mean drifts back to `INITIAL_MEAN`. So "off" is never
for good. Time is counted in steps; nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from smartspec_py.core.goodput import accept_trials

INITIAL_MEAN = 0.7
"""Assumed before anything was seen: published draft models range over 0.5 to 0.9."""

PRIOR_TRIALS = 4.0
"""Weight of the shared mean in a request's own estimate, in trials."""

INITIAL_TRIALS = 8.0
"""Weight of INITIAL_MEAN in the shared mean, in trials."""

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
    """Keeps one estimate for each live sequence. `observe` writes, `accept_prob` reads."""

    def __init__(self) -> None:
        self._shared = _Counts()
        self._requests: dict[int, _Counts] = {}

    @property
    def shared_mean(self) -> float:
        return self._shared.mean_with(INITIAL_MEAN, INITIAL_TRIALS)

    def accept_prob(self, sequence: int) -> float:
        """Conditional acceptance probability of the sequence, in (0, 1)."""
        counts = self._requests.get(sequence)
        if counts is None:
            return self.shared_mean
        return counts.mean_with(self.shared_mean, PRIOR_TRIALS)

    def observe(self, sequence: int, num_drafted: int, num_accepted: int) -> None:
        """Take in one decoding step of the sequence; both counts are 0 where none was drafted."""
        counts = self._requests.setdefault(sequence, _Counts())
        trials = accept_trials(num_drafted, num_accepted)
        counts.fade(REQUEST_FORGETTING)
        counts.add(num_accepted, trials)
        self._shared.fade(SHARED_FORGETTING)
        self._shared.add(num_accepted, trials)

    def release(self, sequence: int) -> None:
        self._requests.pop(sequence, None)
