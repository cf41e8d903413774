"""Recursive ridge regression with forgetting, for what is learned from one step after another.

The values minimise, within bounds,

    sum over observations of  weight * forgetting^age * (error / scale)^2
    + sum over values of (NOISE * (value - prior) / sd)^2

In information form: the ridge stands beside the evidence and outlasts it, so that evidence which is
not renewed gives way to the prior, and the matrix that is solved is never singular.

A stall moves nothing: an error far from the median of the last few hardly counts. A change that
lasts becomes that median, and then evidence is forgotten fast until the change is followed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NOISE = 0.05
"""Standard deviation of a pass's seconds, relative. Sets what a step weighs against the ridge."""

FORGETTING = 0.99
"""Kept of the evidence at each step: it is 100 steps long, as far apart as probes are."""

CHANGE_FORGETTING = 0.75
"""The same while costs have visibly changed: what was learned before is gone in a dozen steps."""

MIN_CHANGE = 0.08
"""Median relative error of the last RECENT steps that is a change: 3 of its standard deviations."""

CHANGE_DEVIATIONS = 2.5
"""The same in mean absolute deviations of the machine, where that is more. The median of five has
0.67 of them as its standard deviation, so noise passes it about once in 5,000 steps."""

RECENT = 5
"""Errors whose median is believed: up to two of them may be stalls."""

FAR = 0.25
"""Relative error beside the median from which a step counts less, by the fourth power: 5 standard
deviations. Of twice that a sixteenth is left, and of a stall nothing; a probe that contradicts the
steps around it by a third is still heard."""

LEAST_SCALE = 0.1
"""Of what was measured, and of what the prior says: an error of a prediction that is smaller is
relative to this."""

TAIL = 4.0
"""Degrees of freedom of the ridge, a Student's t: what moves a value by one sd is held against it,
what moves it by ten was not foreseen by the sds, and is followed."""

SOLVE_EVERY = 4
"""Steps between two solutions while costs do not change: what a step adds to 100 others is less
than its noise, and solving is most of what a regression takes."""


class RidgeRegression:
    """measured = sum of features * values."""

    def __init__(
        self,
        prior: Sequence[float],
        sds: Sequence[float],
        low: Sequence[float],
        high: float,
    ) -> None:
        """prior, sds, low: of each value; high: of all of them."""
        self._prior = np.array(prior, dtype=np.float64)
        self._low, self._high = np.array(low, dtype=np.float64), high
        self._sds = np.array(sds, dtype=np.float64)
        self._evidence = np.zeros((len(prior), len(prior)))
        self._pull = np.zeros_like(self._prior)
        self._recent = deque([0.0] * RECENT, maxlen=RECENT)
        self._median = 0.0
        self._mean_deviation = 0.0
        self._num_steps = 0
        self.values = self._prior

    def predict(self, features: Floats) -> float:
        return float(features @ self.values)

    def observe(
        self, features: Floats, measured: float, scale: float, at_once: bool = False
    ) -> None:
        """scale: what errors are relative to, in the unit of `measured`. at_once: the values are
        wanted with this step in them."""
        # A profile taken on a loud machine can predict nothing, or less, for a pass that took time;
        # and what was learned from passes that took none can predict none of any.
        prior = float(features @ self._prior)
        scale = max(scale, LEAST_SCALE * measured, LEAST_SCALE * prior, 1e-9)
        x = features / scale
        predicted = self.predict(x)
        error, weight = self._tamed(measured / scale - predicted)
        self._forget(CHANGE_FORGETTING if self._has_changed else FORGETTING)
        weighted = weight * x
        self._pull += weighted * (predicted + error - prior / scale)
        self._evidence += weighted[:, None] * x
        self._solve_in_turn(at_once)

    def fade(self) -> None:
        """A step that tells nothing: what is known gets a step older."""
        if self.values is not self._prior:
            self._forget(FORGETTING)
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

    def deviation(self, features: Floats) -> float:
        """Standard deviation of a prediction, by the evidence and the ridge."""
        solved = np.linalg.solve(self._matrix(), features)
        return NOISE * math.sqrt(max(float(features @ solved), 0.0))

    def _solve_in_turn(self, at_once: bool = False) -> None:
        """The first SOLVE_EVERY steps, and every so many from then on."""
        self._num_steps += 1
        is_due = self._num_steps <= SOLVE_EVERY or self._num_steps % SOLVE_EVERY == 0
        if is_due or at_once or self._has_changed:
            self.values = self._solution()

    @property
    def _has_changed(self) -> bool:
        return abs(self._median) > max(MIN_CHANGE, CHANGE_DEVIATIONS * self._mean_deviation)

    def _tamed(self, error: float) -> tuple[float, float]:
        """The error as far as it is to be believed, and what it weighs."""
        self._recent.append(error)
        self._median = sorted(self._recent)[RECENT // 2]
        beside = error - self._median
        near = min(max(beside, -FAR), FAR)
        self._mean_deviation += (1 - FORGETTING) * (abs(near) - self._mean_deviation)
        weight = 1.0 if near == beside else (FAR / beside) ** 4
        return self._median + near, weight

    def _forget(self, kept: float) -> None:
        self._pull *= kept
        self._evidence *= kept

    def _matrix(self) -> Floats:
        """Evidence and ridge; the ridge gives way where a value has moved by several sds."""
        far = (self.values - self._prior) / self._sds
        ridge = (NOISE / self._sds) ** 2 / (1.0 + far * far / TAIL)
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
