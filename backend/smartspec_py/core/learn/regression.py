"""Recursive ridge regression with forgetting, updated after every step.

The values minimise, within bounds,

    sum over observations of  weight * forgetting^age * (error / scale)^2
    + sum over values of  noise^2 * log(1 + ((value - prior) / sd)^2)

The evidence is stored in information form, without the ridge. The evidence decays and the ridge
does not. So a value without new evidence returns to its prior, and the matrix to solve is never
singular. The ridge has the form of a Cauchy distribution. It resists a change of
one sd. It hardly resists a change of ten sds, because such a change contradicts the prior.

Outliers have almost no effect: an error far from the median of the last few gets a small weight. If
a change lasts, the median moves to it. Older evidence then decays fast until the values fit. A
measurement that the prior predicts is no outlier, even if the values do not predict it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RegressionSettings:
    noise: float = 0.05
    """Relative standard deviation of the duration of a pass. It sets the weight of a step relative
    to the ridge. It is also the unit of errors, unless the measured deviation is larger."""

    forgetting: float = 0.99
    """Decay factor of the evidence per step. The evidence covers about 100 steps, which is the
    usual distance between probes."""

    recent: int = 5
    """Number of recent errors in the median, which tolerates two outliers. After a change, evidence
    covers this many steps, and older evidence is gone after a dozen steps. Without a change, the
    values are solved only once in this many steps. A single step changes evidence of 100 steps by
    less than its noise."""

    change: float = 2.0
    """Size of the median of recent errors that counts as a change, in standard deviations of one
    error. The median itself deviates by about 0.5 of them, so noise exceeds the limit once in
    10,000 steps."""

    far: float = 0.25
    """Relative distance of an error from the median beyond which the weight of a step decreases
    with the fourth power. It is 5 standard deviations. Outliers have almost no weight, but a probe
    that differs by a third from other steps still has some. A measurement this close to the prior's
    prediction has its full weight. Otherwise, if short drafts cost less than in the profile, long
    drafts would seem cheap again and again."""


class RidgeRegression:
    """Fits `values` in measured = sum of features * values."""

    def __init__(
        self,
        prior: Sequence[float],
        sds: Sequence[float],
        low: Sequence[float],
        high: float,
        settings: RegressionSettings = RegressionSettings(),
    ) -> None:
        """prior, sds, low: prior, its standard deviation and lower bound of each value. high: upper
        bound of all values."""
        self._settings = settings
        self._prior = np.array(prior, dtype=np.float64)
        self._low, self._high = np.array(low, dtype=np.float64), high
        self._sds = np.array(sds, dtype=np.float64)
        self._evidence = np.zeros((len(prior), len(prior)))
        self._pull = np.zeros_like(self._prior)
        self._recent = deque([0.0] * settings.recent, maxlen=settings.recent)
        self._median = 0.0
        self._variance = settings.noise**2
        self._num_steps = 0
        self.values = self._prior

    def predict(self, features: Floats) -> float:
        return float(features @ self.values)

    def observe(self, features: Floats, measured: float, scale: float) -> None:
        """Learn from one measurement. scale: the error is divided by it; same unit as measured."""
        # Predictions can be 0 or negative for a pass that takes time: with a profile from a noisy
        # machine, or after passes with a duration of 0. So scale has a lower bound.
        prior = float(features @ self._prior)
        scale = max(scale, measured / self._high, prior / self._high) or 1.0
        x = features / scale
        predicted = self.predict(x)
        settings = self._settings
        error = measured / scale - predicted
        is_surprise = abs(error) > settings.far and abs(measured - prior) < settings.far * measured
        tamed, weight = self._tamed(error)
        if is_surprise:
            tamed, weight = error, 1.0
        self._forget(1 - 1 / settings.recent if self._has_changed else settings.forgetting)
        weighted = weight * x
        self._pull += weighted * (predicted + tamed - prior / scale)
        self._evidence += weighted[:, None] * x
        is_new = self._num_steps < settings.recent
        self._solve_in_turn(is_new or is_surprise or self._has_changed)

    def fade(self) -> None:
        """Let the evidence decay at a step without a measurement."""
        if self.values is not self._prior:
            self._forget(self._settings.forgetting)
            self._solve_in_turn()

    def state(self) -> dict[str, Any]:
        """The evidence, as JSON values."""
        return {"evidence": self._evidence.tolist(), "pull": self._pull.tolist()}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Start from a saved `state`. kept: factor for its evidence. Raises ValueError if the state
        has another shape or values that are not finite."""
        evidence, pull = np.array(state["evidence"]), np.array(state["pull"])
        if evidence.shape != self._evidence.shape or not np.isfinite(evidence).all():
            raise ValueError(
                f"evidence must be finite, of shape {self._evidence.shape}, not {evidence.shape}"
            )
        self._evidence, self._pull = kept * evidence, kept * pull
        self.values = self._solution()

    def _solve_in_turn(self, is_due: bool = False) -> None:
        """Solve for the values if it is due, else every `recent` steps. Solving takes most of the
        time."""
        self._num_steps += 1
        if is_due or self._num_steps % self._settings.recent == 0:
            self.values = self._solution()

    @property
    def _has_changed(self) -> bool:
        sd = max(self._settings.noise, math.sqrt(self._variance))
        return abs(self._median) > self._settings.change * sd

    def _tamed(self, error: float) -> tuple[float, float]:
        """The error, limited to `far` from the median, and its weight."""
        self._recent.append(error)
        self._median = sorted(self._recent)[len(self._recent) // 2]
        beside = error - self._median
        far = self._settings.far
        near = min(max(beside, -far), far)
        self._variance += (1 - self._settings.forgetting) * (near**2 - self._variance)
        weight = 1.0 if near == beside else (far / beside) ** 4
        return self._median + near, weight

    def _forget(self, kept: float) -> None:
        self._pull *= kept
        self._evidence *= kept

    def _matrix(self) -> Floats:
        """Evidence plus ridge. The Cauchy ridge is evaluated at the last values."""
        far = (self.values - self._prior) / self._sds
        ridge = (self._settings.noise / self._sds) ** 2 / (1.0 + far * far)
        matrix = self._evidence.copy()
        matrix.flat[:: len(ridge) + 1] += ridge
        return matrix

    def _solution(self) -> Floats:
        """The minimising values. Values outside their bounds are set to the bounds,
        and the others are solved again."""
        matrix = self._matrix()
        found = self._prior + np.linalg.solve(matrix, self._pull)
        is_free = np.ones(len(found), dtype=bool)
        while True:
            kept = np.minimum(np.maximum(found, self._low), self._high)
            is_outside = (kept != found) & is_free
            if not is_outside.any():
                return kept
            is_free &= ~is_outside
            moved = np.where(is_free, 0.0, kept - self._prior)
            free = matrix[is_free]
            found = kept
            found[is_free] = self._prior[is_free] + np.linalg.solve(
                free[:, is_free], self._pull[is_free] - free @ moved
            )
