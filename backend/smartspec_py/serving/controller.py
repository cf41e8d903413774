"""Decides draft lengths while serving: the planner, the guard, probes, and their learning.

At each step, the planner chooses draft lengths with the corrected costs. The guard can disable
speculation if measurements show that it loses time; then only tokens that a grammar forces are
drafted. Occasional steps are probes. A *probe* runs without drafts where the plan has drafts, or
with draft passes where it has none, to measure the difference. Probes, plans that do not pay and
trials of the guard share 1 % of the time, see `core.account`.

Guard and probes do not affect sequences with the policies `none` and `fixed:K`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from smartspec_py.constants import GRAMMAR
from smartspec_py.core.cost import MAX_ROWS, CostModel
from smartspec_py.core.learn.acceptance import INITIAL_MEAN
from smartspec_py.core.learn.corrections import CostCorrections
from smartspec_py.core.learn.guard import Guard
from smartspec_py.core.plan.plan_time import PlanTime
from smartspec_py.core.plan.planner import (
    COST_POLICIES,
    BatchTable,
    PlannerSettings,
    batch_table_of,
    plan,
    without_drafts,
)
from smartspec_py.core.types import MeasuredStep, SequenceId, SequenceView, SpecPlan
from smartspec_py.engines.proposer import Proposer
from smartspec_py.serving.step import Decision, Mode, Reason, StepRecord

PROBE_DRAFT_LEN = 2
"""Draft length of a probe. Two passes separate the fixed cost from the cost per pass."""

TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Controller:
    """Owned by the loop thread. Call `plan`, run the step, then call `observe`."""

    def __init__(
        self,
        profile: CostModel,
        max_draft_len: int,
        max_sequences: int,
        batch_table: BatchTable | None = None,
        max_prefill_len: int = Proposer.max_prefill_len,
    ) -> None:
        """batch_table: None makes one from the profile. max_prefill_len: see `Proposer`."""
        self._max_prefill_len = max_prefill_len
        self._corrections = CostCorrections(profile)
        self._guard = Guard(profile)
        self._plan_time = PlanTime()
        rows = [n for n in TABLE_ROWS if n < min(max_sequences, MAX_ROWS)] + [max_sequences]
        table = batch_table or batch_table_of(profile, INITIAL_MEAN, rows, max_draft_len)
        self.settings = PlannerSettings(batch_table=table)
        self._warm_shapes: Collection[int] = ()

    @property
    def num_switches(self) -> int:
        """Number of times that the guard disabled or enabled speculation."""
        return self._guard.num_switches

    @property
    def time_errors(self) -> tuple[float, float]:
        """Mean relative error of predicted seconds: by the profile, and as corrected."""
        return self._corrections.mean_errors

    @property
    def is_profile_slow(self) -> bool:
        """See `CostCorrections.is_profile_slow`."""
        return self._corrections.is_profile_slow

    def state(self) -> dict[str, Any]:
        """Cost corrections as JSON values."""
        return {"corrections": self._corrections.state()}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """kept: share of the saved evidence to keep, 0 to 1. Raises ValueError for a state of
        another profile."""
        self._corrections.restore(state["corrections"], kept)

    def mode(
        self, context_lens: Sequence[int], has_target: bool = False, has_forced: bool = False
    ) -> Mode:
        """How the next step decides. It does not depend on what can be drafted.

        context_lens: of the decoding sequences. has_target, has_forced: whether any of them has a
        latency target, or forced tokens.
        """
        if not context_lens:
            return Mode.SEARCH
        bucket = len(context_lens), sum(context_lens) / len(context_lens)
        is_due = has_forced or self._guard.account(*bucket).allows_plan
        if self._guard.is_off(*bucket):
            return Mode.GUARD if is_due else Mode.REST
        return Mode.SEARCH if has_target or is_due else Mode.REST

    def plan(
        self,
        views: Sequence[SequenceView],
        mode: Mode = Mode.SEARCH,
        num_prefilling: int = 0,
        warm_shapes: Collection[int] = (),
    ) -> Decision:
        """num_prefilling, warm_shapes: see `PlannerSettings`."""
        self._warm_shapes = warm_shapes
        settings = self._step_settings(num_prefilling)
        learning = [view for view in views if view.policy in COST_POLICIES]
        if not learning:
            return self._decide(views, settings)
        bucket = len(views), _mean_context_len(views)
        if mode is not Mode.SEARCH:
            is_off = mode is Mode.GUARD or self._guard.is_off(*bucket)
            kept = _no_drafts([view for view in learning if not _has_forced_tokens(view)])
            reason = Reason.GUARD if is_off else Reason.PLANNED
            return self._decide(views, replace(settings, forced=kept), reason)
        decision = self._decide(views, settings)
        if num_prefilling:  # a probe would teach nothing: chunks take most of its time
            return decision
        idle = [view for view in learning if not decision.plan.draft_lens[view.sequence]]
        if probed := self._draft_probe(idle, bucket):
            forced = {**_no_drafts(idle), probed.sequence: PROBE_DRAFT_LEN}
            return self._decide(views, replace(settings, forced=forced), Reason.PROBE)
        is_drafting = len(idle) < len(learning)
        if is_drafting and _is_comparable(views) and self._guard.wants_reference(*bucket):
            forced = _no_drafts(learning)
            return self._decide(views, replace(settings, forced=forced), Reason.PROBE)
        return decision

    def plan_failed(self, views: Sequence[SequenceView], num_prefilling: int = 0) -> Decision:
        """The decision for a step without drafts, after an exception. The planner is not asked, so
        the plan expects nothing."""
        forced = _no_drafts(views)
        settings = replace(self._step_settings(num_prefilling), forced=forced)
        cost = self._corrections.cost
        return Decision(SpecPlan(forced), views, cost, settings, reason=Reason.FAILED)

    def observe(self, record: StepRecord) -> None:
        """Learn from the result of a decision, if there were decoding sequences."""
        decision, views = record.decision, record.decision.views
        if record.between_s + record.total_s <= 0.0 or not views:
            return
        step = measured(record, self._warm_shapes, self._max_prefill_len)
        if step.target_s > 0.0:  # else the engine cannot tell its passes from the rest
            self._corrections.observe(step)
        if any(view.policy in COST_POLICIES for view in views):
            self._account_for(decision, step)
        is_shared = step.num_prefill_tokens > 0 or step.is_draft_prefill
        if not is_shared and _is_comparable(views):
            self._guard.observe(step)

    def _draft_probe(
        self, idle: Sequence[SequenceView], bucket: tuple[int, float]
    ) -> SequenceView | None:
        """The sequence that drafts as a probe, if one is due. It comes before references, which
        are due whenever there is no debt. idle: sequences without planned drafts."""
        if self._guard.account(*bucket).is_in_debt:
            return None
        probed = _probe_view(idle)
        if probed and self._corrections.wants_drafts(probed.options[0].draft_prefill_len):
            return probed
        return None

    def _step_settings(self, num_prefilling: int) -> PlannerSettings:
        """The planner's settings for the next step."""
        warm_shapes = () if num_prefilling else self._warm_shapes  # prompt chunks have many sizes
        return replace(self.settings, num_prefilling=num_prefilling, warm_shapes=warm_shapes)

    def _decide(
        self,
        views: Sequence[SequenceView],
        settings: PlannerSettings,
        reason: Reason = Reason.PLANNED,
    ) -> Decision:
        cost = self._corrections.cost
        return Decision(plan(views, cost, settings), views, cost, settings, reason=reason)

    def _account_for(self, decision: Decision, step: MeasuredStep) -> None:
        """Charge what the step may have lost, and earn by it."""
        bucket = step.batch_size, step.context_len
        account, is_probe = self._guard.account(*bucket), decision.reason is Reason.PROBE
        is_searched = is_probe or not decision.settings.forced
        step_s = step.total_s - step.plan_s
        if is_probe and not self._guard.is_in_trial(*bucket):
            if not step.is_draft_prefill:  # else PREFILL_SHARE covers it
                account.charge_probe(step_s)
        elif decision.reason is Reason.GUARD or (is_searched and not is_probe):
            drafts = step.is_speculating or step.is_draft_prefill
            pays = drafts and self._pays(decision)
            account.charge_plan(step.plan_s, step_s, pays)
        self._guard.earn(*bucket, step_s)
        self._plan_time.observe(step.plan_s if is_searched else None)

    def _pays(self, decision: Decision) -> bool:
        steady = replace(decision.cost, shape_change_s=0.0)
        none = without_drafts(decision.views, steady, decision.settings)
        return self._plan_time.pays(decision.plan, none)


def measured(
    record: StepRecord, warm_shapes: Collection[int], max_prefill_len: int
) -> MeasuredStep:
    """What is learned from a step. Its time counts from the end of the step before, unless the loop
    was idle.

    warm_shapes: before the step, see `PlannerSettings`. max_prefill_len: see `Proposer`.
    """
    decision, drafted, fixed_s = record.decision, record.drafted, 0.0
    passes = []  # of the sequences that a draft model drafted for
    prefill_lens, num_unread = [], 0  # of those that drafted, and of those that must still wait
    for view in decision.views:
        option = decision.plan.option(view)
        if length := drafted.get(view.sequence):
            fixed_s += option.draft_s
            if option.has_draft_passes:
                passes.append(option.depth or length)
                prefill_lens.append(option.draft_prefill_len)
        elif decision.plan.draft_lens[view.sequence]:
            num_unread += option.draft_prefill_len
    if num_unread:
        prefill_lens.append(min(num_unread, max(0, max_prefill_len - sum(prefill_lens))))
    num_late = len(prefill_lens) - prefill_lens.count(0)
    numbers = range(1, max(passes, default=0) + 1)
    rows = [sum([num >= number for num in passes]) for number in numbers]
    draft_s = max(0.0, record.draft_s - fixed_s) if prefill_lens else 0.0
    return MeasuredStep(
        batch_size=record.batch_size,
        num_tokens=record.batch_size + sum(drafted.values()),
        context_len=_mean_context_len(decision.views),
        num_generated=record.num_generated,
        # Late sequences are read in a pass of their own.
        draft_rows=(num_late, *rows) if num_late else tuple(rows),
        target_s=record.target_s,
        draft_s=draft_s,
        num_drafting=sum(num > 0 for num in drafted.values()),
        fixed_draft_s=record.draft_s - draft_s if fixed_s else 0.0,
        total_s=record.between_s + record.total_s,
        plan_s=record.views_s + record.plan_s,
        num_prefill_tokens=record.num_prefill_tokens,
        num_draft_prefill_tokens=sum(prefill_lens),
        is_warm=record.num_target_tokens in warm_shapes,
    )


def _mean_context_len(views: Sequence[SequenceView]) -> float:
    return sum([view.context_len for view in views]) / len(views)


def _is_comparable(views: Sequence[SequenceView]) -> bool:
    """Whether the guard compares such steps: those in which it may stop all drafts."""
    return {view.policy for view in views}.issubset(("none", *COST_POLICIES))


def _has_forced_tokens(view: SequenceView) -> bool:
    """Whether a grammar forces its next tokens. Such drafts are nearly always accepted."""
    return any(one.proposer == GRAMMAR and one.max_draft_len > 0 for one in view.options)


def _no_drafts(views: Sequence[SequenceView]) -> dict[SequenceId, int]:
    """`PlannerSettings.forced` for no drafts."""
    return dict.fromkeys([view.sequence for view in views], 0)


def _probe_view(views: Sequence[SequenceView]) -> SequenceView | None:
    """The sequence whose first option costs least to start drafting: with the least prefill."""
    able = [v for v in views if v.options[0].max_draft_len and v.options[0].has_draft_passes]
    return min(
        able, key=lambda view: (view.options[0].draft_prefill_len, view.sequence), default=None
    )
