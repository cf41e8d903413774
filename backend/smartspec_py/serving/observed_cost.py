"""Average pass times while serving, as a cost model for simulations.

Live corrections follow the last few hundred steps with a few factors. The planner uses them for the
next step. A simulation of the server needs the step times at every load instead. The difference
between serving and profiling depends on the number of rows. Therefore this module keeps long-term
means for each number of rows and returns them as a cost model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from smartspec_py.core.cost import CostModel, Floats, PassTable
from smartspec_py.core.learn.corrections import Predicted
from smartspec_py.core.types import MeasuredStep

FORGETTING = 0.9995
"""Decay factor of a mean at each new step. A mean covers about 2,000 steps."""

FEWEST_STEPS = 20.0
"""Smallest number of steps for a separate mean. Means with fewer steps are interpolated."""

LEAST_SPREAD = 1e-6
"""Smallest variance of rows, relative to their mean square, for which a slope is fitted."""

LARGEST_RATIO = 4.0
"""Largest ratio of measured to predicted seconds. Outliers are limited to it."""


class ObservedCosts:
    """`observe` adds steps, and `cost` is the profile corrected by their average times."""

    def __init__(self, profile: CostModel) -> None:
        self._profile = profile
        self._target = _MeanRatios(profile.target.rows)
        self._draft = _MeanRatios(profile.draft.rows if profile.draft else (1,))
        self._prefill = _MeanRatios((1,))
        self._host = _Line()

    def observe(self, step: MeasuredStep, known: Predicted) -> None:
        """Learn from a step with decoding sequences. known: the profile's prediction for it."""
        rows, alone_s = max(1, step.batch_size), known.one_token_s + known.drafts_s
        if step.num_prefill_tokens:
            added_s = step.target_s - self._target.at(rows) * alone_s
            self._prefill.observe(1, added_s, known.prefill_s)
        elif step.batch_size:
            self._target.observe(rows, step.target_s, alone_s)
            most_s = LARGEST_RATIO * (step.target_s + step.draft_s)
            self._host.observe(step.batch_size, min(step.host_s, most_s))
        if step.draft_rows:
            self._draft.observe(step.draft_rows[0], step.draft_s, known.passes_s)

    @property
    def cost(self) -> CostModel:
        """The profile with its tables scaled row by row, and the measured host time."""
        profile = self._profile
        host_s, host_row_s = self._host.fitted((profile.host_s, profile.host_row_s))
        return replace(
            profile,
            target=_scaled(profile.target, self._target.by_rows()),
            draft=profile.draft and _scaled(profile.draft, self._draft.by_rows()),
            catch_up_s=profile.catch_up_s * self._draft.overall,
            prefill_factor=profile.prefill_factor * self._prefill.overall,
            host_s=host_s,
            host_row_s=host_row_s,
        )


class _MeanRatios:
    """Ratios of measured to predicted seconds, by the nearest number of rows in the profile."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._logs = [math.log(num) for num in rows]
        # Decayed sums of measured seconds, predicted seconds and steps, for each number of rows.
        # Plain floats: this runs in every step, and arrays of this size are ten times slower.
        self._sums = [(0.0, 0.0, 0.0) for _ in rows]

    def observe(self, batch_size: int, measured_s: float, predicted_s: float) -> None:
        if predicted_s <= 0.0:
            return
        nearest = self._nearest(batch_size)
        measured, predicted, num_steps = self._sums[nearest]
        seconds = min(max(measured_s, 0.0), LARGEST_RATIO * predicted_s)
        self._sums[nearest] = (
            FORGETTING * measured + seconds,
            FORGETTING * predicted + predicted_s,
            FORGETTING * num_steps + 1.0,
        )

    @property
    def overall(self) -> float:
        """The ratio over all rows; 1 if there are too few steps."""
        measured, predicted, num_steps = (sum(column) for column in zip(*self._sums, strict=True))
        return measured / predicted if num_steps >= FEWEST_STEPS else 1.0

    def by_rows(self) -> Floats:
        """The ratio for each number of rows in the profile. Those with too few steps are
        interpolated."""
        known = [(log, *sums) for log, sums in zip(self._logs, self._sums, strict=True)]
        known = [entry for entry in known if entry[3] >= FEWEST_STEPS]
        if not known:
            return np.full(len(self._logs), self.overall)
        ratios = [measured / predicted for _, measured, predicted, _ in known]
        found: Floats = np.interp(self._logs, [log for log, *_ in known], ratios)
        return found

    def at(self, batch_size: int) -> float:
        """The ratio of the nearest number of rows, without interpolation."""
        measured, predicted, num_steps = self._sums[self._nearest(batch_size)]
        return measured / predicted if num_steps >= FEWEST_STEPS else self.overall

    def _nearest(self, batch_size: int) -> int:
        log = math.log(batch_size)
        return min(range(len(self._logs)), key=lambda i: abs(self._logs[i] - log))


class _Line:
    """Linear fit of the loop's seconds over rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._squares = 0.0
        self._seconds = self._products = 0.0

    def observe(self, batch_size: int, seconds: float) -> None:
        self._weight = FORGETTING * self._weight + 1.0
        self._rows = FORGETTING * self._rows + batch_size
        self._squares = FORGETTING * self._squares + batch_size * batch_size
        self._seconds = FORGETTING * self._seconds + seconds
        self._products = FORGETTING * self._products + seconds * batch_size

    def fitted(self, otherwise: tuple[float, float]) -> tuple[float, float]:
        """Seconds per step and per row, not negative; `otherwise` if there are too few steps."""
        if self._weight < FEWEST_STEPS:
            return otherwise
        spread = self._squares - self._rows**2 / self._weight
        slope = 0.0
        if spread > LEAST_SPREAD * self._squares:
            slope = (self._products - self._rows * self._seconds / self._weight) / spread
        slope = min(max(slope, 0.0), self._seconds / self._rows)
        return (self._seconds - slope * self._rows) / self._weight, slope


def _scaled(table: PassTable, ratios: Floats) -> PassTable:
    seconds = np.array(table.seconds) * ratios[:, None]
    lines = tuple(tuple(line) for line in seconds.tolist())
    return replace(table, seconds=lines, context_s=table.context_s * float(ratios.mean()))
