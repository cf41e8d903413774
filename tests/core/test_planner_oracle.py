"""The planner against an exhaustive search over every plan of small steps, and of its own cuts.

Up to 5 sequences of up to 4 drafts. The gap is the part of the best goodput that a plan falls short
of; what is found goes into the report (`--junit-xml=FILE -o junit_family=xunit1`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from oracle import Kind, every_plan, random_cost, random_views

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan import ranking
from smartspec_py.core.plan.planner import PlannerSettings, evaluate, plan
from smartspec_py.core.types import SequenceView, SpecPlan

Record = Callable[[str, object], None]

KINDS = {
    # Affine at every depth: the best prefix of the best depth is the best plan.
    "affine": (Kind(), 1e-9),
    "jagged": (Kind(jitter=0.3), 0.02),
    "stepped": (Kind(is_stepped=True), 0.02),
    "stale draft caches": (Kind(catch_up_s=0.05), 0.02),
    "jagged, stale": (Kind(jitter=0.3, catch_up_s=0.05), 0.035),
    "drafted and looked up": (Kind(is_mixed=True), 0.02),
    "drafted and looked up, jagged, stale": (Kind(0.3, 0.05, is_mixed=True), 0.02),
    "drafted and looked up, stepped, stale": (
        Kind(0.0, 0.05, is_mixed=True, is_stepped=True),
        0.02,
    ),
    "two ways": (Kind(is_mixed=True, has_options=True), 0.02),
    "two ways, jagged, stale": (Kind(0.3, 0.05, is_mixed=True, has_options=True), 0.05),
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
    for number, (views, cost) in enumerate(cases(Kind(catch_up_s=0.05), 5, 50)):
        forced = {view.sequence: 0 for view in views}
        before = (None, len(views), 7)[number % 3]
        settings = PlannerSettings(
            forced=forced, num_background=number % 2, num_prefilling=1, last_num_tokens=before
        )
        expected = evaluate(views, [0] * len(views), cost, settings=settings)
        found = plan(views, cost, settings)
        unforced = replace(settings, forced={})
        idle = plan([replace(view, policy="none") for view in views], cost, unforced)
        for one in (found, idle):
            assert one.draft_lens == expected.draft_lens
            assert one.expected_tokens == pytest.approx(expected.expected_tokens)
            assert one.expected_s == pytest.approx(expected.expected_s)


@pytest.mark.parametrize("name", KINDS)
def test_gap_to_every_plan(name: str, record_property: Record) -> None:
    """300 steps of a kind. Seeded, so that a failure is a change of the planner and no chance."""
    kind, worst_bound = KINDS[name]
    gaps = [
        1 - plan(views, cost).goodput / every_plan(views, cost).best_goodput
        for views, cost in cases(kind, 7, 300)
    ]
    found = f"mean gap {fmean(gaps):.4%}, worst {max(gaps):.3%}"
    record_property("gap", found)
    assert min(gaps) > -1e-9
    assert fmean(gaps) <= min(worst_bound, 0.001), found
    assert max(gaps) <= worst_bound, found


@pytest.mark.parametrize(
    "kind",
    [
        Kind(has_targets=True),
        Kind(0.3, 0.05, has_targets=True),
        Kind(0.3, 0.05, is_mixed=True, has_options=True, has_targets=True),
    ],
)
def test_latency_targets(kind: Kind, record_property: Record) -> None:
    """Nearly always as many targets are met as any plan meets, and then nearly the best goodput."""
    missed, gaps = [], []
    for views, cost in cases(kind, 9, 200):
        chosen, every = plan(views, cost), every_plan(views, cost)
        num_met = met(views, chosen)
        missed.append(every.most_met - num_met)
        if not missed[-1]:
            best = every.best_score(lambda e, t: e / t, num_met)
            gaps.append(1 - chosen.goodput / best)
    found = f"{sum(map(bool, missed))} of {len(missed)} miss one, mean gap {fmean(gaps):.3%}"
    record_property("targets", f"{found}, worst {max(gaps):.2%}")
    assert min(missed) == 0
    assert min(gaps) > -1e-9
    assert sum(map(bool, missed)) <= 2, found
    assert fmean(gaps) <= 0.005, found


def met(views: Sequence[SequenceView], chosen: SpecPlan) -> int:
    """Sequences whose target the plan meets, by the rule of `search.best_of_each`."""
    return sum(_is_met(view, chosen) for view in views)


def _is_met(view: SequenceView, chosen: SpecPlan) -> bool:
    if view.slo_s_per_token is None:
        return True
    tokens, survives = 1.0, 1.0
    for prob in chosen.option(view).accept_probs[: chosen.draft_lens[view.sequence]]:
        survives *= prob
        tokens += survives
    ahead = view.slack_s / min(max(view.remaining, 1), 32)
    return chosen.expected_s <= (view.slo_s_per_token + ahead) * tokens


def test_the_oracle_agrees_with_evaluate() -> None:
    """Both work out the same sums: the best of every plan is one that `evaluate` can be asked."""
    for views, cost in cases(Kind(0.3, 0.05, is_mixed=True, max_rows=2), 3, 20):
        caps = [v.options[0].max_draft_len for v in views]
        plans = [[]] if not caps else [[k] for k in range(caps[0] + 1)]
        for cap in caps[1:]:
            plans = [[*lens, k] for lens in plans for k in range(cap + 1)]
        every = every_plan(views, cost)
        outcomes = [evaluate(views, lens, cost) for lens in plans]
        assert [o.expected_s for o in outcomes] == pytest.approx(every.seconds.tolist())
        assert [o.expected_tokens for o in outcomes] == pytest.approx(every.tokens.tolist())


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_strides_lose_nothing_that_counts(
    jitter: float, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """48 sequences of 8 drafts: 384 slots, six times as many as are scored at first."""
    rng = random.Random(13)
    kind = Kind(jitter=jitter, catch_up_s=0.01, max_rows=1, max_draft_len=8)
    gaps = []
    for _ in range(20):
        cost = large_cost(rng, jitter)
        views = [replace(random_views(rng, kind)[0], sequence=i) for i in range(48)]
        strided = plan(views, cost).goodput
        with monkeypatch.context() as patch:
            patch.setattr(ranking, "MAX_CUTS", 1000)
            gaps.append(1 - strided / plan(views, cost).goodput)
    found = f"mean gap {fmean(gaps):.4%}, worst {max(gaps):.3%}"
    record_property("gap", found)
    assert fmean(gaps) <= 0.001, found
    assert max(gaps) <= 0.02, found


def large_cost(rng: random.Random, jitter: float) -> CostModel:
    """1 s and milliseconds a token; draft passes of a tenth of that; each point off by jitter."""
    token_s = rng.choice([0.001, 0.003, 0.01])
    rows, tokens = (1, 2, 4, 8, 16, 32, 64), (1, 2, 3, 5, 9)
    seconds = tuple(
        tuple((1 + token_s * r * n) * (1 + jitter * rng.random()) for n in tokens) for r in rows
    )
    passes = tuple(((0.1 + 0.001 * r) * (1 + jitter * rng.random()),) for r in rows)
    return CostModel(
        target=PassTable(rows, tokens, seconds),
        draft=PassTable(rows, (1,), passes),
        host_s=0.1,
        catch_up_s=0.01,
    )
