"""Learns from live steps how costs differ from the profile: a few factors, never the tables.

Parts of a step that were timed apart are learned apart. With T0 the target pass of one token a row
and T the pass as it was, both of the profile,

    target  = base * T0 + slope * (T - T0) + extra_s        base 1, slope 1, extra_s 0 in a profile
    draft   = draft_factor * (passes + catch-up)            1
    host    = host_s + host_row_s * rows                    as in the profile, mostly 0

Each is a regression of relative errors with forgetting and a ridge towards the profile (see
`core.learn.regression`), so that evidence that is not renewed fades and the profile returns.

Of the target's pass the ridge knows three kinds of change, from the likely to the unlikely. The
machine got slower or faster: the base, and the slope by half of that. The profile was off at some
number of rows: base and slope there, with the numbers of rows between interpolated. Drafts got
dearer beside the rest, or every pass by as much: slope or extra_s alone. Where steps are all alike
(one k, one number of rows) all three explain them, and the ridge decides: the machine is to blame,
in the main. So what one sequence teaches of the machine is believed of a batch, and what it teaches
of drafts is hardly.

Time is counted in steps; nothing here reads a clock, and memory does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from smartspec_py.core.cost import CostModel, Floats
from smartspec_py.core.learn.regression import RegressionSettings, RidgeRegression
from smartspec_py.core.types import MeasuredStep


@dataclass(frozen=True)
class CorrectionSettings:
    largest_factor: float = 10.0
    """Of every factor, and the least is its inverse: a profile that is wrong by more is not to be
    mended by factors, and errors are relative to no less than a tenth of what was measured."""

    shared: float = 0.5
    """Of what the base is off by, the slope is taken to be off as well. A slower machine is all of
    it, and something that every pass waits for is nothing of it."""

    target_sds: tuple[float, float, float] = (1.0, 0.1, 0.1)
    """How far passes may be off before anything was seen, at all numbers of rows alike: by the
    machine, in what drafts add beside that, and by so many passes of one token; standard
    deviations. Where steps are all alike, their squares share out the blame."""

    rows_sds: tuple[float, float] = (0.05, 0.2)
    """The same of the first two at one number of rows, beside the others: a profile is off there
    because few passes were timed, and drafts are a difference of two of them."""

    unseen_steps: int = 500
    """Steps without speculation after which a profile may be wrong about it without being found
    out: as many as save up all the probes of a budget."""

    regression: RegressionSettings = field(default_factory=RegressionSettings)
    """See `core.learn.regression`."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the profile says of a step, in seconds: the features of the fits. passes_s: draft
    passes and catch-up."""

    one_token_s: float
    drafts_s: float
    passes_s: float
    prefill_s: float


def predicted(profile: CostModel, step: MeasuredStep) -> Predicted:
    """Seconds of a step as the profile has them, without what was learned."""
    rows = max(1, step.batch_size)
    num_tokens = max(rows, step.num_tokens)
    alone_s = profile.target.one_token_s(rows, step.context_len)
    one_token_s = alone_s if step.is_repeat else alone_s + profile.change_s(rows)
    drafts_s = 0.0
    if num_tokens > rows:
        drafts_s = profile.target.pass_s(rows, num_tokens, step.context_len) - alone_s
        drafts_s += profile.extra_iterations_s(step.num_charged_tokens)
    passes_s = sum(profile.draft_s(rows) for rows in step.draft_rows)
    if step.draft_rows:
        passes_s += profile.catch_up_s * step.num_catch_up_tokens
    prefill_s = profile.prefill_s(step.num_prefill_tokens) if step.num_prefill_tokens else 0.0
    return Predicted(one_token_s, drafts_s, passes_s, prefill_s)


class CostCorrections:
    """`observe` takes in a step, `at` is the profile with what was learned so far."""

    def __init__(
        self, profile: CostModel, settings: CorrectionSettings = CorrectionSettings()
    ) -> None:
        self._profile = profile
        self._settings = settings
        regression = settings.regression
        self._kept = regression.forgetting
        # Seconds in which extra_s and host time are counted, so that sizes are those of factors.
        self._unit_s = max(profile.target.one_token_s(1), 1e-9)
        self._log_rows = np.log(np.array(profile.target.rows, dtype=np.float64))
        num = len(self._log_rows)
        high = settings.largest_factor
        base_sd, slope_sd = settings.rows_sds
        self._target = RidgeRegression(
            prior=(1.0, 1.0 - settings.shared, *(0.0,) * (1 + 2 * num)),
            sds=(*settings.target_sds, *(base_sd,) * num, *(slope_sd,) * num),
            low=(1 / high, -high, 0.0, *(-high,) * (2 * num)),
            high=high,
            settings=regression,
        )
        host = (profile.host_s / self._unit_s, profile.host_row_s / self._unit_s)
        self._host = RidgeRegression(
            host, (settings.target_sds[0], base_sd), (0.0, 0.0), math.inf, regression
        )
        self._draft = RidgeRegression((1.0,), (1.0,), (1 / high,), high, regression)
        self._fits = (self._target, self._host, self._draft)
        self._shares: dict[int, Floats] = {}
        self._corrected: dict[int, CostModel] = {}
        self._num_unspeculated = 0
        self._errors = [0.0, 0.0, 0.0]
        """Means with forgetting: by the profile, as corrected, and of 1."""

    def at(self, batch_size: int) -> CostModel:
        """The profile as corrected for steps of so many sequences. It shares the profile's tables:
        making one costs microseconds."""
        rows = max(1, batch_size)
        found = self._corrected.get(rows)
        if found is None:
            found = self._corrected[rows] = self._make_corrected(rows)
        return found

    @property
    def mean_errors(self) -> tuple[float, float]:
        """Mean absolute relative error of the predicted seconds of recent steps: by the profile,
        and as corrected before the step was learned from. Steps with prompt chunks are left out."""
        by_profile, corrected, weight = self._errors
        return (by_profile / weight, corrected / weight) if weight else (0.0, 0.0)

    def state(self) -> list[dict[str, Any]]:
        """What was learned, as JSON has it."""
        return [fit.state() for fit in self._fits]

    def restore(self, state: Sequence[Mapping[str, Any]], kept: float) -> None:
        """kept: of the evidence. Raises ValueError for a state of another profile."""
        for fit, of_one in zip(self._fits, state, strict=True):
            fit.restore(of_one, kept)
        self._corrected.clear()

    def wants_drafts(self) -> bool:
        """Whether a step that drafts would teach something: those that never do tell nothing of
        what it costs. The caller runs one where its budget for probes allows."""
        return self._num_unspeculated >= self._settings.unseen_steps

    def observe(self, step: MeasuredStep) -> Predicted:
        """Learn from a step; parts of it that cannot be told apart teach nothing. Returns what the
        profile says of it, which others learn from as well."""
        known = predicted(self._profile, step)
        rows = max(1, step.batch_size)
        pass_s = known.one_token_s + self._settings.shared * known.drafts_s
        target = self._features(rows, pass_s, known.drafts_s, self._unit_s)
        host = np.array((self._unit_s, self._unit_s * step.batch_size))
        passes = np.array((known.passes_s,))
        target_s, draft_s = self._target.predict(target), self._draft.predict(passes)
        whole_s = target_s + draft_s + self._host.predict(host)
        is_speculating = step.is_speculating and step.num_prefill_tokens == 0
        self._num_unspeculated = 0 if is_speculating else self._num_unspeculated + 1
        is_pure = step.batch_size > 0 and step.num_prefill_tokens == 0
        if is_pure:
            self._note_errors(step, known, whole_s)
            self._target.observe(target, step.target_s, target_s)
            # Relative to the step, which it is to predict: host time alone may be next to nothing.
            self._host.observe(
                host, step.host_s, max(whole_s, step.total_s / self._settings.largest_factor)
            )
        else:
            self._target.fade()
            self._host.fade()
        if known.passes_s > 0.0:
            self._draft.observe(passes, step.draft_s, draft_s)
        else:
            self._draft.fade()
        self._corrected.clear()
        return known

    def _features(self, batch_size: int, pass_s: float, drafts_s: float, unit_s: float) -> Floats:
        """What the values of the target's regression are multiplied by, in the order of its sds."""
        shares = self._shares_at(batch_size)
        alike = (pass_s, drafts_s, unit_s)
        return np.concatenate((alike, pass_s * shares, drafts_s * shares))

    def _shares_at(self, batch_size: int) -> Floats:
        """What each measured number of rows has to say of this one; they sum to 1."""
        found = self._shares.get(batch_size)
        if found is None:
            log = math.log(batch_size)
            knots = np.eye(len(self._log_rows))
            found = np.array([np.interp(log, self._log_rows, knot) for knot in knots])
            self._shares[batch_size] = found
        return found

    def _note_errors(self, step: MeasuredStep, known: Predicted, corrected_s: float) -> None:
        took_s = step.total_s
        if took_s <= 0.0:
            return
        profile_s = known.one_token_s + known.drafts_s + known.passes_s
        profile_s += self._profile.step_host_s(step.batch_size)
        for index, seconds in enumerate((profile_s, corrected_s, 0.0)):
            self._errors[index] += (1 - self._kept) * (
                abs(seconds / took_s - 1.0) - self._errors[index]
            )

    def _make_corrected(self, batch_size: int) -> CostModel:
        whole, drafts, extra = self._target.values[:3].tolist()
        of_rows = self._target.values[3:].reshape(2, -1) @ self._shares_at(batch_size)
        base = whole + float(of_rows[0])
        slope = self._settings.shared * base + drafts + float(of_rows[1])
        host, host_row = self._host.values.tolist()
        (draft,) = self._draft.values.tolist()
        return replace(
            self._profile,
            host_s=host * self._unit_s,
            host_row_s=host_row * self._unit_s,
            catch_up_s=draft * self._profile.catch_up_s,
            target_base=self._bounded(base),
            target_slope=self._bounded(slope),
            target_extra_s=extra * self._unit_s,
            draft_factor=draft,
        )

    def _bounded(self, factor: float) -> float:
        largest = self._settings.largest_factor
        return min(max(factor, 1 / largest), largest)
