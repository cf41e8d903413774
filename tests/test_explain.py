"""What an explanation says, worked by hand: a target pass of 10 ms and 1 ms a token beyond the
first of a row, a draft pass of 2 ms; and that it agrees with the planner whatever a step has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import record
from typer.testing import CliRunner, Result

from smartspec_cli.app import app
from smartspec_cli.explanation import candidates, options, window
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import BatchTable, PlannerSettings, evaluate, plan
from smartspec_py.core.types import NO_TOKEN, DraftOption, SequenceView, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.serving.step import Decision, StepRecord
from smartspec_py.serving.step_trace import header_line, step_line

COST = CostModel(
    target=PassTable((1,), (1, 11), ((0.010, 0.020),)),
    draft=PassTable((1,), (1,), ((0.002,),)),
)
SETTINGS = PlannerSettings()


def view(sequence: int, accept: float, *others: DraftOption, most: int = 2) -> SequenceView:
    """others: options beside the first."""
    options = (DraftOption(most, (accept,) * most), *others)
    return SequenceView(sequence, 50, 40, "goodput", options)


def step(
    views: list[SequenceView],
    planned: SpecPlan,
    accepted: list[int],
    scale: float = 1.0,
    settings: PlannerSettings = SETTINGS,
) -> StepRecord:
    """Took `scale` times what was expected, in both its parts."""
    lengths = [planned.draft_lens[v.sequence] for v in views]
    drafted = [
        k if not planned.choices.get(v.sequence) else 0 for v, k in zip(views, lengths, strict=True)
    ]
    draft_s = 0.002 * max(drafted)
    return record(
        Decision(planned, views, COST, settings),
        events=[
            Event(v.sequence, (NO_TOKEN,) * (a + 1), k, a)
            for v, k, a in zip(views, lengths, accepted, strict=True)
        ],
        num_generated=sum(accepted) + len(accepted),
        draft_s=scale * draft_s,
        target_s=scale * (planned.expected_s - draft_s),
        total_s=scale * planned.expected_s,
    )


def made(
    views: list[SequenceView], lengths: list[int], accepted: list[int], scale: float = 1.0
) -> StepRecord:
    return step(views, evaluate(views, lengths, COST), accepted, scale)


def explained(path: Path, one: StepRecord, *options: str) -> Result:
    path.write_text(header_line(COST, None) + step_line(one))
    result = CliRunner().invoke(app, ["explain", "--trace", str(path), *options])
    assert result.exit_code == 0, result.output
    return result


def test_candidates_of_one_sequence() -> None:
    """With a = 0.5: k = 0 is 1 token in 10 ms, k = 1 is 1.5 in 13, k = 2 is 1.75 in 16."""
    one = made([view(1, 0.5)], [1], [1])
    found = candidates(one)
    assert [(each.name, each.draft_lens) for each in found] == [
        ("chosen", (1,)),
        ("all 0", (0,)),
        ("all 1", (1,)),
        ("all 2", (2,)),
    ]
    assert [each.expected_tokens for each in found[1:]] == pytest.approx([1.0, 1.5, 1.75])
    assert [each.expected_s for each in found[1:]] == pytest.approx([0.010, 0.013, 0.016])
    assert found[0].tokens_per_s == pytest.approx(1.5 / 0.013)
    assert [each.is_best for each in found] == [True, False, False, False]


def test_options_of_a_sequence_leave_the_others() -> None:
    one = made([view(1, 0.5), view(2, 0.9, most=1)], [2, 1], [0, 1])
    found = options(one, 2)
    assert [each.draft_lens for each in found] == [(2, 0), (2, 1)]
    assert [each.name for each in found] == ["0", "1, chosen"]
    with pytest.raises(KeyError):
        options(one, 7)


def test_of_trees_some_sizes_are_shown() -> None:
    tree = DraftOption(12, (0.9,) * 12, depth=3)
    views = [view(1, 0.5, tree, most=1)]
    one = step(views, evaluate(views, [9], COST, {1: 1}), [2])
    assert [each.name for each in options(one, 1)] == [
        "0",
        "1",
        *(f"{n}, option 1, tree of depth 3" for n in (1, 3, 7)),
        "9, option 1, tree of depth 3, chosen",
    ]
    assert [each.draft_lens for each in candidates(one)[1:]] == [(0,), (1,), (3,), (7,)]
    assert window([one]).num_trials == 0, "their probabilities are those of nodes"


def looked_up() -> tuple[list[SequenceView], SpecPlan]:
    """A prompt lookup of eight sure drafts beside a draft model of two poor ones: 9 tokens in 18
    ms, 500 tokens/s, where the draft model's best is 125."""
    sure = DraftOption(8, (1.0,) * 8, has_draft_passes=False)
    views = [view(1, 0.1, sure)]
    return views, plan(views, COST)


def test_a_prompt_lookup_is_shown_at_its_own_worth() -> None:
    views, planned = looked_up()
    assert (planned.draft_lens, planned.choices) == ({1: 8}, {1: 1})
    one = step(views, planned, [8])
    found = candidates(one)
    assert found[0].tokens_per_s == pytest.approx(9 / 0.018)
    assert [each.name for each in found if each.is_best] == ["chosen"]
    assert [each.name for each in found][1:] == [f"all {k}" for k in range(9)]
    lengths = options(one, 1)
    assert [each.name for each in lengths][:4] == ["0", "1", "2", "1, option 1"]
    assert [each.name for each in lengths if each.is_best] == ["8, option 1, chosen"]


def random_steps(seeds: range) -> list[StepRecord]:
    """Steps as the planner plans them, of sequences with one and two options, prompts that
    wait and a batch table; every step took exactly what was expected."""
    table, steps = BatchTable((1, 2, 4), (3, 2, 1)), []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        views = []
        for sequence in range(int(rng.integers(1, 6))):
            most, other = int(rng.integers(0, 5)), int(rng.integers(0, 8))
            looked = DraftOption(other, tuple(rng.random(other)), has_draft_passes=False)
            drafted = DraftOption(most, tuple(rng.random(most)))
            policy = str(rng.choice(["none", "goodput", "goodput", "batch_table"]))
            options = (drafted, looked) if rng.random() < 0.5 else (drafted,)
            views.append(SequenceView(sequence, 50, 40, policy, options))
        settings = PlannerSettings(table, num_prefilling=seed % 3)
        planned = plan(views, COST, settings)
        one = step(views, planned, [0] * len(views), settings=settings)
        steps.append(replace(one, events=[]))
    return steps


def test_the_chosen_plan_is_worth_what_was_recorded() -> None:
    """Of every step, to the last bit: explanation and replay decide by the same."""
    found = random_steps(range(60))
    for one in found:
        chosen = candidates(one)[0]
        assert (chosen.expected_tokens, chosen.expected_s) == (
            one.decision.plan.expected_tokens,
            one.decision.plan.expected_s,
        )


def test_a_window_adds_up() -> None:
    """Three steps of k = 2 at a = 0.5: expected 1.75 each, realised 3, 1, 2. All take twice as long
    as expected, so each is off by 100 %. Five drafts were tried, 3 of them accepted. A step with
    prompt tokens is left out."""
    steps = [made([view(1, 0.5)], [2], [a], scale=2.0) for a in (2, 0, 1)]
    report = window([*steps, replace(steps[0], num_prefill_tokens=16)])
    assert report.num_steps == 3
    assert report.expected_tokens == pytest.approx(5.25)
    assert report.realised_tokens == 6
    assert report.realised_s == pytest.approx(2 * report.expected_s)
    assert report.time_error == pytest.approx(1.0)
    assert report.num_trials == 5
    assert (report.predicted, report.observed) == (0.5, pytest.approx(0.6))
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
    assert window(steps).num_switches == 2


def test_the_command_shows_a_lookup_and_writes_json(tmp_path: Path) -> None:
    """A look-up that has more drafts than the draft model may make is a number, not -inf."""
    views, planned = looked_up()
    one = step(views, planned, [8], settings=PlannerSettings(num_prefilling=2))
    result = explained(tmp_path / "steps.jsonl", one, "--json", "-")
    document = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))
    assert document["step"]["candidates"][0]["tokens_per_s"] == pytest.approx(500)
    shown = " ".join(result.stderr.split())
    assert "2 requests in prefill" in shown
    assert "verified: 8 drafts, accepted 8" in shown
