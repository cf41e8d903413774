"""Policies by name, each against a table worked by hand, and all of them in one step."""

from dataclasses import replace

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.plan.planner import (
    BatchTable,
    PlannerSettings,
    batch_table_of,
    parse_policy,
    plan,
)
from smartspec_py.core.types import DraftOption, SequenceView

FLAT_COST = CostModel(
    target=PassTable((1,), (1,), ((1.0,),)), draft=PassTable((1,), (1,), ((0.1,),))
)
"""A target pass of 1 s and draft passes of 0.1 s, whatever is in them."""


def view(sequence: int, accept_prob: float, policy: str, max_draft_len: int = 4) -> SequenceView:
    option = DraftOption(max_draft_len, (accept_prob,) * max_draft_len)
    return SequenceView(sequence, 10, 100, policy, (option,))


def with_option(view: SequenceView, option: DraftOption) -> SequenceView:
    return replace(view, options=(*view.options, option))


def cost_by_draft(token_s: float) -> CostModel:
    """T = 1 + token_s a draft, for any number of sequences; drafting itself is free."""
    rows, tokens = (1, 8), (1, 9)
    seconds = tuple(tuple(1.0 + token_s * b * (n - 1) for n in tokens) for b in rows)
    return CostModel(target=PassTable(rows, tokens, seconds))


@pytest.mark.parametrize(
    ("name", "draft_len"),
    [
        ("goodput", None),
        ("none", 0),
        ("fixed:1", 1),
        ("fixed:12", 12),
        ("fixed:64", 64),
        ("fixed:03", 3),
    ],
)
def test_fixed_lengths_by_name(name: str, draft_len: int | None) -> None:
    assert parse_policy(name) == draft_len


@pytest.mark.parametrize(
    "name",
    [
        *("", "fixed", "fixed:", "fixed:0", "fixed:-1", "fixed:65", "fixed:3.0", "fixed:²"),
        *("Goodput", "goodput:1", "goodput_confidence", "batch_table:1", "none:0"),
    ],
)
def test_any_other_name_is_refused(name: str) -> None:
    allowed = r"none, fixed:K with K in 1\.\.64, batch_table, goodput_global, or goodput"
    with pytest.raises(ValueError, match=f"^{allowed}$"):
        parse_policy(name)


@pytest.mark.parametrize(
    ("batch_size", "draft_len"), [(1, 5), (2, 3), (3, 1), (4, 1), (8, 0), (9, 0), (500, 0)]
)
def test_the_next_larger_batch_of_the_table_counts(batch_size: int, draft_len: int) -> None:
    assert BatchTable((1, 2, 4, 8), (5, 3, 1, 0)).draft_len(batch_size) == draft_len


@pytest.mark.parametrize(
    ("rows", "draft_lens", "word"),
    [
        ((), (), "rows"),
        ((0, 1), (1, 1), "rows"),
        ((2, 1), (1, 1), "rows"),
        ((1, 2), (1,), "draft_lens"),
        ((1, 2), (1, -1), "draft_lens"),
    ],
)
def test_a_batch_table_that_is_none_is_refused(
    rows: tuple[int, ...], draft_lens: tuple[int, ...], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        BatchTable(rows, draft_lens)


def test_the_batch_is_all_that_is_in_the_step() -> None:
    """Three sequences, two of them under the table: 4 rows, so one draft; one may not draft."""
    table = PlannerSettings(batch_table=BatchTable((2, 4), (3, 1)))
    ready = [view(1, 0.1, "batch_table"), view(2, 0.1, "batch_table", 0), view(3, 0.1, "none")]
    assert plan(ready, FLAT_COST, table).draft_lens == {1: 1, 2: 0, 3: 0}
    assert plan(ready[:2], FLAT_COST, table).draft_lens == {1: 3, 2: 0}


def test_without_a_table_the_policy_says_so() -> None:
    with pytest.raises(ValueError, match="batch_table"):
        plan([view(1, 0.5, "batch_table")], FLAT_COST)


def test_a_table_by_grid_search() -> None:
    """a = 0.6, E = 1, 1.6, 1.96, 2.176 a sequence; T = 1 + 0.25 B k.

    B = 1: 1, 1.28, 1.307, 1.243. B = 2: 2, 2.133, 1.96. B = 4: 4, 3.2. So 2, 1 and 0: the best
    length falls with the batch.
    """
    found = batch_table_of(cost_by_draft(0.25), 0.6, (1, 2, 4), max_draft_len=4)
    assert found == BatchTable((1, 2, 4), (2, 1, 0))


def test_one_length_for_all() -> None:
    """a = 0.9 and 0.2, T = 1 + 0.25 a draft. E/T for 0, 1, 2, 3 drafts each: 2, 3.1/1.5 = 2.067,
    3.95/2 = 1.975, 4.687/2.5 = 1.875: one each. With a length of its own: four and none."""
    cost = cost_by_draft(0.25)
    ready = [view(1, 0.9, "goodput_global"), view(2, 0.2, "goodput_global")]
    assert plan(ready, cost).draft_lens == {1: 1, 2: 1}
    assert plan([replace(v, policy="goodput") for v in ready], cost).draft_lens == {1: 4, 2: 0}


def test_a_sequence_without_a_match_gets_none_of_the_one_length() -> None:
    """The second finds nothing to look up: 2, 2.9/1.25 = 2.32, 2.473, 2.537, 5.095/2 = 2.548."""
    ready = [view(1, 0.9, "goodput_global"), view(2, 0.9, "goodput_global", max_draft_len=0)]
    ready = [replace(v, options=(v.options[0]._replace(has_draft_passes=False),)) for v in ready]
    assert plan(ready, cost_by_draft(0.25)).draft_lens == {1: 4, 2: 0}


def test_every_policy_in_one_step() -> None:
    """All at a = 0.5, draft passes of 0.1 s. The fixed one takes three passes: they are paid.

    Global: to go with it brings its own 0.875 for nothing; a fourth pass 0.0625 tokens for 0.1 s,
    worth 7.5/1.3 * 0.1 = 0.58. The same holds for the one with a length of its own.
    """
    names = ("goodput", "goodput_global", "batch_table", "none", "fixed:3")
    ready = [view(i, 0.5, name) for i, name in enumerate(names)]
    table = PlannerSettings(batch_table=BatchTable((1, 5), (4, 2)))
    chosen = plan(ready, FLAT_COST, table)
    assert chosen.draft_lens == {0: 3, 1: 3, 2: 2, 3: 0, 4: 3}
    assert chosen.expected_tokens == pytest.approx(3 * 1.875 + 1.75 + 1)
    assert chosen.expected_s == pytest.approx(1.3)


def test_only_goodput_chooses_among_ways() -> None:
    lookup = DraftOption(4, (0.99,) * 4, has_draft_passes=False)
    for name in ("fixed:2", "goodput_global"):
        chosen = plan([with_option(view(1, 0.5, name), lookup)], FLAT_COST)
        assert (chosen.draft_lens, chosen.choices) == ({1: 2}, {})
    ready = [
        with_option(view(1, 0.5, "goodput"), lookup),
        with_option(view(2, 0.5, "fixed:1"), lookup),
    ]
    chosen = plan(ready, FLAT_COST)
    assert (chosen.draft_lens, chosen.choices) == ({1: 4, 2: 1}, {1: 1})
