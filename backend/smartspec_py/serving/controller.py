"""Decides draft lengths while serving: the planner, what contradicts it, and what both learn.

Each step: the planner chooses with costs as corrected so far; the guard may forbid speculation that
was measured to lose time; and now and then a step is run for what it teaches (a *probe*: without
drafts where it was to draft, or the other way round), within a budget of 1 % of the time. Sequences
under `none` and `fixed:K` are done as they ask; neither guard nor probes touch them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smartspec_py.core.acceptance import INITIAL_MEAN
from smartspec_py.core.confidence import RecentGoodput, StepPrices
from smartspec_py.core.corrections import CostCorrections, StepCost
from smartspec_py.core.cost import MAX_ROWS, CostModel
from smartspec_py.core.guard import Guard, ProbeBudget, Sample
from smartspec_py.core.plan_budget import PlanBudget
from smartspec_py.core.planner import BatchTable, PlannerSettings, batch_table_of, plan
from smartspec_py.core.policies import GOODPUT_CONFIDENCE
from smartspec_py.core.served import ServedCosts
from smartspec_py.core.types import SequenceId, SequenceView, SpecPlan

PROBE_DRAFT_LEN = 2
"""Drafts of a probe that drafts: one pass more than the least, so that both costs show."""

PLANNED, GUARD, PROBE = "planned", "guard", "probe"

TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

LEARNING = ("goodput", GOODPUT_CONFIDENCE, "goodput_global", "batch_table")
"""Policies that choose by costs: those that the guard may stop and probes may use."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step did and took. Seconds.

    num_drafted: drafts as made, by sequence; they may be fewer than planned, or more. draft_lens:
    those of them that were verified; sequences without any are left out. num_background: sequences
    that generated beside those of the views. plan_s: of total_s, what `Controller.plan` took.
    """

    views: Sequence[SequenceView]
    plan: SpecPlan
    num_drafted: Mapping[SequenceId, int]
    draft_lens: Mapping[SequenceId, int]
    num_generated: int
    num_prefill_tokens: int
    draft_s: float
    target_s: float
    total_s: float  # from the end of the step before, where the loop was not idle
    num_background: int = 0
    plan_s: float = 0.0

    @property
    def num_rows(self) -> int:
        return len(self.views) + self.num_background


class Controller:
    """Owned by the loop thread. `plan`, then `observe` what became of it."""

    def __init__(
        self,
        profile: CostModel,
        max_draft_len: int,
        max_sequences: int,
        batch_table: BatchTable | None = None,
    ) -> None:
        """batch_table: None has one made from the profile."""
        self._corrections = CostCorrections(profile)
        self._served = ServedCosts(profile)
        self._budget = ProbeBudget()
        self._guard = Guard(profile, self._budget)
        self._plan_budget = PlanBudget()
        rows = [n for n in TABLE_ROWS if n < min(max_sequences, MAX_ROWS)] + [max_sequences]
        table = batch_table or batch_table_of(profile, INITIAL_MEAN, rows, max_draft_len)
        self._settings = PlannerSettings(batch_table=table)
        self._recent = RecentGoodput()
        self._is_probe = self._is_rest = False
        self._num_rows = 1
        self.num_delayed = self.num_background = 0
        """That the last plan was asked with."""
        self.why = PLANNED
        """Whose choice the last plan was."""
        self.asked: Sequence[SequenceView] = ()
        """What the planner was asked for the last plan: the views, or what took their place."""

    @property
    def settings(self) -> PlannerSettings:
        return self._settings

    @property
    def cost(self) -> CostModel:
        """As corrected for as many rows as the last plan has: what it was planned with, and what
        has been learned since."""
        return self._corrections.at(self._num_rows)

    @property
    def served_cost(self) -> CostModel:
        """As steps were on average since the start: what a simulation of this server charges."""
        return self._served.cost

    @property
    def num_switches(self) -> int:
        """Times that the guard forbade speculation, or allowed it again."""
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

    def plan(
        self, views: Sequence[SequenceView], num_delayed: int = 0, num_background: int = 0
    ) -> SpecPlan:
        """num_delayed, num_background: see `PlannerSettings`."""
        self._is_probe, self._is_rest, self.why = False, False, PLANNED
        self.num_delayed, self.num_background = num_delayed, num_background
        self._num_rows = num_rows = len(views) + num_background
        free = [view for view in views if view.policy in LEARNING]
        if not free:
            return self._ask(views)
        context_len = sum(view.context_len for view in views) / len(views)
        if not self._guard.allows(num_rows, context_len):
            return self._without_drafts(views, GUARD)
        if self._rests(num_rows, free):
            self._is_rest = True
            return self._without_drafts(views, PLANNED)
        chosen = self._ask(views)
        if any(chosen.draft_lens[view.sequence] for view in free):
            wants = self._guard.wants_reference(num_rows, context_len)
            if wants or (self._budget.allows() and self._corrections.wants_contrast(True)):
                self._is_probe = True
                return self._without_drafts(views, PROBE)
        elif self._wants_draft():
            return self._with_a_draft(views, chosen)
        return chosen

    def prices(self, views: Sequence[SequenceView], spec_plan: SpecPlan) -> StepPrices | None:
        """What drafts cost in the step that was just planned, for those whose confidence decides
        how deep; None where nobody asks for that, or the plan must be kept to: a probe is run for
        what it teaches, and a latency target is met by all draft lengths together."""
        wants = any(
            v.policy == GOODPUT_CONFIDENCE and spec_plan.draft_lens[v.sequence] for v in views
        )
        if not wants or self.why != PLANNED or any(v.slo_s_per_token is not None for v in views):
            return None
        num_rows, cost = self._num_rows, self.cost
        most = sum(
            max([v.max_draft_len, *(w.max_draft_len for w in v.alternatives)]) for v in views
        )
        context_len = sum(view.context_len for view in views) / len(views)
        num_tokens = np.arange(num_rows, num_rows + most + 1, dtype=np.float64)
        verify_s = cost.targets_s(num_rows, num_tokens, context_len) + cost.step_host_s(num_rows)
        return StepPrices(verify_s, cost.draft_pass_s, self._recent.price or spec_plan.goodput)

    def observe(self, step: Measured) -> None:
        """Learn from a step that had decoding sequences."""
        if not step.views or step.total_s <= 0.0:
            return
        context_len = sum(view.context_len for view in step.views) / len(step.views)
        num_verified = sum(step.draft_lens.values())
        drafting = _drafting(step)
        if step.target_s > 0.0:  # else the engine cannot tell its passes from the rest
            step_cost = _step_cost(step, drafting, num_verified, context_len)
            self._served.observe(step_cost, self._corrections.observe(step_cost))
        if step.num_prefill_tokens == 0:
            self._recent.observe(step.num_generated, step.total_s)
        is_speculating = any(step.num_drafted.values())
        if any(view.policy in LEARNING for view in step.views):
            self._observe_plan(step, context_len, is_speculating)
            # Probes are paid by those that may be probed, and so saved up from their time alone.
            self._budget.observe(step.total_s, self._is_probe)
        if step.num_prefill_tokens == 0 and all(
            view.policy in ("none", *LEARNING) for view in step.views
        ):
            self._guard.observe(
                Sample(
                    num_rows=step.num_rows,
                    context_len=context_len,
                    num_generated=step.num_generated,
                    step_s=step.total_s if is_speculating else step.total_s - step.plan_s,
                    is_speculating=is_speculating,
                    has_catch_up=any(view.draft_lag for view, _ in drafting),
                )
            )

    def _rests(self, num_rows: int, free: Sequence[SequenceView]) -> bool:
        """Whether the last plan was not worth it, and the next must wait; not where a latency
        target may ask for drafts."""
        has_targets = any(view.slo_s_per_token is not None for view in free)
        return not (has_targets or self._plan_budget.allows(num_rows))

    def _observe_plan(self, step: Measured, context_len: float, is_speculating: bool) -> None:
        num_rows, planned = step.num_rows, step.plan
        if self._is_rest or self.why == GUARD:
            self._plan_budget.observe(num_rows, None, step.total_s)
            return
        cost = self._corrections.at(num_rows)
        none_s = cost.target_s(num_rows, num_rows, context_len) + cost.step_host_s(num_rows)
        pays = self._is_probe or (
            is_speculating
            and self._plan_budget.pays(
                planned.expected_tokens, planned.expected_s, num_rows, none_s
            )
        )
        self._plan_budget.observe(num_rows, step.plan_s, step.total_s, is_poor=not pays)

    def _wants_draft(self) -> bool:
        return self._budget.allows() and self._corrections.wants_contrast(False)

    def _ask(self, views: Sequence[SequenceView]) -> SpecPlan:
        self.asked = views
        settings = self._settings
        if self.num_delayed or self.num_background:
            settings = replace(
                settings, num_delayed=self.num_delayed, num_background=self.num_background
            )
        return plan(views, self.cost, settings)

    def _without_drafts(self, views: Sequence[SequenceView], why: str) -> SpecPlan:
        """The plan in which whoever leaves it to us does not draft."""
        self.why = why
        still = [replace(v, policy="none") if v.policy in LEARNING else v for v in views]
        return self._ask(still)

    def _with_a_draft(self, views: Sequence[SequenceView], chosen: SpecPlan) -> SpecPlan:
        """Let one sequence draft, the one for which it costs least to begin."""
        able = [v for v in views if v.policy in LEARNING and v.max_draft_len and v.has_draft_passes]
        if not able:
            return chosen
        self._is_probe, self.why = True, PROBE
        prober = min(able, key=lambda view: (view.draft_lag, view.sequence))
        probing = [
            replace(v, policy=f"fixed:{PROBE_DRAFT_LEN}" if v is prober else "none")
            if v.policy in LEARNING
            else v
            for v in views
        ]
        return self._ask(probing)


def _drafting(step: Measured) -> list[tuple[SequenceView, int]]:
    """The sequences for which a draft model ran, with their drafts."""
    found = []
    for view in step.views:
        choice = step.plan.choices.get(view.sequence, 0)
        option = view if choice == 0 else view.alternatives[choice - 1]
        length = step.num_drafted.get(view.sequence, 0)
        if length and option.has_draft_passes:
            found.append((view, length))
    return found


def _step_cost(
    step: Measured,
    drafting: Sequence[tuple[SequenceView, int]],
    num_verified: int,
    context_len: float,
) -> StepCost:
    lengths = [length for _, length in drafting]
    num_late = sum(view.draft_lag > 0 for view, _ in drafting)
    draft_s = step.draft_s if drafting else 0.0
    return StepCost(
        num_rows=step.num_rows,
        num_tokens=step.num_rows + num_verified,
        context_len=context_len,
        draft_rows=(
            *((num_late,) if num_late else ()),  # they are read in a pass of their own
            *(sum(n >= p for n in lengths) for p in range(1, max(lengths, default=0) + 1)),
        ),
        target_s=step.target_s,
        draft_s=draft_s,
        host_s=max(0.0, step.total_s - step.target_s - draft_s),
        num_prefill_tokens=step.num_prefill_tokens,
        num_catch_up_tokens=sum(view.draft_lag for view, _ in drafting),
        num_charged_tokens=num_verified
        + sum(view.context_len for view in step.views if view.sequence in step.draft_lens),
    )
