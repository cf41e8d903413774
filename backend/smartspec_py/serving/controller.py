"""Decides draft lengths while serving: the planner, the guard, probes, and their learning.

At each step, the planner chooses draft lengths with the corrected costs. The guard can disable
speculation if measurements show that it loses time. Occasional steps are probes. A *probe* runs
without drafts where the plan has drafts, or with drafts where it has none, to measure the
difference. Probes have a budget of 1 % of the time.

Guard and probes do not affect sequences with the policies `none` and `fixed:K`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from smartspec_py.core.cost import MAX_ROWS, CostModel
from smartspec_py.core.learn.acceptance import AcceptanceSettings
from smartspec_py.core.learn.corrections import CostCorrections
from smartspec_py.core.learn.guard import Guard, ProbeBudget
from smartspec_py.core.plan.plan_budget import PlanBudget
from smartspec_py.core.plan.planner import BatchTable, PlannerSettings, batch_table_of, plan
from smartspec_py.core.plan.step import at_least
from smartspec_py.core.types import MeasuredStep, SequenceView
from smartspec_py.serving.observed_cost import ObservedCosts
from smartspec_py.serving.step import Decision, Reason, StepRecord

PROBE_DRAFT_LEN = 2
"""Drafts of a probe that drafts: one pass more than the least, so that both costs show."""

STEPS_PER_LENGTH = 4
"""One step in so many is planned as if its lengths stay. The others are charged for a change of
the number of tokens (`CostModel.change_s`). If all were charged, a length that gains a little in
each step would never be chosen. In the simulator, 4 serves as many tokens/s as 16 and 64 do, and
latency at 0.7 of saturation is 1 % lower."""

TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

LEARNING = ("goodput", "goodput_global", "batch_table")
"""Policies that use the cost model. Guard and probes apply only to them."""


class Controller:
    """Owned by the loop thread. Call `plan`, run the step, then call `observe`."""

    def __init__(
        self,
        profile: CostModel,
        max_draft_len: int,
        max_sequences: int,
        batch_table: BatchTable | None = None,
    ) -> None:
        """batch_table: None has one made from the profile."""
        self._corrections = CostCorrections(profile)
        self._observed = ObservedCosts(profile)
        self._budget = ProbeBudget()
        self._guard = Guard(profile, self._budget)
        self._plan_budget = PlanBudget()
        rows = [n for n in TABLE_ROWS if n < min(max_sequences, MAX_ROWS)] + [max_sequences]
        accept_prob = AcceptanceSettings.initial_mean
        table = batch_table or batch_table_of(profile, accept_prob, rows, max_draft_len)
        self.settings = PlannerSettings(batch_table=table)
        self._last_num_tokens = 0
        self._num_plans = 0
        # Of the last step with a decision, for the steps in which only its bursts run:
        self._last_context_len = 0.0
        self._was_probe = False
        self._was_guarded = False

    @property
    def observed_cost(self) -> CostModel:
        """Average costs of steps since the start, for a simulation of this server."""
        return self._observed.cost

    @property
    def num_switches(self) -> int:
        """Number of times that the guard disabled or enabled speculation."""
        return self._guard.num_switches

    @property
    def time_errors(self) -> tuple[float, float]:
        """Mean relative error of predicted seconds: by the profile, and as corrected."""
        return self._corrections.mean_errors

    def state(self) -> dict[str, Any]:
        """What was learned of costs and of what speculation brings; as JSON has it."""
        return {"corrections": self._corrections.state(), "guard": self._guard.state()}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """kept: of the evidence. Raises ValueError for a state of another profile."""
        self._corrections.restore(state["corrections"], kept)
        self._guard.restore(state["guard"], kept)

    def rests(self, batch_size: int, has_targets: bool) -> bool:
        """Whether to skip the search for a plan, because recent plans cost more than they gained.

        batch_size: decoding sequences of the step. has_targets: whether one has a latency target,
        which may require drafts.
        """
        return not (has_targets or self._plan_budget.allows(batch_size))

    def plan(
        self, views: Sequence[SequenceView], num_prefilling: int = 0, num_background: int = 0
    ) -> Decision:
        """num_prefilling, num_background: see `PlannerSettings`."""
        self._num_plans += 1
        charged: int | None = self._last_num_tokens
        if num_prefilling:  # no pass is like the one before
            charged = 0
        elif self._num_plans % STEPS_PER_LENGTH == 0:
            charged = None
        settings = replace(
            self.settings,
            num_background=num_background,
            num_prefilling=num_prefilling,
            last_num_tokens=charged,
        )
        free = [view for view in views if view.policy in LEARNING]
        if not free:
            return self._decide(views, settings)
        batch_size = len(views) + num_background
        context_len = _mean_context_len(views)
        if pause := self._guard.pause(batch_size, context_len):
            decision = self._decide(views, _undrafted(settings, free), Reason.GUARD)
            return replace(decision, pause=pause)
        has_targets = any(view.slo_s_per_token is not None for view in free)
        if self.rests(batch_size, has_targets):
            return self._decide(views, _undrafted(settings, free))
        decision = self._decide(views, settings)
        if any(decision.plan.draft_lens[view.sequence] for view in free):
            if self._guard.wants_reference(batch_size, context_len):
                return self._decide(views, _undrafted(settings, free), Reason.PROBE)
        elif self._budget.allows() and self._corrections.wants_drafts():
            prober = _prober(free)
            if prober is not None:
                return self._decide(views, _undrafted(settings, free, prober), Reason.PROBE)
        return decision

    def observe(self, record: StepRecord) -> None:
        """Learn from the result of a decision, if there were decoding sequences."""
        views = record.decision.views
        last_num_tokens, self._last_num_tokens = self._last_num_tokens, record.num_target_tokens
        if record.between_s + record.total_s <= 0.0:
            return
        if not views:
            if record.decision.num_decoding:
                self._observe_bursts(record)
            return
        step = measured(record, last_num_tokens)
        if step.target_s > 0.0:  # else the engine cannot tell its passes from the rest
            self._observed.observe(step, self._corrections.observe(step))
        self._last_context_len = step.context_len
        self._was_probe = record.decision.reason is Reason.PROBE
        self._was_guarded = all(view.policy in ("none", *LEARNING) for view in views)
        if any(view.policy in LEARNING for view in views):
            self._observe_plan(record.decision, step)
            # The probe budget grows only with the time of sequences that probes can use.
            self._budget.observe(step.total_s, self._was_probe)
        if step.num_prefill_tokens == 0 and self._was_guarded:
            self._guard.observe(step)

    def _observe_bursts(self, record: StepRecord) -> None:
        """Count a step in which only bursts run like the step that began them. Most tokens without
        drafts come in such steps, and the first step of a burst takes longer than the others."""
        batch_size, total_s = record.decision.num_decoding, record.between_s + record.total_s
        step = MeasuredStep(
            batch_size,
            batch_size,
            self._last_context_len,
            record.num_generated,
            draft_rows=(),
            target_s=0.0,
            draft_s=0.0,
            total_s=total_s,
        )
        if self._was_probe:
            self._budget.observe(total_s, is_probe=True)
        if record.num_prefill_tokens == 0 and self._was_guarded:
            self._guard.observe(step)

    def _decide(
        self,
        views: Sequence[SequenceView],
        settings: PlannerSettings,
        reason: Reason = Reason.PLANNED,
    ) -> Decision:
        cost = self._corrections.at(len(views) + settings.num_background)
        return Decision(plan(views, cost, settings), views, cost, settings, reason)

    def _observe_plan(self, decision: Decision, step: MeasuredStep) -> None:
        batch_size, planned = step.batch_size, decision.plan
        is_probe = decision.reason is Reason.PROBE
        if decision.settings.forced and not is_probe:  # nothing was searched for
            self._plan_budget.observe(batch_size, None, step.total_s)
            return
        cost = self._corrections.at(batch_size)
        none_s = cost.target_s(batch_size, batch_size, step.context_len) + cost.step_host_s(
            batch_size
        )
        pays = is_probe or (
            step.is_speculating
            and self._plan_budget.pays(
                planned.expected_tokens, planned.expected_s, batch_size, none_s
            )
        )
        self._plan_budget.observe(batch_size, step.plan_s, step.total_s, is_poor=not pays)


def measured(record: StepRecord, last_num_tokens: int) -> MeasuredStep:
    """What is learned from a step. Draft passes are those of sequences that a draft model drafted
    for; its time counts from the end of the step before, where the loop was not idle.

    last_num_tokens: of the target's pass before.
    """
    decision, drafted = record.decision, record.drafted
    num_drafted, num_texts = sum(drafted.values()), 0
    lengths, lags = [], []  # draft passes and lag of sequences that a draft model drafted for
    for view in decision.views:
        length = drafted.get(view.sequence)
        if length:
            num_texts += view.context_len
            option = decision.plan.option(view)
            if option.has_draft_passes:
                lengths.append(option.passes(length))
                lags.append(option.draft_lag)
    num_late = len(lags) - lags.count(0)
    rows = at_least(np.array(lengths), max(lengths)).tolist() if lengths else []
    return MeasuredStep(
        batch_size=decision.num_decoding,
        num_tokens=decision.num_decoding + num_drafted,
        context_len=_mean_context_len(decision.views),
        num_generated=record.num_generated,
        # Late sequences are read in a pass of their own.
        draft_rows=(num_late, *rows) if num_late else tuple(rows),
        target_s=record.target_s,
        draft_s=record.draft_s if lengths else 0.0,
        total_s=record.between_s + record.total_s,
        plan_s=record.views_s + record.plan_s,
        num_prefill_tokens=record.num_prefill_tokens,
        num_catch_up_tokens=sum(lags),
        num_charged_tokens=num_drafted + num_texts,
        is_repeat=record.num_target_tokens == last_num_tokens,
    )


def _mean_context_len(views: Sequence[SequenceView]) -> float:
    return sum([view.context_len for view in views]) / len(views)


def _undrafted(
    settings: PlannerSettings, free: Sequence[SequenceView], prober: SequenceView | None = None
) -> PlannerSettings:
    """Settings with no drafts for these sequences, except for the prober."""
    forced = dict.fromkeys([view.sequence for view in free], 0)
    if prober is not None:
        forced[prober.sequence] = PROBE_DRAFT_LEN
    return replace(settings, forced=forced)


def _prober(free: Sequence[SequenceView]) -> SequenceView | None:
    """The sequence whose first option costs least to start drafting: it has the lowest lag."""
    able = [v for v in free if v.options[0].max_draft_len and v.options[0].has_draft_passes]
    return min(able, key=lambda view: (view.options[0].draft_lag, view.sequence), default=None)
