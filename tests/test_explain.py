"""What an explanation says, worked by hand: a target pass of 10 ms and 1 ms a token beyond the
first of a row, a draft pass of 2 ms; and that it agrees with the planner whatever a step has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from smartspec_py.cli import app
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.planner import BatchTable, PlannerSettings, evaluate, plan
from smartspec_py.core.types import DraftOption, SequenceView, SpecPlan
from smartspec_py.tracing.explain import candidates, options, window
from smartspec_py.tracing.steps import (
    SequenceOutcome,
    StepTrace,
    StepTraceFile,
    cost_id,
    unexplained,
    write_steps,
)

COST = CostModel(
    target=PassTable((1,), (1, 11), ((0.010, 0.020),)),
    draft=PassTable((1,), (1,), ((0.002,),)),
)
ID = cost_id(COST)


def view(sequence: int, accept: float, most: int = 2, **others: Any) -> SequenceView:
    return SequenceView(sequence, 50, most, 0, 40, (accept,) * most, "goodput", **others)


def step(
    views: list[SequenceView],
    planned: SpecPlan,
    accepted: list[int],
    scale: float = 1.0,
    **told: int,
) -> StepTrace:
    """Took `scale` times what was expected, in both its parts."""
    lengths = [planned.draft_lens[v.sequence] for v in views]
    drafted = [
        k if not planned.choices.get(v.sequence) else 0 for v, k in zip(views, lengths, strict=True)
    ]
    draft_s = 0.002 * max(drafted)
    return StepTrace(
        start_s=0.0,
        cost_id=ID,
        views=tuple(views),
        plan=planned,
        outcomes=tuple(
            SequenceOutcome(v.sequence, k, a, a + 1)
            for v, k, a in zip(views, lengths, accepted, strict=True)
        ),
        num_prefill_tokens=0,
        num_generated=sum(accepted) + len(accepted) + told.get("num_background", 0),
        plan_s=0.0,
        draft_s=scale * draft_s,
        target_s=scale * (planned.expected_s - draft_s),
        total_s=scale * planned.expected_s,
        **told,
    )


def made(
    views: list[SequenceView], lengths: list[int], accepted: list[int], scale: float = 1.0
) -> StepTrace:
    return step(views, evaluate(views, lengths, COST), accepted, scale)


def trace(*steps: StepTrace, table: BatchTable | None = None) -> StepTraceFile:
    return StepTraceFile({}, {ID: COST}, steps, table)


def test_candidates_of_one_sequence() -> None:
    """With a = 0.5: k = 0 is 1 token in 10 ms, k = 1 is 1.5 in 13, k = 2 is 1.75 in 16."""
    one = made([view(1, 0.5)], [1], [1])
    found = candidates(trace(one), one)
    assert [(each.name, each.draft_lens) for each in found] == [
        ("chosen", (1,)),
        ("all 0", (0,)),
        ("all 1", (1,)),
        ("all 2", (2,)),
    ]
    assert [each.expected_tokens for each in found[1:]] == pytest.approx([1.0, 1.5, 1.75])
    assert [each.expected_s for each in found[1:]] == pytest.approx([0.010, 0.013, 0.016])
    assert found[0].goodput == pytest.approx(1.5 / 0.013)
    assert [each.is_best for each in found] == [True, False, False, False]


def test_options_of_a_sequence_leave_the_others() -> None:
    one = made([view(1, 0.5), view(2, 0.9, most=1)], [2, 1], [0, 1])
    found = options(trace(one), one, 2)
    assert [each.draft_lens for each in found] == [(2, 0), (2, 1)]
    assert [each.name for each in found] == ["0", "1, chosen"]
    with pytest.raises(KeyError):
        options(trace(one), one, 7)


def looked_up() -> tuple[list[SequenceView], SpecPlan]:
    """A prompt lookup of eight sure drafts beside a draft model of two poor ones: 9 tokens in 18
    ms, 500 tokens/s, where the draft model's best is 125."""
    sure = DraftOption(8, (1.0,) * 8, has_draft_passes=False)
    views = [view(1, 0.1, alternatives=(sure,))]
    return views, plan(views, COST)


def test_a_prompt_lookup_is_shown_at_its_own_worth() -> None:
    views, planned = looked_up()
    assert (planned.draft_lens, planned.choices) == ({1: 8}, {1: 1})
    one = step(views, planned, [8])
    found = candidates(trace(one), one)
    assert found[0].goodput == pytest.approx(9 / 0.018)
    assert [each.name for each in found if each.is_best] == ["chosen"]
    assert [each.name for each in found][1:] == [f"all {k}" for k in range(9)]
    lengths = options(trace(one), one, 1)
    assert [each.name for each in lengths][:4] == ["0", "1", "2", "1, option 1"]
    assert [each.name for each in lengths if each.is_best] == ["8, option 1, chosen"]
    assert window(trace(one)).regret == pytest.approx(0.0)


def test_sequences_in_a_burst_count_on_both_sides() -> None:
    """Beside three sequences that generate in a burst: 4 tokens in 10 ms without drafts."""
    views = [view(1, 0.5)]
    planned = plan(views, COST, PlannerSettings(num_background=3))
    one = step(views, planned, [0], num_background=3)
    found = candidates(trace(one), one)
    assert found[1].expected_tokens == pytest.approx(4.0)
    assert found[1].expected_s == pytest.approx(0.010)
    report = window(trace(one))
    assert report.realised_tokens == 4
    assert report.time_error == pytest.approx(0.0)


def test_waiting_prompts_raise_the_price_of_a_second() -> None:
    """k = 2 has the most tokens a second, 137.5 against 130.8 and 100. With one prompt waiting, a
    second is worth 275 tokens: k = 0 loses least, 1 - 2.75 against 1.7 - 3.575."""
    views = [view(1, 0.7, most=2)]
    alone = plan(views, COST)
    waiting = plan(views, COST, PlannerSettings(num_delayed=1))
    assert (alone.draft_lens, waiting.draft_lens) == ({1: 2}, {1: 0})
    one = step(views, waiting, [0], num_delayed=1)
    assert [each.name for each in candidates(trace(one), one) if each.is_best] == ["chosen"]
    assert window(trace(one)).regret == pytest.approx(0.0)
    told_nothing = replace(one, num_delayed=0)
    assert window(trace(told_nothing)).regret > 0.1


def test_a_batch_table_is_asked_again() -> None:
    table = BatchTable((1, 4), (2, 0))
    views = [replace(view(1, 0.5), policy="batch_table")]
    one = step(views, plan(views, COST, PlannerSettings(batch_table=table)), [1])
    shown = trace(one, table=table)
    assert window(shown).regret == pytest.approx(0.0)
    assert [each.name for each in candidates(shown, one) if each.is_best] == ["all 1"]


def random_trace(seeds: range) -> StepTraceFile:
    """Steps as the planner plans them, of sequences with and without alternatives, prompts that
    wait, bursts and a batch table; every step took exactly what was expected."""
    table, steps = BatchTable((1, 2, 4), (3, 2, 1)), []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        views = []
        for sequence in range(int(rng.integers(1, 6))):
            most, other = int(rng.integers(0, 5)), int(rng.integers(0, 8))
            looked = DraftOption(other, tuple(rng.random(other)), has_draft_passes=False)
            views.append(
                SequenceView(
                    sequence=sequence,
                    context_len=50,
                    max_draft_len=most,
                    draft_lag=0,
                    remaining=40,
                    accept_probs=tuple(rng.random(most)),
                    policy=str(rng.choice(["none", "goodput", "goodput", "batch_table"])),
                    alternatives=(looked,) if rng.random() < 0.5 else (),
                )
            )
        told = {"num_delayed": seed % 3, "num_background": seed % 2}
        planned = plan(views, COST, PlannerSettings(batch_table=table, **told))
        steps.append(replace(step(views, planned, [0] * len(views), **told), outcomes=()))
    return trace(*steps, table=table)


def test_the_chosen_plan_is_worth_what_was_recorded() -> None:
    """Of every step, to the last bit: explanation and replay decide by the same."""
    found = random_trace(range(60))
    assert unexplained(found) == []
    for one in found.steps:
        chosen = candidates(found, one)[0]
        assert (chosen.expected_tokens, chosen.expected_s) == (
            one.plan.expected_tokens,
            one.plan.expected_s,
        )


def test_no_regret_for_the_planners_own_choices() -> None:
    found = random_trace(range(60))
    drafted = {bool(one.plan.choices) for one in found.steps}
    assert drafted == {True, False}, "some steps must look up"
    for one in found.steps:
        # What a step took is as predicted, but for the parts that are the same for every plan.
        assert window(replace(found, steps=(_as_predicted(one),))).regret == pytest.approx(0.0)


def _as_predicted(one: StepTrace) -> StepTrace:
    """No time was measured by part, so no correction is read from it."""
    return replace(one, target_s=0.0, draft_s=0.0)


def test_a_window_adds_up() -> None:
    """Three steps of k = 2 at a = 0.5: expected 1.75 each, realised 3, 1, 2. All take twice as long
    as expected, so each is off by 100 %. Five drafts were tried, 3 of them accepted."""
    steps = [made([view(1, 0.5)], [2], [a], scale=2.0) for a in (2, 0, 1)]
    report = window(trace(*steps))
    assert report.num_steps == 3
    assert report.expected_tokens == pytest.approx(5.25)
    assert report.realised_tokens == 6
    assert report.realised_s == pytest.approx(2 * report.expected_s)
    assert report.time_error == pytest.approx(1.0)
    (bin_,) = report.reliability
    assert (bin_.predicted, bin_.observed, bin_.num_trials) == (0.5, pytest.approx(0.6), 5)
    assert report.num_switches == 0


def test_switches_are_counted_where_a_sequence_is_in_both_steps() -> None:
    """1: on, off, on. 2 comes when it is on already."""
    one, two = view(1, 0.5), view(2, 0.5)
    steps = [
        made([one], [1], [0]),
        made([one], [0], [0]),
        made([one, two], [1, 1], [0, 0]),
        made([one, two], [2, 1], [0, 0]),
    ]
    assert window(trace(*steps)).num_switches == 2


def test_no_regret_where_the_plan_was_right() -> None:
    views = [view(1, 0.9), view(2, 0.2)]
    lengths = list(plan(views, COST).draft_lens.values())
    # As expected: of ten steps nine first drafts of 1 are accepted, and two of 2.
    accepted = [[min(lengths[0], 2 * (n < 9)), min(lengths[1], int(n < 2))] for n in range(10)]
    assert window(trace(*(made(views, lengths, found) for found in accepted))).regret < 0.02


def test_regret_where_drafts_that_never_hold_are_made() -> None:
    """k = 2 at 0.9 predicted and nothing accepted: 1 token in 16 ms, where 10 ms were possible."""
    steps = [made([view(1, 0.9)], [2], [0]) for _ in range(20)]
    assert window(trace(*steps)).regret == pytest.approx(1 - 10 / 16, abs=0.01)


def test_steps_with_prompt_chunks_are_left_out() -> None:
    reading = replace(made([view(1, 0.5)], [1], [1]), num_prefill_tokens=16)
    assert window(trace(reading)).num_steps == 0


def test_the_command_shows_a_lookup_and_writes_json(tmp_path: Path) -> None:
    """A look-up that has more drafts than the draft model may make is a number, not -inf."""
    views, planned = looked_up()
    path = tmp_path / "steps.jsonl"
    write_steps(path, trace(step(views, planned, [8], num_delayed=2)))
    result = CliRunner().invoke(app, ["explain", "--trace", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(
        result.stdout.splitlines()[-1], parse_constant=lambda name: pytest.fail(name)
    )
    assert document["step"]["candidates"][0]["tokens_per_s"] == pytest.approx(500)
    assert document["step"]["candidates"][0]["options"] == [1]
    assert "2 requests that wait for their prompts" in " ".join(result.stderr.split())
