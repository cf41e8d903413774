"""The planner against an exhaustive search over every plan of small steps.

Up to 5 sequences of up to 4 drafts. The gap is the part of the best goodput that a plan falls short
of.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from oracle import Kind, every_plan, random_cost, random_views

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.planner import PlannerSettings, evaluate, plan
from smartspec_py.core.types import SequenceView, SpecPlan

KINDS = {
    # Affine at every depth: the best prefix of the best depth is the best plan.
    "affine": (Kind(), 1e-9),
    "jagged": (Kind(jitter=0.3), 0.02),
    "stepped": (Kind(is_stepped=True), 0.02),
    "stale draft caches": (Kind(draft_prefill_s=0.05), 0.02),
    "jagged, stale": (Kind(jitter=0.3, draft_prefill_s=0.05), 0.035),
    "drafted and looked up": (Kind(is_mixed=True), 0.02),
    "drafted and looked up, jagged, stale": (Kind(0.3, 0.05, is_mixed=True), 0.02),
    "drafted and looked up, stepped, stale": (
        Kind(0.0, 0.05, is_mixed=True, is_stepped=True),
        0.02,
    ),
    "host": (Kind(draft_host_s=0.02), 0.02),
    "two ways": (Kind(is_mixed=True, has_options=True), 0.04),
    "trees": (Kind(has_trees=True, max_rows=3), 0.04),
    "trees and chains, jagged": (Kind(0.1, is_mixed=True, has_trees=True, max_rows=3), 0.05),
    "two ways, jagged, stale": (Kind(0.3, 0.05, is_mixed=True, has_options=True), 0.12),
}


def cases(kind: Kind, seed: int, num: int) -> Sequence[tuple[list[SequenceView], CostModel]]:
    """Ten steps for each cost model."""
    rng = random.Random(seed)
    found = []
    for _ in range(num // 10):
        cost = random_cost(rng, kind)
        found += [(random_views(rng, kind), cost) for _ in range(10)]
    return found


def test_a_plan_without_drafts_is_evaluated_alike() -> None:
    """It takes a shorter way through the code."""
    for number, (views, cost) in enumerate(cases(Kind(draft_prefill_s=0.05), 5, 50)):
        forced = {view.sequence: 0 for view in views}
        warm = ([], [len(views), 3], [7])[number % 3]
        settings = PlannerSettings(forced=forced, num_prefilling=1, warm_shapes=warm)
        expected = evaluate(views, [0] * len(views), cost, settings=settings)
        found = plan(views, cost, settings)
        unforced = replace(settings, forced={})
        idle = plan([replace(view, policy="none") for view in views], cost, unforced)
        for one in (found, idle):
            assert one.draft_lens == expected.draft_lens
            assert one.expected_tokens == pytest.approx(expected.expected_tokens)
            assert one.expected_s == pytest.approx(expected.expected_s)


@pytest.mark.parametrize("name", KINDS)
def test_gap_to_every_plan(name: str) -> None:
    """150 steps of a kind, with fixed seeds. No uniform draft length is better, and the expected
    tokens and seconds are those of the chosen lengths."""
    kind, worst_bound = KINDS[name]
    gaps = []
    for views, cost in cases(kind, 7, 150):
        chosen = plan(views, cost)
        expected = evaluate(views, [*chosen.draft_lens.values()], cost, chosen.choices)
        assert (chosen.draft_lens, chosen.choices) == (expected.draft_lens, expected.choices)
        # Sums of one sequence are made in another order.
        assert chosen.expected_tokens == pytest.approx(expected.expected_tokens, rel=1e-12)
        assert chosen.expected_s == pytest.approx(expected.expected_s, rel=1e-12)
        for_all = [replace(view, policy="goodput_global") for view in views]
        assert chosen.goodput >= plan(for_all, cost).goodput * (1 - 1e-9)
        gaps.append(1 - chosen.goodput / every_plan(views, cost).best_goodput)
    found = f"mean gap {fmean(gaps):.4%}, worst {max(gaps):.3%}"
    assert min(gaps) > -1e-9
    assert fmean(gaps) <= min(worst_bound, 0.001), found
    assert max(gaps) <= worst_bound, found


def test_a_single_sequence_has_the_best_plan() -> None:
    """Its plan takes a shorter way through the code. Some steps have requests that read their
    prompt, and sizes that need no preparation."""
    kind = Kind(0.3, 0.05, is_mixed=True, has_options=True, has_trees=True, max_rows=1)
    for number, (views, cost) in enumerate(cases(kind, 13, 300)):
        cost = replace(cost, shape_change_s=0.3, draft_host_s=0.02)
        settings = PlannerSettings(
            num_prefilling=number % 2, warm_shapes=((), (1,), (1, 3))[number % 3]
        )
        (view,) = views
        every = [
            evaluate(views, [length], cost, {view.sequence: option}, settings)
            for option in range(len(view.options))
            for length in range(view.options[option].max_draft_len + 1)
        ]
        held = 8.0 * settings.num_prefilling
        chosen = plan(views, cost, settings)
        assert (held + chosen.expected_tokens) / chosen.expected_s == pytest.approx(
            max((held + one.expected_tokens) / one.expected_s for one in every), rel=1e-12
        )


@pytest.mark.parametrize(
    "kind",
    [
        Kind(has_targets=True),
        Kind(0.3, 0.05, has_targets=True),
        Kind(0.3, 0.05, is_mixed=True, has_options=True, has_targets=True),
    ],
)
def test_latency_targets(kind: Kind) -> None:
    """Nearly always as many targets are met as any plan meets, and then nearly the best goodput."""
    missed, gaps = [], []
    for views, cost in cases(kind, 9, 200):
        chosen, every = plan(views, cost), every_plan(views, cost)
        num_met = met(views, chosen, cost)
        missed.append(every.most_met - num_met)
        if not missed[-1]:
            best = every.best_score(lambda e, t: e / t, num_met)
            gaps.append(1 - chosen.goodput / best)
    found = f"{sum(map(bool, missed))} of {len(missed)} miss one, mean gap {fmean(gaps):.3%}"
    assert min(missed) == 0
    assert min(gaps) > -1e-9
    assert sum(map(bool, missed)) <= 2, found
    assert fmean(gaps) <= 0.006, found


def met(views: Sequence[SequenceView], chosen: SpecPlan, cost: CostModel) -> int:
    """Sequences whose target the plan meets, by the rule of `search.best_of_each`."""
    late_s = 0.0
    for view in views:
        if chosen.draft_lens[view.sequence]:
            length = chosen.option(view).draft_prefill_len
            late_s += cost.draft_prefill_s * length * (1 - 1 / max(1.0, view.remaining / 2))
    return sum(_is_met(view, chosen, chosen.expected_s + late_s) for view in views)


def _is_met(view: SequenceView, chosen: SpecPlan, seconds: float) -> bool:
    if view.slo_s_per_token is None:
        return True
    tokens, survives = 1.0, 1.0
    for prob in chosen.option(view).accept_probs[: chosen.draft_lens[view.sequence]]:
        survives *= prob
        tokens += survives
    ahead = view.slack_s / min(max(view.remaining, 1), 32)
    return seconds <= (view.slo_s_per_token + ahead) * tokens
