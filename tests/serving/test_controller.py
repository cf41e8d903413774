"""The controller: the planner's choice, the guard's veto, probes, what is learned from steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness import COST, LoopHarness, record

from smartspec_py.constants import GRAMMAR
from smartspec_py.core.cost import PassTable
from smartspec_py.core.plan.planner import plan
from smartspec_py.core.types import DraftOption, SequenceView
from smartspec_py.serving.controller import PROBE_DRAFT_LEN, Controller, measured
from smartspec_py.serving.step import Decision, Mode, Reason


def view(
    sequence: int, policy: str = "goodput", accept: float = 0.9, prefill_len: int = 0, **more: Any
) -> SequenceView:
    option = DraftOption(6, (accept,) * 6, prefill_len)
    return SequenceView(sequence, 100, 100, policy, (option,), **more)


def controller() -> Controller:
    return Controller(COST, max_draft_len=6, max_sequences=8)


def mode_of(made: Controller, views: list[SequenceView]) -> Mode:
    has_target = any(one.slo_s_per_token is not None for one in views)
    has_forced = any(one.options[0].proposer == GRAMMAR for one in views)
    return made.mode([one.context_len for one in views], has_target, has_forced)


def run(made: Controller, views: list[SequenceView], count: int, **truth: float) -> list[Decision]:
    """Steps that go as planned, but for factors on what they take and bring, and `plan_s` seconds
    for each plan that may draft."""
    decisions = []
    for _ in range(count):
        num_prefilling = int(truth.get("num_prefilling", 0))
        mode = mode_of(made, views)
        decision = made.plan(views, mode, num_prefilling)
        decisions.append(decision)
        lengths = decision.plan.draft_lens
        num_tokens = len(views) + sum(lengths.values())
        target_s = COST.target_s(len(views), num_tokens, 100) * truth.get("target", 1.0)
        passes = range(1, max(lengths.values()) + 1)
        runs = [lengths[v.sequence] for v in views if decision.plan.option(v).has_draft_passes]
        draft_s = sum(COST.draft_s(sum(k >= p for k in runs)) for p in passes)
        draft_s *= truth.get("draft", 1.0)
        late = [v.options[0].draft_prefill_len for v in views if lengths[v.sequence]]
        draft_s += COST.draft_prefill_s * sum(late)
        plan_s = 0.0 if mode is Mode.REST else truth.get("plan_s", 0.0)
        made.observe(
            record(
                decision,
                num_prefill_tokens=64 * num_prefilling,
                num_generated=len(views) + round(truth.get("kept", 1.0) * sum(lengths.values())),
                drafted={s: k for s, k in lengths.items() if k},
                plan_s=plan_s,
                draft_s=draft_s,
                target_s=target_s,
                total_s=target_s + draft_s + plan_s,
            )
        )
    return decisions


def reasons(decisions: list[Decision]) -> list[Reason]:
    return [decision.reason for decision in decisions]


def num_probes(decisions: list[Decision]) -> int:
    return reasons(decisions).count(Reason.PROBE)


def is_searched(decision: Decision) -> bool:
    """Whether the plan might have drafted."""
    free = {view.sequence for view in decision.views if view.policy == "goodput"}
    return bool(free - decision.settings.forced.keys())


def test_a_plan_is_the_planners_where_nobody_objects() -> None:
    made, views = controller(), [view(1), view(2, "fixed:2"), view(3, "none")]
    run(made, views, 50)
    decision = made.plan(views)
    assert decision.reason is Reason.PLANNED
    assert decision.settings == made.settings
    assert decision.plan == plan(views, decision.cost, decision.settings)
    assert (decision.plan.draft_lens[2], decision.plan.draft_lens[3]) == (2, 0)


def test_the_first_steps_and_one_in_a_hundred_are_for_the_reference() -> None:
    """1 % of 1,000 steps, into which some more fit, since a step without drafts is shorter than
    others."""
    made, views = controller(), [view(1), view(2, "none")]
    found = run(made, views, 1000)
    assert found[0].reason is Reason.PROBE
    assert 5 <= num_probes(found) <= 20
    assert found[0].plan.draft_lens == {1: 0, 2: 0}
    assert (found[0].views, found[0].settings.forced) == (views, {1: 0})


@pytest.mark.parametrize("accept", [0.001, 0.9])
def test_there_are_no_probes_beside_prompts(accept: float) -> None:
    """The guard does not learn from such steps, and chunks take most of their time."""
    made, views = controller(), [view(1, accept=accept)]
    assert num_probes(run(made, views, 1200, num_prefilling=1)) == 0
    assert num_probes(run(made, views, 1)) == 1


def test_there_is_no_reference_that_the_guard_cannot_compare() -> None:
    """A sequence under `fixed:K` drafts in it."""
    made = controller()
    assert num_probes(run(made, [view(1), view(2, "fixed:2")], 300)) == 0
    assert num_probes(run(made, [view(1), view(2)], 1)) == 1


def test_a_probe_that_drafts_is_the_planners_with_one_length_forced() -> None:
    """500 steps in which drafting was not worth it; then the sequence with the shortest draft
    prefill drafts, and nobody else. The decision has all that the plan was made of."""
    made = controller()
    views = [view(1, accept=0.001), view(2, accept=0.001, prefill_len=9), view(3, "fixed:1")]
    probing = [d for d in run(made, views[:2], 600) if d.reason is Reason.PROBE]
    assert [d.plan.draft_lens for d in probing] == [{1: PROBE_DRAFT_LEN, 2: 0}]
    forced = replace(made.settings, forced={1: PROBE_DRAFT_LEN, 2: 0})
    assert probing[0].settings == forced
    assert plan(views, COST, forced).draft_lens == {1: PROBE_DRAFT_LEN, 2: 0, 3: 1}


def test_a_probe_waits_until_the_time_covers_its_draft_prefill() -> None:
    """1,000 tokens take as long as 10 steps, which are 0.5 % of 2,000. A sequence with a current
    draft cache does not wait."""
    made, views = controller(), [view(1, accept=0.001, prefill_len=1000)]
    assert num_probes(run(made, views, 1990)) == 0
    assert num_probes(run(made, views, 20)) == 1
    run(made, views, 1000)
    probing = run(made, [*views, view(2, accept=0.001)], 1)[0]
    assert probing.plan.draft_lens == {1: 0, 2: PROBE_DRAFT_LEN}


def test_the_draft_model_is_probed_beside_drafts_of_prompt_lookup() -> None:
    """They do not show what a draft pass costs. They stay as planned."""
    made = controller()
    lookup = DraftOption(6, (0.9,) * 6, has_draft_passes=False)
    views = [SequenceView(1, 100, 100, "goodput", (lookup,)), view(2, accept=0.001)]
    probing = [d.plan.draft_lens for d in run(made, views, 700) if d.plan.draft_lens[2]]
    assert probing == [{1: 6, 2: PROBE_DRAFT_LEN}]


def test_a_draft_model_that_is_better_than_its_profile_is_found() -> None:
    """Its passes take 15 ms by the profile, and 1 ms in truth. The only sequence needs 3 steps of
    draft prefill."""
    slow = replace(COST, draft=PassTable((1,), (1,), ((0.015,),)))
    made = Controller(slow, max_draft_len=6, max_sequences=8)
    assert made.plan([view(1)]).plan.draft_lens == {1: 0}
    run(made, [view(1, prefill_len=300)], 2300)
    assert made.plan([view(1)]).plan.draft_lens[1] > 0


def test_plans_are_charged_for_cold_shapes() -> None:
    """Beside a prompt, no shape is warm."""
    made, views = controller(), [view(1, "fixed:3")]
    assert made.plan(views, warm_shapes=[8, 4]).settings.warm_shapes == [8, 4]
    assert made.plan(views, num_prefilling=1, warm_shapes=[8, 4]).settings.warm_shapes == ()
    made = record(made.plan(views), drafted={1: 3})
    assert [measured(made, sizes, 512).is_warm for sizes in ([8, 4], [8])] == [True, False]


@pytest.mark.parametrize("policy", ["none", "fixed:3"])
def test_what_was_asked_for_is_neither_probed_nor_guarded(policy: str) -> None:
    made = controller()
    assert set(reasons(run(made, [view(1, policy)], 300, kept=0.0))) == {Reason.PLANNED}
    assert made.num_switches == 0


def test_speculation_that_brings_nothing_is_forbidden_and_tried_again() -> None:
    """The views go on saying 0.9, and nothing is ever accepted."""
    made, views = controller(), [view(n) for n in range(4)]
    found = reasons(run(made, views, 600, kept=0.0))
    assert Reason.GUARD in found[:250]
    assert found.count(Reason.GUARD) > 200
    assert made.num_switches >= 1


def test_speculation_is_tried_again_although_each_step_reads_prompts() -> None:
    """The guard learns nothing from these steps, but they pay for what the trial lost."""
    made, views = controller(), [view(n) for n in range(4)]
    found = run(made, views, 250, kept=0.0)
    assert found[-1].reason is Reason.GUARD
    later = reasons(run(made, views, 3000, num_prefilling=1))
    assert later[0] is Reason.GUARD
    assert later[-1] is Reason.PLANNED
    assert made.num_switches == 2


def test_asking_proposers_takes_half_a_percent_where_the_guard_is_off() -> None:
    """Their acceptance is learned meanwhile. It takes a tenth of a step to ask them."""
    made, views = controller(), [view(n) for n in range(4)]
    run(made, views, 250, kept=0.0)
    modes = []
    for _ in range(500):
        modes.append(mode_of(made, views))
        decision = run(made, views, 1, kept=0.0, plan_s=0.1 * COST.target_s(4, 4, 100))[0]
        assert decision.reason is Reason.GUARD
    assert modes.count(Mode.GUARD) == pytest.approx(25 + 10, abs=5)
    assert modes.count(Mode.REST) == 500 - modes.count(Mode.GUARD)


def test_forced_tokens_are_drafted_where_the_guard_is_off() -> None:
    """They are accepted in any case, and so tell nothing about other drafts. Asking is not limited,
    although it takes a tenth of a step."""
    made, views = controller(), [view(n) for n in range(4)]
    run(made, views, 250, kept=0.0)
    forced = DraftOption(3, (0.98,) * 3, has_draft_passes=False, proposer=GRAMMAR)
    views[0] = replace(views[0], options=(forced,))
    for decision in run(made, views, 200, plan_s=0.1 * COST.target_s(4, 4, 100)):
        assert decision.reason is Reason.GUARD
        assert decision.plan.draft_lens == {0: 3, 1: 0, 2: 0, 3: 0}


def test_the_guard_is_stronger_than_a_latency_target() -> None:
    """Where drafts lose time, they do not help to meet it."""
    made, views = controller(), [view(n) for n in range(4)]
    run(made, views, 250, kept=0.0)
    hurried = [replace(one, slo_s_per_token=0.005) for one in views]
    assert set(reasons(run(made, hurried, 200, kept=0.0))) == {Reason.GUARD}


def num_searched(made: Controller, views: list[SequenceView], count: int, plan_s: float) -> int:
    """Of so many steps, those whose plan might have drafted."""
    return sum(map(is_searched, run(made, views, count, plan_s=plan_s)))


def test_drafts_that_bring_less_than_their_planning_costs_are_left() -> None:
    """They gain 19 % by their passes. Whoever does not speculate need not plan: at a fifth of the
    step that gain is gone, at a tenth it is not."""
    views = [view(n, accept=0.35) for n in range(4)]
    drafting = plan(views, COST)
    gain = drafting.goodput / plan([replace(v, policy="none") for v in views], COST).goodput
    assert gain == pytest.approx(1.19, abs=0.01)
    assert num_searched(controller(), views, 300, plan_s=0.1 * drafting.expected_s) > 250
    assert num_searched(controller(), views, 300, plan_s=0.4 * drafting.expected_s) < 30


def test_plans_that_come_to_nothing_take_half_a_percent_of_the_time() -> None:
    """And the debt of a step at the start: ten plans more if they take a tenth of it."""
    views = [view(n, accept=0.001) for n in range(4)]
    step_s = COST.target_s(4, 4, 100)
    assert num_searched(controller(), views, 500, plan_s=0.005 * step_s) == 500
    assert 25 <= num_searched(controller(), views, 500, plan_s=0.1 * step_s) <= 40
    assert num_searched(controller(), views, 500, plan_s=10.0 * step_s) == pytest.approx(10, abs=3)
    likely = [view(n, accept=0.9) for n in range(4)]
    assert num_searched(controller(), likely, 500, plan_s=0.1 * step_s) >= 480  # but for probes


def test_the_time_of_the_views_counts_as_planning() -> None:
    made = record(controller().plan([view(1)]), views_s=0.25, plan_s=0.5)
    assert measured(made, (), 512).plan_s == 0.75


def test_a_plan_that_came_to_nothing_is_not_kept_to_when_something_changes() -> None:
    step_s = COST.target_s(4, 4, 100)
    made, few = controller(), [view(n, accept=0.001) for n in range(2)]
    run(made, [view(n, accept=0.001) for n in range(4)], 2, plan_s=10.0 * step_s)
    assert num_searched(made, few, 1, plan_s=0.0) == 1
    made = controller()
    run(made, few, 4, plan_s=10.0 * step_s)
    assert num_searched(made, few, 1, plan_s=0.0) == 0
    hurried = [replace(one, slo_s_per_token=0.9 * step_s) for one in few]
    assert num_searched(made, hurried, 1, plan_s=0.0) == 1


def test_an_engine_that_cannot_time_its_passes_teaches_no_costs() -> None:
    made, views = controller(), [view(1)]
    decision = made.plan(views)
    for _ in range(50):
        made.observe(record(decision, num_generated=1, total_s=0.05))
    assert made.plan(views).cost == COST


def test_the_table_of_batch_sizes_is_there() -> None:
    """A request that names it must not end the loop."""
    harness = LoopHarness()
    number = harness.submit((3, 4, 5), 20, policy="batch_table")
    harness.drain()
    assert harness.stories[number].finals
    assert any(step.num_drafted for step in harness.loop.records)


def test_probes_are_not_saved_up_from_the_time_of_others() -> None:
    """After the first ones, 2,000 steps of others leave one probe in 100 steps, as ever."""
    made = controller()
    run(made, [view(1)], 200)
    run(made, [view(1, "fixed:3")], 2000)
    assert reasons(run(made, [view(1)], 100)).count(Reason.PROBE) <= 3


HEADS = DraftOption(4, (0.5,) * 4, 0, has_draft_passes=False, draft_s=0.002)


def test_a_tree_takes_as_many_passes_as_its_depth() -> None:
    """Three passes of sequence 1, and two of sequence 2."""
    tree = DraftOption(63, (0.5,) * 63, depth=3)
    views = [
        SequenceView(1, 9, 9, "none", (tree,)),
        SequenceView(2, 9, 9, "none", (DraftOption(4, (0.5,) * 4),)),
    ]
    step = measured(record(controller().plan(views), drafted={1: 40, 2: 2}), (), 512)
    assert step.draft_rows == (2, 2, 1)
    assert step.num_tokens == 44


@pytest.mark.parametrize(
    ("drafted", "num_read", "rows"), [({}, 512, (1,)), ({2: 3}, 512, (2, 1, 1, 1))]
)
def test_a_step_of_draft_prefill_tells_what_it_costs(
    drafted: dict[int, int], num_read: int, rows: tuple[int, ...]
) -> None:
    """Of a chunk of 512 tokens, the one that drafts needs 100. The other lacks 2,000 and waits."""
    views = [
        SequenceView(n, 3000, 99, "fixed:3", (DraftOption(3, (0.5,) * 3, num),))
        for n, num in ((1, 2000), (2, 100))
        if n == 1 or drafted
    ]
    decision = controller().plan(views)
    made = record(decision, drafted=drafted, draft_s=0.060, target_s=0.010, total_s=0.075)
    step = measured(made, (), 512)
    assert step.is_draft_prefill is not bool(drafted)
    assert (step.num_draft_prefill_tokens, step.draft_rows) == (num_read, rows)
    assert (step.draft_s, step.host_s) == pytest.approx((0.060, 0.005))


@pytest.mark.parametrize(
    ("others", "drafted", "draft_s", "fixed_draft_s", "host_s"),
    [
        ((), {1: 4}, 0.0, 0.003, 0.002),  # heads alone: all of it
        ((DraftOption(4, (0.5,) * 4),), {1: 4, 2: 4}, 0.001, 0.002, 0.002),  # beside a draft model
        ((DraftOption(4, (0.5,) * 4),), {2: 4}, 0.003, 0.0, 0.002),
        ((DraftOption(4, (0.5,) * 4, has_draft_passes=False),), {2: 4}, 0.0, 0.0, 0.005),  # lookup
    ],
)
def test_the_time_of_heads_is_neither_host_time_nor_that_of_draft_passes(
    others: tuple[DraftOption, ...],
    drafted: dict[int, int],
    draft_s: float,
    fixed_draft_s: float,
    host_s: float,
) -> None:
    """Drafting took 3 ms, of which the plan charged 2 ms for the heads of sequence 1."""
    options = (HEADS, *others)
    views = [SequenceView(n, 100, 100, "fixed:4", (one,)) for n, one in enumerate(options, 1)]
    decision = controller().plan(views)
    step = measured(
        record(decision, drafted=drafted, draft_s=0.003, target_s=0.010, total_s=0.015), (), 512
    )
    assert step.draft_s == pytest.approx(draft_s)
    assert step.fixed_draft_s == pytest.approx(fixed_draft_s)
    assert step.host_s == pytest.approx(host_s)
