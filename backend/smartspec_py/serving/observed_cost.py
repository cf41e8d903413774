"""What passes took while serving, on average: the profile as a server's whole life would draw it.

Live corrections follow the last few hundred steps with a handful of factors; that is what the next
step is planned with. Who simulates the server asks another question: what do steps take at every
load it has seen? A machine that serves differs from one that profiles by more at some numbers of
rows than at others, so the answer is kept by rows, as long means, and handed out as a profile.
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
"""Kept of a mean at each step that adds to it: it is 2,000 of its steps long."""

FEWEST_STEPS = 20.0
"""Steps with about so many rows that give a mean of their own; others lie between neighbours."""

LEAST_SPREAD = 1e-6
"""Of the mean square of rows, from which a slope over rows is looked for."""

LARGEST_RATIO = 4.0
"""Of measured to predicted seconds, as a step counts: an outlier of seconds is none of a pass's."""


class ObservedCosts:
    """`observe` takes in steps, `cost` is the profile with what they took on average."""

    def __init__(self, profile: CostModel) -> None:
        self._profile = profile
        self._target = _MeanRatios(profile.target.rows)
        self._draft = _MeanRatios(profile.draft.rows if profile.draft else (1,))
        self._prefill = _MeanRatios((1,))
        self._host = _Line()

    def observe(self, step: MeasuredStep, known: Predicted) -> None:
        """Learn from a step with decoding sequences. known: what the profile says of it."""
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
        """A cost model whose tables are the profile's, scaled row by row."""
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
    """Measured over predicted seconds, by the nearest of the measured numbers of rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._logs = [math.log(num) for num in rows]
        # Measured seconds, predicted ones and steps; each fades as others are added to it. Plain
        # floats: this is done in every step, and at this size arrays cost ten times as much.
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
        """1 where hardly anything was seen."""
        measured, predicted, num_steps = (sum(column) for column in zip(*self._sums, strict=True))
        return measured / predicted if num_steps >= FEWEST_STEPS else 1.0

    def by_rows(self) -> Floats:
        """For each of the measured numbers of rows; those that were hardly seen lie between their
        neighbours."""
        known = [(log, *sums) for log, sums in zip(self._logs, self._sums, strict=True)]
        known = [entry for entry in known if entry[3] >= FEWEST_STEPS]
        if not known:
            return np.full(len(self._logs), self.overall)
        ratios = [measured / predicted for _, measured, predicted, _ in known]
        found: Floats = np.interp(self._logs, [log for log, *_ in known], ratios)
        return found

    def at(self, batch_size: int) -> float:
        """Of the nearest alone."""
        measured, predicted, num_steps = self._sums[self._nearest(batch_size)]
        return measured / predicted if num_steps >= FEWEST_STEPS else self.overall

    def _nearest(self, batch_size: int) -> int:
        log = math.log(batch_size)
        return min(range(len(self._logs)), key=lambda i: abs(self._logs[i] - log))


class _Line:
    """Seconds of the loop against rows: a mean, and a slope as far as rows differ."""

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
        """Seconds a step and a row, not negative; `otherwise` where little was seen."""
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
