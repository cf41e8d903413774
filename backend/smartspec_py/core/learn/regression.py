"""Recursive ridge regression with forgetting, updated after every step.

The values minimise

    sum over observations of  FORGETTING^age * (error / scale)^2
    + sum over values of  (NOISE * (value - prior) / sd)^2

The evidence is stored in information form, without the ridge. The evidence decays and the ridge
does not. So a value without new evidence returns to its prior, and the matrix to solve is never
singular.

Errors are limited to a distance from the median of the last few, so a single outlier moves little.
If a change lasts, the median moves to it. Older evidence then decays fast until the values fit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

Matrix = list[list[float]]

NOISE = 0.05
"""Relative standard deviation of the duration of a pass. It sets the weight of a step relative to
the ridge. It is also the unit of errors, unless the measured deviation is larger."""

FORGETTING = 0.99
"""Decay factor of the evidence per step. The evidence covers about 100 steps, which is the usual
distance between probes."""

RECENT = 5
"""Number of recent errors in the median, which tolerates two outliers. After a change, evidence
covers this many steps. Without a change, the values are solved only once in this many steps,
because a single step changes evidence of 100 steps by less than its noise."""

CHANGE = 2.0
"""Size of the median of recent errors that counts as a change, in standard deviations of one error.
The median itself deviates by about 0.5 of them, so noise exceeds the limit once in 10,000 steps."""

FAR = 0.25
"""Largest relative distance of an error from the median: 5 standard deviations."""

LARGEST = 10.0
"""Errors are relative to at least a tenth of the measured value, and of that expected by the prior.
Predictions can be 0 or negative for a pass that takes time: with a profile from a noisy machine, or
after passes with a duration of 0."""


class RidgeRegression:
    """Fits `values` in measured = sum of features * values, for one or two values.

    It runs in every step, and Python's floats are four times as fast as such small arrays.
    """

    def __init__(self, prior: Sequence[float], sds: Sequence[float]) -> None:
        """prior, sds: prior of each value, and its standard deviation."""
        self._prior = tuple(prior)
        self._ridge = [(NOISE / sd) ** 2 for sd in sds]
        self._evidence: Matrix = [[0.0] * len(prior) for _ in prior]
        self._pull = [0.0] * len(prior)
        self._recent = deque([0.0] * RECENT, maxlen=RECENT)
        self._variance = NOISE**2
        self._num_steps = 0
        self.values: Sequence[float] = self._prior

    def predict(self, features: Sequence[float]) -> float:
        return _product(features, self.values)

    def observe(self, features: Sequence[float], measured: float, scale: float) -> None:
        """Learn from one measurement. scale: the error is divided by it; same unit as measured."""
        prior = _product(features, self._prior)
        scale = max(scale, measured / LARGEST, prior / LARGEST) or 1.0
        x = [feature / scale for feature in features]
        predicted = self.predict(x)
        error, is_change = self._limited(measured / scale - predicted)
        self._forget(1 - 1 / RECENT if is_change else FORGETTING)
        pull = predicted + error - prior / scale
        for i, xi in enumerate(x):
            self._pull[i] += xi * pull
            for j, xj in enumerate(x):
                self._evidence[i][j] += xi * xj
        self._solve(is_due=is_change or self._num_steps < RECENT)

    def fade(self) -> None:
        """Let the evidence decay at a step without a measurement."""
        if self.values is not self._prior:
            self._forget(FORGETTING)
            self._solve()

    def state(self) -> dict[str, Any]:
        """The evidence, as JSON values."""
        return {"evidence": [[*row] for row in self._evidence], "pull": [*self._pull]}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Start from a saved `state`. kept: factor for its evidence. Raises ValueError if the state
        has another shape or values that are not finite."""
        rows, num = state["evidence"], len(self._prior)
        if [len(row) for row in (*rows, state["pull"])] != [num] * (num + 1):
            raise ValueError(f"evidence must be of shape {num, num}, not {rows}")
        if not all(math.isfinite(value) for row in (*rows, state["pull"]) for value in row):
            raise ValueError(f"evidence must be finite, not {rows}")
        self._evidence = [[kept * value for value in row] for row in rows]
        self._pull = [kept * value for value in state["pull"]]
        self._solve(is_due=True)

    def _limited(self, error: float) -> tuple[float, bool]:
        """The error, limited to FAR from the median, and whether recent errors show a change."""
        self._recent.append(error)
        median = sorted(self._recent)[RECENT // 2]
        beside = min(max(error - median, -FAR), FAR)
        self._variance += (1 - FORGETTING) * (beside**2 - self._variance)
        return median + beside, abs(median) > CHANGE * max(NOISE, math.sqrt(self._variance))

    def _forget(self, kept: float) -> None:
        self._pull = [kept * value for value in self._pull]
        self._evidence = [[kept * value for value in row] for row in self._evidence]

    def _solve(self, *, is_due: bool = False) -> None:
        """Solve for the values if it is due, else every RECENT steps."""
        self._num_steps += 1
        if is_due or self._num_steps % RECENT == 0:
            changes = _solution(self._evidence, self._ridge, self._pull)
            self.values = [old + new for old, new in zip(self._prior, changes, strict=True)]


def _product(features: Sequence[float], values: Sequence[float]) -> float:
    return sum([feature * value for feature, value in zip(features, values, strict=True)])


def _solution(evidence: Matrix, ridge: Sequence[float], pull: Sequence[float]) -> list[float]:
    """x in (evidence + ridge) x = pull, of one or two values; the ridge is on the diagonal."""
    if len(pull) == 1:
        return [pull[0] / (evidence[0][0] + ridge[0])]
    (a, b), (_, d) = evidence
    a, d = a + ridge[0], d + ridge[1]
    determinant = a * d - b * b
    return [(d * pull[0] - b * pull[1]) / determinant, (a * pull[1] - b * pull[0]) / determinant]
