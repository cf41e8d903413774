"""How many drafts of a text a proposer gets right, at every position and for every draft length.

Under the sampling contract the text does not depend on what was drafted, and drafts that were
accepted are the text. So whether the draft at a position is right depends on the text before it
and on nothing else, and one number a position answers for every draft length: how many drafts in a
row, from there on, are right. Position 0 is the first generated token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


class Acceptance(Protocol):
    """What is known of one request's text and one proposer."""

    def accepted(self, position: int, num_drafted: int) -> int:
        """Of num_drafted drafts, the first for the token at `position`, how many are kept."""
        ...

    def available(self, position: int) -> int:
        """The most drafts that there are at this position; what matched, of prompt lookup."""
        ...


ALWAYS = 1 << 16
"""More drafts than anybody asks for."""


class DraftRuns:
    """Runs of right drafts by position; past the last position nothing is right."""

    __slots__ = ("_available", "_runs")

    def __init__(self, runs: Sequence[int], available: Sequence[int] | None = None) -> None:
        """runs: at each position, drafts from there on that are right before one is wrong.
        available: see above; None is always enough."""
        self._runs = runs
        self._available = available

    @classmethod
    def of(cls, is_right: Iterable[bool]) -> DraftRuns:
        """From right or wrong at each position: (True, True, False, True) has runs 2, 1, 0, 1."""
        runs, run = [], 0
        for right in reversed(list(is_right)):
            run = run + 1 if right else 0
            runs.append(run)
        return cls(runs[::-1])

    def accepted(self, position: int, num_drafted: int) -> int:
        if position >= len(self._runs):
            return 0
        return min(self._runs[position], num_drafted)

    def available(self, position: int) -> int:
        if self._available is None:
            return ALWAYS
        return self._available[position] if position < len(self._available) else 0


def draw_runs(
    rng: np.random.Generator, num_positions: int, accept_prob: float, persistence: float
) -> DraftRuns:
    """Runs of a text whose drafts are right with probability accept_prob at every position.

    persistence: correlation between neighbouring positions, 0 to below 1. A draft behind a right
    one is right with probability a + persistence (1 - a), as in life, where easy stretches of text
    make long runs; behind a wrong one with a (1 - persistence).
    """
    uniform = rng.random(num_positions)
    if persistence == 0.0:
        return DraftRuns.of((uniform < accept_prob).tolist())
    after = (accept_prob * (1 - persistence), accept_prob + persistence * (1 - accept_prob))
    is_right: list[bool] = []
    prob = accept_prob
    for draw in uniform.tolist():
        is_right.append(draw < prob)
        prob = after[is_right[-1]]
    return DraftRuns.of(is_right)
