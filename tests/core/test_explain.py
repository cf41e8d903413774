"""What an explanation says, worked by hand: a target pass of 10 ms and 1 ms a token beyond the
first of a row, a draft pass of 2 ms."""

from __future__ import annotations

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.explain import Outcome, RecordedStep, candidates, options, window
from smartspec_py.core.planner import evaluate, plan
from smartspec_py.core.types import SequenceView

COST = CostModel(
    target=PassTable((1,), (1, 11), ((0.010, 0.020),)),
    draft=PassTable((1,), (1,), ((0.002,),)),
)


def view(sequence: int, accept: float, most: int = 2) -> SequenceView:
    return SequenceView(sequence, 50, most, 0, 40, (accept,) * most, "goodput")


def step(
    views: list[SequenceView], lengths: list[int], accepted: list[int], scale: float = 1.0
) -> RecordedStep:
    """Took `scale` times what was expected, in both its parts."""
    planned = evaluate(views, lengths, COST)
    draft_s = 0.002 * max(lengths)
    return RecordedStep(
        views=views,
        plan=planned,
        cost=COST,
        outcomes=[
            Outcome(v.sequence, k, a) for v, k, a in zip(views, lengths, accepted, strict=True)
        ],
        num_prefill_tokens=0,
        draft_s=scale * draft_s,
        target_s=scale * (planned.expected_s - draft_s),
        total_s=scale * planned.expected_s,
    )


def test_candidates_of_one_sequence() -> None:
    """With a = 0.5: k = 0 is 1 token in 10 ms, k = 1 is 1.5 in 13, k = 2 is 1.75 in 16."""
    found = candidates(step([view(1, 0.5)], [1], [1]))
    assert [(one.name, one.draft_lens) for one in found] == [
        ("chosen", (1,)),
        ("all 0", (0,)),
        ("all 1", (1,)),
        ("all 2", (2,)),
    ]
    assert [one.expected_tokens for one in found[1:]] == pytest.approx([1.0, 1.5, 1.75])
    assert [one.expected_s for one in found[1:]] == pytest.approx([0.010, 0.013, 0.016])
    assert found[0].goodput == pytest.approx(1.5 / 0.013)


def test_options_of_a_sequence_leave_the_others() -> None:
    found = options(step([view(1, 0.5), view(2, 0.9, most=1)], [2, 1], [0, 1]), 2)
    assert [one.draft_lens for one in found] == [(2, 0), (2, 1)]
    assert [one.name for one in found] == ["0", "1, chosen"]
    with pytest.raises(KeyError):
        options(step([view(1, 0.5)], [0], [0]), 7)


def test_a_window_adds_up() -> None:
    """Three steps of k = 2 at a = 0.5: expected 1.75 each, realised 3, 1, 2. All take twice as long
    as expected, so each is off by 100 %. Five drafts were tried, 3 of them accepted."""
    steps = [step([view(1, 0.5)], [2], [a], scale=2.0) for a in (2, 0, 1)]
    report = window(steps)
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
        step([one], [1], [0]),
        step([one], [0], [0]),
        step([one, two], [1, 1], [0, 0]),
        step([one, two], [2, 1], [0, 0]),
    ]
    assert window(steps).num_switches == 2


def test_no_regret_where_the_plan_was_right() -> None:
    views = [view(1, 0.9), view(2, 0.2)]
    lengths = list(plan(views, COST).draft_lens.values())
    # As expected: of ten steps nine first drafts of 1 are accepted, and two of 2.
    accepted = [[min(lengths[0], 2 * (n < 9)), min(lengths[1], int(n < 2))] for n in range(10)]
    steps = [step(views, lengths, found) for found in accepted]
    assert window(steps).regret < 0.02


def test_regret_where_drafts_that_never_hold_are_made() -> None:
    """k = 2 at 0.9 predicted and nothing accepted: 1 token in 16 ms, where 10 ms were possible."""
    steps = [step([view(1, 0.9)], [2], [0]) for _ in range(20)]
    assert window(steps).regret == pytest.approx(1 - 10 / 16, abs=0.01)


def test_steps_with_prompt_chunks_are_left_out() -> None:
    assert window([]).num_steps == 0
