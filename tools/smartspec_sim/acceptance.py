"""The number of correct drafts at each position of a text, for every draft length.

Under coupled verification, the text does not depend on the drafts. Accepted drafts are part of the
text. So whether a draft is correct depends only on the text before it. One number per position is
enough for all draft lengths: the number of consecutive correct drafts from this position on.
Position 0 is the first generated token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

ALWAYS = 1 << 16
"""More drafts than any step requests."""


class DraftRuns:
    """Runs of correct drafts by position. No draft after the last position is correct."""

    __slots__ = ("_available", "_runs")

    def __init__(self, runs: Sequence[int], available: Sequence[int] | None = None) -> None:
        """runs: at each position, the number of correct drafts before the first wrong one.
        available: maximum number of drafts at each position, such as the length of a match of
        prompt lookup; None means no maximum."""
        self._runs = runs
        self._available = available

    @classmethod
    def of(cls, is_right: Iterable[bool]) -> DraftRuns:
        """Build runs from one flag per position: (True, True, False, True) has runs 2, 1, 0, 1."""
        runs, run = [], 0
        for right in reversed(list(is_right)):
            run = run + 1 if right else 0
            runs.append(run)
        return cls(runs[::-1])

    def accepted(self, position: int, num_drafted: int) -> int:
        """Number of accepted drafts, out of num_drafted drafts that begin at `position`."""
        if position >= len(self._runs):
            return 0
        return min(self._runs[position], num_drafted)

    def available(self, position: int) -> int:
        """Maximum number of drafts at this position."""
        if self._available is None:
            return ALWAYS
        return self._available[position] if position < len(self._available) else 0


def draw_runs(
    rng: np.random.Generator, num_positions: int, accept_prob: float, persistence: float
) -> DraftRuns:
    """Draw the runs of a text whose drafts are correct with probability accept_prob.

    persistence: correlation between neighbouring positions, at least 0 and below 1. With a for
    accept_prob, the probability of a correct draft is a + persistence (1 - a) after a correct
    draft, and a (1 - persistence) after a wrong one. Real text also has easy passages with long
    runs.
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
