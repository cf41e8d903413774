"""The planner: cases worked by hand, and properties. Held against an oracle it is next door."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan import planner
from smartspec_py.core.plan.planner import PlannerSettings, evaluate, plan
from smartspec_py.core.types import DraftOption, SequenceView, SpecPlan

FLAT = PassTable((1,), (1,), ((1.0,),))
"""A target pass of one second, whatever is in it: memory-bound."""

FLAT_COST = CostModel(target=FLAT, draft=PassTable((1,), (1,), ((0.1,),)))
"""And a tenth of a second for each draft pass, however many rows."""


def view(
    sequence: int = 1,
    accept_prob: float = 0.5,
    *others: DraftOption,
    max_draft_len: int = 4,
    accept_probs: Sequence[float] | None = None,
    draft_prefill_len: int = 0,
    has_draft_passes: bool = True,
    **changes: object,
) -> SequenceView:
    """others: options beside the first."""
    probs = accept_probs or (accept_prob,) * 64
    options = (DraftOption(max_draft_len, probs, draft_prefill_len, has_draft_passes), *others)
    base = SequenceView(sequence, 10, 100, "goodput", options)
    return replace(base, **changes)  # type: ignore[arg-type]


def affine_cost(
    base_s: float, row_s: float, token_s: float, draft_pass_s: float = 0.0
) -> CostModel:
    """base_s + row_s * B + token_s * drafts, and draft_pass_s for each pass.

    Bilinear interpolation keeps b + r*B + t*B*(tokens a row - 1) exact from its four corners.
    """
    rows, tokens = (1, 64), (1, 16)
    seconds = tuple(tuple(base_s + row_s * b + token_s * b * (n - 1) for n in tokens) for b in rows)
    draft = PassTable((1,), (1,), ((draft_pass_s,),)) if draft_pass_s else None
    return CostModel(target=PassTable(rows, tokens, seconds), draft=draft)


def lengths(spec_plan: SpecPlan) -> list[int]:
    return list(spec_plan.draft_lens.values())


def test_nothing_ready_is_an_empty_plan() -> None:
    assert plan([], FLAT_COST) == SpecPlan()
    assert SpecPlan().goodput == 0.0


@pytest.mark.parametrize("policy", ["goodput", "goodput_global", "fixed:3"])
def test_where_nothing_can_be_drafted_nothing_is_searched(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a few microseconds."""
    views = [view(number, policy=policy, max_draft_len=0) for number in (1, 2)]
    searched = evaluate(views, [0, 0], FLAT_COST)
    monkeypatch.setattr(planner, "problem_of", None)
    assert plan(views, FLAT_COST) == searched


def test_one_sequence_on_a_flat_target() -> None:
    """a = 0.5: E is 1, 1.5, 1.75, 1.875 and T is 1, 1.1, 1.2, 1.3.

    E/T is 1, 1.364, 1.458, 1.442: two drafts.
    """
    chosen = plan([view(accept_prob=0.5)], FLAT_COST)
    assert lengths(chosen) == [2]
    assert chosen.expected_tokens == pytest.approx(1.75)
    assert chosen.expected_s == pytest.approx(1.2)
    assert chosen.goodput == pytest.approx(1.75 / 1.2)


def test_drafts_go_to_the_sequence_that_drafts_well() -> None:
    """T = 1 + 0.25 a draft; slots of 0.9: 0.9, 0.81, 0.729, 0.6561; then 0.2, 0.04, ..

    E/T by slots: 2, 2.32, 2.473, 2.537, 2.548 (all four of the first), 2.353.
    """
    chosen = plan([view(1, 0.9), view(2, 0.2)], affine_cost(1.0, 0.0, 0.25))
    assert chosen.draft_lens == {1: 4, 2: 0}
    assert chosen.goodput == pytest.approx(5.0951 / 2)


def test_fixed_and_none_rows_beside_a_goodput_row() -> None:
    """A draft pass costs 0.3, the target 1.0. Alone, a = 0.25 is not worth it: 1.25/1.3 < 1/1.

    Beside a row that drafts anyway the pass is already paid: 3.25/1.3 > 3/1.3.
    """
    cost = CostModel(target=FLAT, draft=PassTable((1,), (1,), ((0.3,),)))
    free = view(1, 0.25)
    fixed = view(2, 0.0, policy="fixed:1")
    none = view(3, 0.9, policy="none")
    assert plan([free], cost).draft_lens == {1: 0}
    assert plan([free, fixed, none], cost).draft_lens == {1: 1, 2: 1, 3: 0}


@pytest.mark.parametrize(
    ("draft_prefill_len", "remaining", "draft_len", "expected_s"),
    [
        (0, 100, 1, 1.1),
        # 0.05 s * 20 tokens, spread over the 50 steps of 100 tokens, is 0.02: 1.5/1.12
        (20, 100, 1, 1.12),
        # only 16 tokens are left, 8 steps to spread it over: 0.05 * 32 / 8 = 0.2: 1.5/1.3
        (32, 16, 1, 1.3),
        # 0.05 * 80 / 8 = 0.5: 1.5/1.6 < 1/1
        (80, 16, 0, 1.0),
        # the last step bears all of it
        (20, 2, 0, 1.0),
        (20, 1, 0, 1.0),
    ],
)
def test_catching_up_is_charged(
    draft_prefill_len: int, remaining: int, draft_len: int, expected_s: float
) -> None:
    cost = replace(FLAT_COST, draft_prefill_s=0.05)
    stale = view(
        accept_prob=0.5, max_draft_len=1, draft_prefill_len=draft_prefill_len, remaining=remaining
    )
    chosen = plan([stale], cost)
    assert lengths(chosen) == [draft_len]
    assert chosen.expected_s == pytest.approx(expected_s)


def test_a_lookup_takes_no_draft_passes() -> None:
    """a = 0.5 beside draft passes of 0.3: E/T is 1, 1.5/1.3 = 1.154, 1.75/1.6 = 1.094: one draft.

    Looked up, T stays 1: all four, E = 1.9375, whether the sequence is alone or not.
    """
    cost = CostModel(target=FLAT, draft=PassTable((1,), (1,), ((0.3,),)))
    drafted = view(1, 0.5)
    looked_up = view(2, 0.5, has_draft_passes=False)
    assert plan([drafted], cost).draft_lens == {1: 1}
    alone = plan([looked_up], cost)
    assert alone.draft_lens == {2: 4}
    assert (alone.expected_tokens, alone.expected_s) == pytest.approx((1.9375, 1.0))
    fixed = plan([replace(looked_up, policy="fixed:4")], cost)
    assert fixed.expected_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("accept_prob", "draft_len", "option"),
    [
        # looked up: 1.9375 / 1; drafted at 0.8 and four passes: 3.3616 / 1.4 = 2.401
        (0.8, 4, 0),
        # drafted at 0.5: 1.75 / 1.2 = 1.458 at best
        (0.5, 4, 1),
    ],
)
def test_a_way_to_draft_is_chosen(accept_prob: float, draft_len: int, option: int) -> None:
    """A target pass of 1 s, draft passes of 0.1 s; the look-up finds four that hold at 0.5."""
    lookup = DraftOption(4, (0.5,) * 4, has_draft_passes=False)
    chosen = plan([view(1, accept_prob, lookup)], FLAT_COST)
    assert chosen.draft_lens == {1: draft_len}
    assert chosen.choices == ({1: option} if option else {})


@pytest.mark.parametrize(
    ("slo_s_per_token", "slack_s", "draft_lens"),
    [
        (None, 0.0, {1: 4, 2: 0}),
        (2.1, 0.0, {1: 4, 2: 0}),  # met anyway: 2 s for a token
        # T at most 1.3 without drafts of its own: E/T = 2.9/1.25 = 2.32; at most 1.95 with one:
        # 4.21/1.75 = 2.406; at most 2.275 with two: 5.189/2.25 = 2.306
        (1.3, 0.0, {1: 2, 2: 1}),
        (0.5, 0.0, {1: 4, 2: 0}),  # nothing is as fast as that: 1/1, 1.25/1.5, 1.5/1.75, ..
        (1.3, 25.6, {1: 4, 2: 0}),  # 25.6 s ahead, spent over 32 tokens: 1.3 + 0.8 = 2.1
        (2.1, -25.6, {1: 2, 2: 1}),  # and as much behind
    ],
)
def test_a_latency_target_that_can_be_met_is_met(
    slo_s_per_token: float | None, slack_s: float, draft_lens: dict[int, int]
) -> None:
    """T = 1 + 0.25 a draft. Slots of 0.9: 0.9, 0.81, 0.729, 0.656; of 0.5, which has the target:
    0.5, 0.25, .. By goodput the first drafts four, 5.095/2 = 2.548, the second nothing."""
    patient = view(1, 0.9)
    hurried = view(2, 0.5, slo_s_per_token=slo_s_per_token, slack_s=slack_s)
    assert plan([patient, hurried], affine_cost(1.0, 0.0, 0.25)).draft_lens == draft_lens


@pytest.mark.parametrize(("slo_s_per_token", "draft_len"), [(None, 4), (12.0, 4), (2.0, 0)])
def test_a_latency_target_counts_the_draft_prefill_of_others_whole(
    slo_s_per_token: float | None, draft_len: int
) -> None:
    """One takes 10 s in this step. Spread over 50 steps, as for goodput, that is 0.2 s."""
    late = view(1, 0.9, draft_prefill_len=100)
    hurried = view(2, 0.5, max_draft_len=0, slo_s_per_token=slo_s_per_token)
    cost = replace(FLAT_COST, draft_prefill_s=0.1)
    assert plan([late, hurried], cost).draft_lens == {1: draft_len, 2: 0}


def test_a_sequence_alone_is_fastest_by_goodput_whatever_its_target() -> None:
    """Its time a token is one over its goodput, so that no target can ask for another plan."""
    for slo in (0.6, 0.69, 0.7, 2.0):
        assert plan([view(1, 0.5, slo_s_per_token=slo)], FLAT_COST).draft_lens == {1: 2}


@pytest.mark.parametrize(
    ("num_prefilling", "draft_lens"),
    [
        # 2 drafts each: 2 (1 + 0.7 + 0.49) tokens in 1 + 0.4 + 4 * 0.02 = 1.48 s, 2.96 a second;
        # the third pair would bring 0.69 for 0.24 s, 2.86 a second.
        (0, [2, 2]),
        # A prompt counts as 8 tokens: 10 in 1 s. The first pair brings 1.4 for 0.24 s: 5.8.
        (1, [0, 0]),
    ],
)
def test_a_prompt_that_is_read_makes_seconds_dearer(
    num_prefilling: int, draft_lens: list[int]
) -> None:
    seconds = ((1.0, 1.0 + 0.02 * 7), (1.0, 1.0 + 0.04 * 7))
    cost = CostModel(PassTable((1, 2), (1, 8), seconds), PassTable((1,), (1,), ((0.2,),)))
    views = [view(i, 0.7, max_draft_len=8) for i in (1, 2)]
    found = plan(views, cost, PlannerSettings(num_prefilling=num_prefilling))
    assert lengths(found) == draft_lens
    assert found.expected_tokens == pytest.approx(2 * (1 + 0.7 + 0.49) if not num_prefilling else 2)


@pytest.mark.parametrize(
    ("warm_shapes", "draft_len", "seconds"),
    [
        ([3, 1], 2, 1.36),  # 1.75 / 1.36 is more than 1.5 / 1.18
        ([2], 1, 1.18),  # 1.5 / 1.18 is more than 1.75 / 1.76
        ([1, 9], 0, 1.0),  # 1 / 1 is more than 1.75 / 1.76
        ([], 2, 1.76),  # every length pays 0.4 s: 1.75 / 1.76 is more than 1 / 1.4
    ],
)
def test_a_pass_that_is_not_ready_is_charged(
    warm_shapes: list[int], draft_len: int, seconds: float
) -> None:
    """One sequence, half of the drafts are right and free to make. A pass takes 1 s, 0.18 s for
    each draft, and 0.4 s if its number of tokens is not warm."""
    cost = affine_cost(base_s=1.0, row_s=0.0, token_s=0.18)
    cost = replace(cost, shape_change_s=0.4)
    settings = PlannerSettings(warm_shapes=warm_shapes)
    chosen = plan([view(accept_prob=0.5, has_draft_passes=False)], cost, settings)
    assert lengths(chosen) == [draft_len]
    assert chosen.expected_s == pytest.approx(seconds)


def test_the_example_of_the_search() -> None:
    """In the docstring of `search._best_lengths`."""
    target = PassTable((1, 2), (1, 3), ((1.0, 1.2), (1.1, 1.5)))
    cost = CostModel(target, PassTable((1,), (1,), ((0.1,),)))
    options = [(DraftOption(2, probs),) for probs in ((0.8, 0.5), (0.6, 0.5))]
    views = [SequenceView(i, 10, 10, "goodput", one) for i, one in enumerate(options)]
    assert lengths(plan(views, cost)) == [1, 1]
    expected = {(1, 0): 2.8 / 1.3, (1, 1): 3.4 / 1.4, (2, 1): 3.8 / 1.6, (2, 2): 4.1 / 1.7}
    for chosen, goodput in expected.items():
        assert evaluate(views, chosen, cost).goodput == pytest.approx(goodput)
