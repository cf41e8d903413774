"""Shaping and truncation: each rule by hand, drafts that count as history, ties, no view of others.

The row of the tables is LOGITS = 2, 1, 0, -1, 0.5.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.decoding.shaping import Shaping, TokenHistory, shape_logits
from smartspec_py.engines.decoding.truncation import truncate

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
OUT = -math.inf


def history_of(prompt: tuple[int, ...], generated: tuple[int, ...] = ()) -> TokenHistory:
    history = TokenHistory(len(prompt))
    history.extend(prompt)
    history.extend(generated)
    return history


def shape_one(
    sampling: SamplingParams, history: TokenHistory, drafts: tuple[int, ...] = ()
) -> list[float]:
    """LOGITS as they are after history and all drafts."""
    shaped: list[float] = shape_logits(LOGITS[None], [Shaping(0, sampling, history, drafts)])[0][
        0
    ].tolist()
    return shaped


@pytest.mark.parametrize(
    ("params", "prompt", "generated", "expected"),
    [
        ({"logit_bias": ((3, 2.5), (0, -1.0))}, (0,), (), [1, 1, 0, 1.5, 0.5]),
        ({"logit_bias": ((0, -math.inf),)}, (0,), (), [OUT, 1, 0, -1, 0.5]),
        # Known: 0 and 3 of the prompt, 4 generated; 2 / 2, -1 * 2, 0.5 / 2.
        ({"repetition_penalty": 2.0}, (0, 3), (4,), [1, 1, 0, -2, 0.25]),
        # Once a token, however often; the prompt does not count.
        ({"presence_penalty": 0.5}, (0,), (1, 1), [2, 0.5, 0, -1, 0.5]),
        ({"frequency_penalty": 0.25}, (0, 1), (1, 1, 4), [2, 0.5, 0, -1, 0.25]),
        ({"presence_penalty": -0.5}, (0,), (2,), [2, 1, 0.5, -1, 0.5]),
        # 1 / 2 - 0.5 - 2 * 0.25 = -0.5; the prompt's 0 only 2 / 2.
        (
            {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
            (0,),
            (1, 1),
            [1, -0.5, 0, -1, 0.5],
        ),
        # The bias comes first: -1 + 3 = 2 is positive, and so is divided.
        ({"logit_bias": ((3, 3.0),), "repetition_penalty": 2.0}, (3,), (), [2, 1, 0, 1, 0.5]),
        ({"bad_words": ((2,), (4,))}, (0,), (), [2, 1, OUT, -1, OUT]),
        ({"bad_words": ((1, 4),)}, (0,), (1,), [2, 1, 0, -1, OUT]),
        ({"bad_words": ((1, 4),)}, (1,), (0,), [2, 1, 0, -1, 0.5]),
        ({"bad_words": ((3, 1, 4), (2, 1, 0))}, (3,), (1,), [2, 1, 0, -1, OUT]),
        ({"bad_words": ((3, 3, 3, 4),)}, (3,), (3,), [2, 1, 0, -1, 0.5]),
        ({"min_tokens": 2, "end_tokens": (0,)}, (4, 4), (1,), [OUT, 1, 0, -1, 0.5]),
        ({"min_tokens": 2, "end_tokens": (0, 3)}, (4, 4), (1,), [OUT, 1, 0, OUT, 0.5]),
        ({"min_tokens": 2, "end_tokens": (0, 3)}, (4, 4), (1, 1), [2, 1, 0, -1, 0.5]),
        # Nothing is left: the unprocessed row's best token is drawn, whatever banned it.
        ({"bad_words": ((0,), (1,), (2,), (3,), (4,))}, (1,), (), [0, OUT, OUT, OUT, OUT]),
    ],
)
def test_shaping_by_hand(
    params: dict[str, Any],
    prompt: tuple[int, ...],
    generated: tuple[int, ...],
    expected: list[float],
) -> None:
    assert shape_one(SamplingParams(**params), history_of(prompt, generated)) == expected


def test_after_min_tokens_logits_are_not_copied() -> None:
    """With a vocabulary of 49,152 tokens, a copy takes 0.5 ms, twice in a step with drafts."""
    logits, sampling = LOGITS[None], SamplingParams(min_tokens=1, end_tokens=(0,))
    after = Shaping(0, sampling, history_of((4,), (1,)))
    assert shape_logits(logits, [after])[0] is logits


@pytest.mark.parametrize(
    ("params", "rows"),
    [
        # After prompt 0: drafts 1 and 1 are once and twice generated in the rows behind them.
        ({"frequency_penalty": 0.25}, [[2, 1], [2, 0.75], [2, 0.5]]),
        ({"repetition_penalty": 2.0}, [[1, 1], [1, 0.5], [1, 0.5]]),
        ({"bad_words": ((0, 1), (1, 1, 0))}, [[2, OUT], [2, 1], [OUT, 1]]),
        ({"min_tokens": 2, "end_tokens": (1,)}, [[2, OUT], [2, OUT], [2, 1]]),
    ],
)
def test_drafts_count_as_generated(params: dict[str, Any], rows: list[list[float]]) -> None:
    """Three rows of one sequence with drafts 1, 1; tokens 0 and 1 of each."""
    sampling, history = SamplingParams(**params), history_of((0,))
    found = [shape_one(sampling, history, (1, 1)[:num]) for num in range(3)]
    assert [row[:2] for row in found] == rows


def test_tokens_beyond_the_vocabulary_do_nothing() -> None:
    """Two rows, so that a place beyond the first would be one of the second."""
    sampling = SamplingParams(
        repetition_penalty=2.0,
        logit_bias=((5, 9.0), (1, 1.0)),
        bad_words=((6,), (5, 3)),
        min_tokens=9,
        end_tokens=(7,),
    )
    history = history_of((5, 7))
    rows = [Shaping(0, sampling, history), Shaping(1, sampling, history, (5,))]
    shaped, _ = shape_logits(LOGITS.repeat(2, 1), rows)
    assert shaped.tolist() == [[2, 2, 0, -1, 0.5], [2, 2, 0, OUT, 0.5]]


def test_history_counts_generated_tokens_only() -> None:
    """Prompt 0..99, 40 of them generated again, once and once more; draft 100 is new."""
    history = history_of(tuple(range(100)), tuple(range(40)) * 2)
    assert len(history) == 180
    assert history.tail(2) == (38, 39)
    assert history.tail(0) == ()
    for drafts, expected in (
        ((), [2] * 40 + [0] * 60),
        ((100, 7), [2] * 7 + [3] + [2] * 32 + [0] * 60 + [1]),
        ((99, 99), [2] * 40 + [0] * 59 + [2]),
    ):
        tokens, counts = history.count_with(drafts)
        assert tokens.tolist() == list(range(len(expected)))
        assert counts.tolist() == expected


def test_logits_are_left_as_they_were_and_other_rows_as_they_are() -> None:
    logits = LOGITS.repeat(3, 1)
    sampling = SamplingParams(logit_bias=((0, -5.0),))
    shaped, _ = shape_logits(logits, [Shaping(1, sampling, history_of((0,)))])
    assert torch.equal(logits, LOGITS.repeat(3, 1))
    assert shaped.tolist() == [LOGITS.tolist(), [-3, 1, 0, -1, 0.5], LOGITS.tolist()]


def kept(params: dict[str, Any], logits: torch.Tensor = LOGITS) -> list[int]:
    """Tokens that truncation leaves, the best first."""
    candidates = truncate(logits[None], [SamplingParams(**params)])
    is_left = candidates.scores[0] > -torch.inf
    tokens: list[int] = candidates.tokens[0][is_left].tolist()
    return tokens


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # p = .563 .207 .076 .028 .126; relative to the best 1 .368 .135 .050 .223.
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [0, 1, 4]),
        ({"top_k": 9}, [0, 1, 4, 2, 3]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        # Of the three that top-k keeps, the first has .563 / .896 = .63.
        ({"top_k": 3, "top_p": 0.62}, [0]),
        ({"min_p": 0.2}, [0, 1, 4]),
        ({"min_p": 1.0}, [0]),
        # The ratio is squared at half the temperature: .368 ** 2 = .135, .223 ** 2 = .050.
        ({"min_p": 0.1, "temperature": 0.5}, [0, 1]),
        ({"min_p": 0.2, "top_k": 2}, [0, 1]),
        ({"min_p": 0.3, "top_p": 0.95}, [0, 1]),
        # Top-p counts what min-p drops: .563 + .207 = .77 < .8 lets 4 in. Were it to count only
        # what min-p leaves, .77 / .896 = .86 would not.
        ({"min_p": 0.2, "top_p": 0.8}, [0, 1, 4]),
    ],
)
def test_truncation_by_hand(params: dict[str, Any], expected: list[int]) -> None:
    assert kept({"temperature": 1.0, **params}) == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 4}, [1, 2, 4, 0]),
        # p = .297 thrice and .055 twice; two of them make .593.
        ({"top_p": 0.55}, [1, 2]),
        ({"min_p": 1.0}, [1, 2, 4]),
    ],
)
def test_the_lower_of_equal_logits_is_the_better(
    params: dict[str, Any], expected: list[int]
) -> None:
    """Also where the equal ones are 0.0 and -0.0."""
    best = math.log(5.4)
    logits = torch.tensor([-0.0, best, best, 0.0, best])
    assert kept({"temperature": 1.0, **params}, logits) == expected


def test_ties_at_the_cut_do_not_depend_on_the_batch() -> None:
    """Logits of few values, as in half precision: top_k 5 alone and beside top_k 300."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 4, (2, 500), generator=generator).float()
    params = [SamplingParams(temperature=1.0, top_k=k) for k in (5, 300)]
    together = truncate(logits, params)
    alone = truncate(logits[:1], params[:1])
    assert torch.equal(together.tokens[0, :5], alone.tokens[0])
    assert (together.scores[0, 5:] == -torch.inf).all()
    best = (logits[0] == 3).nonzero()[:5, 0]
    assert torch.equal(alone.tokens[0], best)
