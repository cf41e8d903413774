"""Engines that generate bursts by themselves and count whole texts: TensorRT-LLM's kind."""

from __future__ import annotations

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn.corrections import CostCorrections
from smartspec_py.core.plan.planner import PlannerSettings, evaluate, plan
from smartspec_py.core.types import DraftOption, MeasuredStep, SequenceView

# 1 s and 0.1 s for each row, 0.05 s for each token beyond one a row.
ROWS = (1, 8)
TABLE = PassTable(ROWS, (1, 9), tuple((1 + 0.1 * n, 1 + 0.1 * n + 0.05 * 8 * n) for n in ROWS))
COST = CostModel(TABLE, draft=PassTable((1,), (1,), ((0.05,),)))


def view(sequence: int, context_len: int = 100, policy: str = "goodput") -> SequenceView:
    return SequenceView(sequence, context_len, 1000, policy, (DraftOption(4, (0.8,) * 4),))


def test_who_generates_beside_the_step_shares_its_pass() -> None:
    """2 planned and 3 beside them: a pass of 5 rows, which brings 3 tokens more."""
    beside = PlannerSettings(num_background=3)
    found = evaluate([view(1), view(2)], [2, 0], COST, settings=beside)
    assert found.expected_s == pytest.approx(1.5 + 0.05 * 2 + 0.05 * 2)
    assert found.expected_tokens == pytest.approx(3 + 1 + 1 + 0.8 + 0.64)


def test_who_generates_beside_the_step_makes_its_seconds_dearer() -> None:
    """Alone a draft is nearly free; a hundred others would wait for it."""
    alone, beside = (
        plan([view(1)], COST, PlannerSettings(num_background=n)).draft_lens[1] for n in (0, 100)
    )
    assert alone == 4
    assert beside == 0


def test_a_text_that_is_counted_in_full_takes_iterations() -> None:
    """4 texts of 996 tokens and 4 drafts are 4 iterations of 1,000: 3 more than one."""
    cost = CostModel(TABLE, COST.draft, max_charged_tokens=1000)
    views = [view(i, 996) for i in range(4)]
    plain = evaluate(views, [4] * 4, COST).expected_s
    assert evaluate(views, [4] * 4, cost).expected_s == pytest.approx(plain + 3 * 1.1)
    # Without drafts nothing is sent again.
    assert evaluate(views, [0] * 4, cost) == evaluate(views, [0] * 4, COST)
    assert plan(views, cost).draft_lens == dict.fromkeys(range(4), 0)
    # One iteration has room for a single text.
    assert plan([view(1, 996)], cost) == plan([view(1, 996)], COST)


def test_what_is_charged_is_no_error_of_the_profile() -> None:
    """Steps that took what their iterations take teach nothing."""
    cost = CostModel(TABLE, COST.draft, max_charged_tokens=1000)
    corrections = CostCorrections(cost)
    step = MeasuredStep(
        batch_size=4,
        num_tokens=20,
        context_len=996,
        num_generated=20,
        draft_rows=(4,) * 4,
        target_s=cost.target_s(4, 20, 996) + 3 * 1.1,
        draft_s=0.2,
        total_s=cost.target_s(4, 20, 996) + 3 * 1.1 + 0.2,
        num_charged_tokens=4000,
    )
    for _ in range(100):
        corrections.observe(step)
    assert corrections.cost.target_base == pytest.approx(1.0)
    assert corrections.cost.target_slope == pytest.approx(1.0)
