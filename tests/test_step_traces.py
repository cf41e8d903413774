"""Step traces: written, read, and decided again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import PlannerSettings, plan
from smartspec_py.core.types import NO_TOKEN, DraftOption, SequenceView, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.serving.step import Decision, Reason, StepRecord
from smartspec_py.serving.step_trace import NUMBERS, header_line, step_line
from smartspec_sim.traces import TraceError, parse_steps

COST = CostModel(
    target=PassTable((1, 64), (1, 16), ((0.010, 0.013), (0.020, 0.070))),
    draft=PassTable((1, 64), (1,), ((0.001,), (0.002,))),
    draft_prefill_s=1 / 3e4,
)
DEARER = replace(COST, draft=PassTable((1, 64), (1,), ((0.008,), (0.016,))))


def text_of(steps: Iterable[StepRecord], cost: CostModel = COST) -> str:
    return header_line(cost, None) + "".join(map(step_line, steps))


def random_views(rng: np.random.Generator) -> list[SequenceView]:
    """Up to 12 sequences; every field varies."""
    views = []
    for sequence in range(int(rng.integers(0, 12))):
        most = int(rng.integers(0, 8))
        views.append(
            SequenceView(
                sequence=sequence,
                context_len=int(rng.integers(1, 500)),
                remaining=int(rng.integers(1, 100)),
                policy=str(rng.choice(["none", "fixed:3", "goodput", "goodput"])),
                options=(
                    DraftOption(
                        max_draft_len=most,
                        accept_probs=tuple(rng.random(most).tolist()),
                        draft_prefill_len=int(rng.integers(0, 100)),
                        has_draft_passes=bool(rng.random() < 0.7),
                    ),
                ),
            )
        )
    return views


def recorded(seeds: range) -> list[StepRecord]:
    steps = []
    for seed in seeds:
        views = random_views(np.random.default_rng(seed))
        forced = {v.sequence: seed % 4 for v in views} if seed % 5 == 0 else {}
        settings = PlannerSettings(None, seed % 3, [seed % 5] if seed % 2 else [], forced)
        cost = replace(COST, draft_factor=1 + seed % 2, shape_change_s=0.002 * (seed % 3))
        reason = Reason.GUARD if forced else Reason.PLANNED
        decision = Decision(plan(views, cost, settings), views, cost, settings, reason)
        lengths = {view.sequence: seed for view in views}
        steps.append(
            StepRecord(
                decision=decision,
                events=[Event(v.sequence, (NO_TOKEN,) * 2, 3, 1) for v in views],
                drafted=lengths,
                **dict.fromkeys(NUMBERS, seed / 7),
            )
        )
    return steps


def test_a_recorded_plan_is_decided_again() -> None:
    """From the file alone, to the last bit of what is expected; another cost decides otherwise."""
    steps = recorded(range(60))
    again = parse_steps("steps", text_of(steps))
    assert again == steps
    plans = [step.decision.plan for step in steps]
    inputs = [(one.views, one.cost, one.settings) for one in (step.decision for step in again)]
    assert [plan(*of_step) for of_step in inputs] == plans
    dearer = [plan(v.views, DEARER, v.settings) for v in (step.decision for step in steps)]
    assert any(new.draft_lens != old.draft_lens for new, old in zip(dearer, plans, strict=True))
    chosen = [k for old in plans for k in old.draft_lens.values()]
    assert len(set(chosen)) > 4, "the views must leave something to decide"


def test_cost_models_come_back_with_what_prompts_take() -> None:
    cost = replace(COST, prompt=PassTable((1,), (1, 16), ((1 / 3, 2.0),)))
    (again,) = parse_steps("steps", text_of(recorded(range(1)), cost))
    assert again.decision.cost == cost


def test_arrays_and_options_are_written_as_plain_numbers() -> None:
    """What the planner hands out may be NumPy's; it comes back as tuples of the same numbers."""
    probs = (0.1, 0.7)
    options = DraftOption(2, probs), DraftOption(2, probs, has_draft_passes=False)
    view = SequenceView(4, 10, 9, "none", options)
    as_arrays = tuple(option._replace(accept_probs=np.array(probs)) for option in options)
    arrays = replace(view, options=as_arrays)
    spec_plan = SpecPlan({4: 2}, 1.5, 0.25, {4: 1})
    numpys = SpecPlan({4: int(np.int64(2))}, np.float64(1.5), np.float64(0.25), {4: np.int64(1)})
    (step,) = recorded(range(1))
    step = replace(step, decision=replace(step.decision, views=[arrays], plan=numpys))
    (again,) = parse_steps("steps", text_of([step]))
    assert again.decision.views == [view]
    assert again.decision.plan == spec_plan


def test_a_step_without_a_field_is_refused() -> None:
    text = text_of(recorded(range(2))).replace('"factors"', '"other"')
    with pytest.raises(TraceError, match="steps, line 2: 'factors' is missing"):
        parse_steps("steps", text)
