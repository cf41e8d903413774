"""Learns from live steps how costs differ from the profile.

It learns a few factors and does not change the tables. Parts of a step that are timed separately
are learned separately. T is the target pass and T0 the same pass with one token per row, both by
the profile:

    target  = base * T0 + slope * (T - T0)                  in a profile 1 and 1
    draft   = draft_factor * passes + prefill_factor * draft prefill    in a profile 1 and 1
    host    = host_s + draft_host_s * sequences with drafts  in a profile usually 0

Each is a regression of relative errors with forgetting and a ridge towards the profile (see
`core.learn.regression`). Without new evidence, the values return to the profile. The time to plan
does not depend on the drafts, so it is a mean over all steps, which is added to host_s.

If all steps have the same draft length and batch size, a slower machine and dearer drafts explain
the measurements equally well. The ridge then attributes most of the difference to the machine: the
base changes, and the slope by half as much.

Time is counted in steps. This module does not read a clock, and its memory use is constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from smartspec_py.core.account import PREFILL_SHARE
from smartspec_py.core.cost import CostModel
from smartspec_py.core.learn.regression import FORGETTING, LARGEST, RidgeRegression
from smartspec_py.core.plan.plan_time import AVERAGED_STEPS
from smartspec_py.core.types import MeasuredStep

SHARED = 0.5
"""Share of the change of the base that the slope is expected to have too. It is 1 for a slower
machine, and 0 for a constant wait in every pass. The value is between the two."""

TARGET_SDS = (1.0, 0.5)
"""Prior standard deviations of changes: the speed of the machine, and the additional cost of
drafts. If all steps are alike, a difference is divided among them in proportion to their
squares."""

HOST_SDS = (1.0, 0.02)
"""The same of the host time of a step, and of each sequence with drafts, as shares of a pass over
one token. On an H200, the second is estimated at 2 %."""

UNSEEN_STEPS = 500
"""Number of steps without draft passes after which a step with some is wanted, to check their cost.
In this time several probes are earned, see `core.account`."""


FALSE_PROFILE = 0.3
"""A profile whose predictions are this wrong should be measured again, if steps are steady."""


class CostCorrections:
    """`observe` learns from a step. `cost` is the profile with the learned factors."""

    def __init__(self, profile: CostModel) -> None:
        self._profile = profile
        # Unit of the host time, so that its value is about as large as a factor.
        self._unit_s = max(profile.target.one_token_s(1), 1e-9)
        self._target = RidgeRegression((1.0, 1.0 - SHARED), TARGET_SDS)
        host = profile.host_s / self._unit_s, profile.draft_host_s / self._unit_s
        self._host = RidgeRegression(host, HOST_SDS)
        self._draft = RidgeRegression((1.0, 1.0), (1.0, 1.0))
        self._plan_s = 0.0
        """Mean planning time per step."""
        self._fits = (self._target, self._host, self._draft)
        self._num_undrafted = 0
        self._undrafted_s = 0.0
        self._errors = [0.0] * 3
        """Decayed means: error of the profile, error after correction, and the weight, which is the
        decayed mean of 1."""
        self.cost = self._corrected()

    @property
    def mean_errors(self) -> tuple[float, float]:
        """Mean absolute relative errors of the predicted duration of recent steps.

        The first is that of the profile. The second is that of the corrected profile before it
        learned from the step. Steps with prompt chunks are excluded.
        """
        by_profile, corrected, weight = self._errors
        return (by_profile / weight, corrected / weight) if weight else (0.0, 0.0)

    @property
    def is_profile_slow(self) -> bool:
        """Whether steps are steadily much faster than the profile says: other programs slowed it
        down. Steps that are slower prove nothing, other programs may slow them down now."""
        by_profile, corrected = self.mean_errors
        is_steady = corrected < by_profile / 2
        return by_profile > FALSE_PROFILE and is_steady and self.cost.target_base < 1.0

    def state(self) -> list[dict[str, Any]]:
        """The learned state, as JSON values."""
        return [fit.state() for fit in self._fits]

    def restore(self, state: Sequence[Mapping[str, Any]], kept: float) -> None:
        """Start from a saved state. kept: factor for its evidence. Raises ValueError for a state of
        another profile."""
        for fit, of_fit in zip(self._fits, state, strict=True):
            fit.restore(of_fit, kept)
        self.cost = self._corrected()

    def wants_drafts(self, prefill_len: int) -> bool:
        """Whether a step with draft passes is needed to learn their cost, because recent steps had
        none. Drafts of prompt lookup do not show it. The caller runs one if its account allows it.

        prefill_len: tokens of draft prefill before it. They may cost hundreds of steps, so it waits
        until PREFILL_SHARE of the time without draft passes covers them.
        """
        saved_s = PREFILL_SHARE * self._undrafted_s
        is_covered = self.cost.draft_prefill_s * prefill_len <= saved_s
        return self._num_undrafted >= UNSEEN_STEPS and is_covered

    def observe(self, step: MeasuredStep) -> None:
        """Learn from a step. Parts that cannot be measured separately are not used."""
        one_token_s, drafts_s, passes = self._expected(step)
        target = one_token_s + SHARED * drafts_s, drafts_s
        host = self._unit_s, self._unit_s * step.num_drafting
        target_s, draft_s = self._target.predict(target), self._draft.predict(passes)
        host_s = self._host.predict(host) + self._plan_s
        whole_s = target_s + draft_s + host_s + step.fixed_draft_s
        self._plan_s += (step.plan_s - self._plan_s) / AVERAGED_STEPS
        if step.is_draft_prefill:
            used_s = self.cost.draft_prefill_s * step.num_draft_prefill_tokens / PREFILL_SHARE
            self._undrafted_s = max(0.0, self._undrafted_s - used_s)
        else:
            has_passes = bool(step.draft_rows)
            self._num_undrafted = 0 if has_passes else self._num_undrafted + 1
            self._undrafted_s = 0.0 if has_passes else self._undrafted_s + step.total_s
        if step.batch_size > 0 and step.num_prefill_tokens == 0:
            profile_s = one_token_s + drafts_s + sum(passes) + step.fixed_draft_s
            profile_s += self._profile.host_s + self._profile.draft_host_s * step.num_drafting
            if step.total_s > 0.0:
                for i, seconds in enumerate((profile_s, whole_s, 0.0)):
                    error = abs(seconds / step.total_s - 1.0)
                    self._errors[i] += (1 - FORGETTING) * (error - self._errors[i])
            self._target.observe(target, step.target_s, target_s)
        else:
            self._target.fade()
        if step.batch_size > 0:
            # Errors are relative to the whole step, because host time alone may be almost 0.
            measured_s = max(0.0, step.host_s - step.plan_s)
            self._host.observe(host, measured_s, max(whole_s, step.total_s / LARGEST))
        else:
            self._host.fade()
        if any(passes):
            self._draft.observe(passes, step.draft_s, draft_s)
        else:
            self._draft.fade()
        self.cost = self._corrected()

    def _expected(self, step: MeasuredStep) -> tuple[float, float, tuple[float, float]]:
        """The seconds of a step by the profile alone, without prompt chunks: the target pass with
        one token per row, its additional time to verify drafts, and draft passes and prefill."""
        profile, rows = self._profile, max(1, step.batch_size)
        alone_s = one_token_s = profile.target.one_token_s(rows, step.context_len)
        if not step.is_warm:
            one_token_s += profile.shape_change_s
        drafts_s = passes_s = prefill_s = 0.0
        if step.num_tokens > rows:
            drafts_s = profile.target.pass_s(rows, step.num_tokens, step.context_len) - alone_s
        if step.draft_rows:
            passes_s = sum(profile.draft_s(rows) for rows in step.draft_rows)
            prefill_s = profile.draft_prefill_s * step.num_draft_prefill_tokens
        return one_token_s, drafts_s, (passes_s, prefill_s)

    def _corrected(self) -> CostModel:
        """Factors are from 1 / LARGEST to LARGEST. A profile with larger errors should be measured
        again."""
        base, drafts = self._target.values
        draft, prefill = map(_bounded, self._draft.values)
        return replace(
            self._profile,
            host_s=max(0.0, self._host.values[0]) * self._unit_s + self._plan_s,
            draft_host_s=max(0.0, self._host.values[1]) * self._unit_s,
            shape_change_s=_bounded(base) * self._profile.shape_change_s,
            draft_prefill_s=prefill * self._profile.draft_prefill_s,
            target_base=_bounded(base),
            target_slope=_bounded(SHARED * base + drafts),
            draft_factor=draft,
        )


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / LARGEST), LARGEST)
