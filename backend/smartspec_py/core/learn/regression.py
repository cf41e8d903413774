"""Recursive ridge regression with forgetting, for what is learned from one step after another.

The values minimise, within bounds,

    sum over observations of  weight * forgetting^age * (error / scale)^2
    + sum over values of  noise^2 * log(1 + ((value - prior) / sd)^2)

In information form: the ridge stands beside the evidence and outlasts it, so that evidence which is
not renewed gives way to the prior, and the matrix that is solved is never singular. By its form, a
Cauchy distribution's, what moves a value by one sd is held against it; what moves it by ten was not
foreseen by the sds, and is followed.

An outlier moves nothing: an error far from the median of the last few hardly counts. A change that
lasts becomes that median, and then evidence is forgotten fast until the change is followed.
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
    """Standard deviation of a pass's seconds, relative. Sets what a step weighs against the ridge;
    errors are counted in it, or in what they deviate by on this machine, where that is more."""

    forgetting: float = 0.99
    """Kept of the evidence at each step: it is 100 steps long, as far apart as probes are."""

    recent: int = 5
    """Errors whose median is believed: up to two of them may be outliers. After a change evidence
    is as long as that, and what was learned before is gone in a dozen steps. Otherwise the values
    are solved for once in so many steps: one adds less to 100 others than its noise."""

    change: float = 2.0
    """Standard deviations of the median of recent errors that are a change: it has about 0.5 of
    them itself, so noise passes it once in 10,000 steps."""

    far: float = 0.25
    """Relative error beside the median from which a step counts less, by the fourth power: 5
    standard deviations. An outlier counts for nothing; a probe that contradicts the steps around it
    by a third still counts."""


class RidgeRegression:
    """measured = sum of features * values."""

    def __init__(
        self,
        prior: Sequence[float],
        sds: Sequence[float],
        low: Sequence[float],
        high: float,
        settings: RegressionSettings = RegressionSettings(),
    ) -> None:
        """prior, sds, low: of each value; high: of all of them."""
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
        """scale: what errors are relative to, in the unit of `measured`."""
        # A profile taken on a loud machine can predict nothing, or less, for a pass that took time;
        # and what was learned from passes that took none can predict none of any.
        prior = float(features @ self._prior)
        scale = max(scale, measured / self._high, prior / self._high) or 1.0
        x = features / scale
        predicted = self.predict(x)
        error, weight = self._tamed(measured / scale - predicted)
        settings = self._settings
        self._forget(1 - 1 / settings.recent if self._has_changed else settings.forgetting)
        weighted = weight * x
        self._pull += weighted * (predicted + error - prior / scale)
        self._evidence += weighted[:, None] * x
        self._solve_in_turn()

    def fade(self) -> None:
        """A step that tells nothing: what is known gets a step older."""
        if self.values is not self._prior:
            self._forget(self._settings.forgetting)
            self._solve_in_turn()

    def state(self) -> dict[str, Any]:
        """The evidence, as JSON has it."""
        return {"evidence": self._evidence.tolist(), "pull": self._pull.tolist()}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """Begin with that much of the evidence of a `state`. Raises ValueError where it is of other
        values."""
        evidence, pull = np.array(state["evidence"]), np.array(state["pull"])
        if evidence.shape != self._evidence.shape or not np.isfinite(evidence).all():
            raise ValueError(f"evidence of shape {evidence.shape}, not {self._evidence.shape}")
        self._evidence, self._pull = kept * evidence, kept * pull
        self.values = self._solution()

    def _solve_in_turn(self) -> None:
        """The first few steps, and every so many from then on, since solving takes most time."""
        self._num_steps += 1
        few = self._settings.recent
        if self._num_steps <= few or self._num_steps % few == 0 or self._has_changed:
            self.values = self._solution()

    @property
    def _has_changed(self) -> bool:
        sd = max(self._settings.noise, math.sqrt(self._variance))
        return abs(self._median) > self._settings.change * sd

    def _tamed(self, error: float) -> tuple[float, float]:
        """The error as far as it is to be believed, and what it weighs."""
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
        """Evidence and ridge; the ridge is that of a Cauchy distribution, by the last values."""
        far = (self.values - self._prior) / self._sds
        ridge = (self._settings.noise / self._sds) ** 2 / (1.0 + far * far)
        matrix = self._evidence.copy()
        matrix.flat[:: len(ridge) + 1] += ridge
        return matrix

    def _solution(self) -> Floats:
        """Values that fall outside are put on their bounds, and the others are solved for again."""
        matrix = self._matrix()
        found = self._prior + np.linalg.solve(matrix, self._pull)
        is_free = np.ones(len(found), dtype=bool)
        while True:
            kept = np.minimum(np.maximum(found, self._low), self._high)
            is_outside = (kept != found) & is_free
            if not is_outside.any():
                return kept
            is_free &= ~is_outside
            moved = kept - self._prior
            pull = self._pull[is_free] - matrix[np.ix_(is_free, ~is_free)] @ moved[~is_free]
            found = kept
            found[is_free] = self._prior[is_free] + np.linalg.solve(
                matrix[np.ix_(is_free, is_free)], pull
            )
