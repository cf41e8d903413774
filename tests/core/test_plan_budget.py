"""Plans that are not worth their time: what they may take, and when one pays."""

from __future__ import annotations

from smartspec_py.core.plan.plan_budget import PlanBudget
from smartspec_py.core.types import SpecPlan


def test_a_poor_plan_is_paid_for_before_the_next() -> None:
    """A plan of 1 s in a step of 12.5 s, of which 1 % is for it: 7/8 s are owed, for seven
    steps. With half or twice the sequences it says nothing."""
    budget = PlanBudget()
    budget.observe(4, 1.0, 12.5, is_poor=True)
    assert [rows for rows in range(1, 12) if budget.allows(rows)] == [1, 2, 8, 9, 10, 11]
    for _ in range(6):
        budget.observe(4, None, 12.5)
        assert not budget.allows(4)
    budget.observe(4, None, 12.5)
    assert budget.allows(4)
    budget.observe(4, 1.0, 12.5, is_poor=True)
    budget.observe(4, 1.0, 12.5)  # a good one
    assert budget.allows(4)


def test_a_very_long_plan_is_paid_for_in_64_steps() -> None:
    budget = PlanBudget()
    budget.observe(4, 1000.0, 12.5, is_poor=True)
    num_rested = 0
    while not budget.allows(4):
        budget.observe(4, None, 12.5)
        num_rested += 1
    assert num_rested == 64


def test_a_plan_pays_where_its_tokens_are_sooner_with_the_time_it_took() -> None:
    """4 tokens in 1 s without drafts, 6 in 1.2 s with them: 1.25 times as fast, unless to plan
    takes more than 0.3 s. The host's time has what plans took so far in it, 20 of 20 here."""
    for plan_s, pays in ((0.29, True), (0.31, False)):
        budget = PlanBudget()
        for _ in range(600):
            budget.observe(4, plan_s, 1.2 + plan_s)
        assert budget.pays(SpecPlan({}, 6.0, 1.2 + plan_s), SpecPlan({}, 4.0, 1.0 + plan_s)) is pays
