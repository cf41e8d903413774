"""Pass tables and the cost model: interpolation worked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from smartspec_py.core.cost import CostModel, PassTable

TABLE = PassTable(rows=(1, 4), tokens_per_row=(1, 3), seconds=((1.0, 2.0), (4.0, 8.0)))


@pytest.mark.parametrize(
    ("batch_size", "num_tokens", "seconds"),
    [
        (1, 1, 1.0),  # a measured point
        (4, 12, 8.0),  # a measured point: 12 tokens are 3 a row
        (1, 2, 1.5),  # half-way along the tokens
        (2, 2, 2.0),  # a third of the way from 1.0 to 4.0
        (2, 4, 3.0),  # 2 a row: 1.5 and 6.0, a third of the way
        (2, 3, 2.5),  # 1.5 a row: 1.25 and 5.0, a third of the way
        (7, 7, 7.0),  # 3 rows past the last, at 1.0 a row
        (1, 5, 3.0),  # 2 tokens past the last, at 0.5 a token
        (0, 0, 0.0),
    ],
)
def test_pass_s(batch_size: int, num_tokens: int, seconds: float) -> None:
    assert TABLE.pass_s(batch_size, num_tokens) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("context_len", "seconds"),
    [
        (-1, 2.0),  # as measured
        (10, 2.0),
        (15, 3.0),  # 5 more tokens of each of 2 rows, 0.1 s each
        (5, 1.0),
        (0, 0.0),  # never below nothing
    ],
)
def test_context_is_charged_by_row_and_token(context_len: float, seconds: float) -> None:
    table = PassTable((1, 4), (1,), ((1.0,), (4.0,)), context_len=10, context_s=0.1)
    assert table.pass_s(2, 2, context_len) == pytest.approx(seconds)


def test_one_point_is_a_constant() -> None:
    table = PassTable((1,), (1,), ((0.5,),))
    assert [table.pass_s(rows, tokens) for rows, tokens in ((1, 1), (9, 9), (9, 90))] == [0.5] * 3


@pytest.mark.parametrize(
    ("rows", "tokens_per_row", "seconds", "word"),
    [
        ((), (1,), (), "rows"),
        ((0, 1), (1,), ((1.0,), (1.0,)), "rows"),
        ((2, 2), (1,), ((1.0,), (1.0,)), "rows"),
        ((1,), (2, 1), ((1.0, 1.0),), "tokens_per_row"),
        ((1, 2), (1,), ((1.0,),), "seconds"),
        ((1,), (1, 2), ((1.0,),), "seconds"),
    ],
)
def test_a_table_that_is_none_is_refused(
    rows: tuple[int, ...],
    tokens_per_row: tuple[int, ...],
    seconds: tuple[tuple[float, ...], ...],
    word: str,
) -> None:
    with pytest.raises(ValueError, match=f"^{word}"):
        PassTable(rows, tokens_per_row, seconds)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 3.0),
        ({"target_base": 2.0}, 5.0),
        ({"target_slope": 3.0}, 5.0),
        ({"target_base": 0.5, "target_slope": 0.5}, 1.5),
        ({"draft_factor": 9.0}, 3.0),
    ],
)
def test_factors_of_the_target(changes: dict[str, float], seconds: float) -> None:
    """2 rows with 4 tokens take 3.0 by TABLE, of which 2.0 for one token a row."""
    cost = replace(CostModel(target=TABLE), **changes)
    assert cost.target_s(2, 4, -1.0) == pytest.approx(seconds)
    assert cost.targets_s(2, np.array([4.0]), -1.0) == pytest.approx([seconds])


def test_later_tokens_of_a_row_can_cost_context_too() -> None:
    """2 rows of 2 tokens: 2 s, 2 x 5 x 0.1 s of context, and 2 x 5 x 0.2 s for the second ones."""
    table = PassTable((1, 2), (1, 2), ((1.0, 1.0), (2.0, 2.0)), 10, 0.1, 0.2)
    assert table.pass_s(2, 4, 15) == pytest.approx(2.0 + 1.0 + 2.0)
    assert table.pass_s(2, 2, 15) == pytest.approx(2.0 + 1.0)


def test_one_token_a_row_is_the_pass_with_that_many_tokens() -> None:
    table = PassTable((1, 4), (1, 3), ((1.0, 2.0), (4.0, 8.0)), context_len=10, context_s=0.1)
    for rows in (0, 1, 3, 9):
        assert table.one_token_s(rows, 15) == pytest.approx(table.pass_s(rows, rows, 15))
        assert table.one_token_by_rows[rows] == pytest.approx(table.one_token_s(rows))


def test_a_factor_on_draft_passes_shares_the_measured_table() -> None:
    """At one token each, rows 1, 2, 4 take 1.0, 2.0, 4.0; half as much with a factor of 0.5. A pass
    of no rows is free."""
    profile = CostModel(target=TABLE, draft=TABLE)
    cost = replace(profile, draft_factor=0.5)
    assert [cost.draft_s(rows) for rows in (0, 1, 2, 4)] == pytest.approx([0.0, 0.5, 1.0, 2.0])
    assert cost.draft is profile.draft


def test_a_prompt_chunk_costs_what_it_adds() -> None:
    """One row: 3.0 with 5 tokens, 1.0 with one; 2.0 more."""
    cost = CostModel(target=TABLE)
    assert cost.prefill_s(5) == pytest.approx(2.0)
    assert cost.prefill_s(0) == 0.0


def test_a_prompt_that_was_measured_is_charged_by_that() -> None:
    """1 s for one token, 9 s for 5 and 10 s for 9, whatever checking 5 drafts takes: 8.0 more, 8.5
    half-way; and on with 0.25 a token beyond."""
    prompt = PassTable((1,), (1, 5, 9), ((1.0, 9.0, 10.0),))
    cost = CostModel(target=TABLE, prompt=prompt)
    assert [cost.prefill_s(n) for n in (0, 1, 5, 7, 13)] == pytest.approx(
        [0.0, 0.0, 8.0, 8.5, 10.0]
    )
    assert cost.target_s(1, 5, -1.0) == CostModel(target=TABLE).target_s(1, 5, -1.0)
