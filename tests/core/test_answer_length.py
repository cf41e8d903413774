"""How many tokens a request is expected to generate."""

from __future__ import annotations

import pytest

from smartspec_py.core.learn.answer_length import INITIAL_MEAN, AnswerLength


def test_the_mean_of_recent_answers() -> None:
    lengths = AnswerLength()
    assert lengths.rest(0) == INITIAL_MEAN
    lengths.observe(30)
    assert INITIAL_MEAN > lengths.rest(0) > 30
    for _ in range(60):
        lengths.observe(30)
    assert lengths.mean == pytest.approx(30, rel=0.1)
    for _ in range(60):
        lengths.observe(400)
    assert lengths.mean == pytest.approx(400, rel=0.1)


def test_an_answer_that_is_longer_than_usual() -> None:
    lengths = AnswerLength()
    assert lengths.rest(int(INITIAL_MEAN) + 50) == INITIAL_MEAN + 50
