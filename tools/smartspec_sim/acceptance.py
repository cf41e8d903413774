"""The number of correct drafts at each position of a text, for every draft length.

Under coupled verification, the text does not depend on the drafts. Accepted drafts are part of the
text. So whether a draft is correct depends only on the text before it. One number per position is
enough for all draft lengths: the number of consecutive correct drafts from this position on.
Position 0 is the first generated token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.learn.ranks import RankEstimate
from smartspec_py.core.types import ROOT, Tree


class Acceptance(Protocol):
    """The acceptance of one proposer's drafts for one request."""

    def accepted(self, position: int, num_drafted: int) -> int:
        """Number of accepted drafts, out of num_drafted drafts that begin at `position`."""
        ...

    def available(self, position: int) -> int:
        """Maximum number of drafts at this position. For prompt lookup: the length of the match."""
        ...


ALWAYS = 1 << 16
"""More drafts than any step requests."""


class DraftRuns:
    """Runs of correct drafts by position. No draft after the last position is correct."""

    __slots__ = ("_available", "_runs")

    def __init__(self, runs: Sequence[int], available: Sequence[int] | None = None) -> None:
        """runs: at each position, the number of correct drafts before the first wrong one.
        available: maximum number of drafts at each position; None means no maximum."""
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
        if position >= len(self._runs):
            return 0
        return min(self._runs[position], num_drafted)

    def available(self, position: int) -> int:
        if self._available is None:
            return ALWAYS
        return self._available[position] if position < len(self._available) else 0


NO_RANK = 255
"""In `GuessRanks`: no guess was right."""


class GuessRanks:
    """Heads with several guesses for each of the next tokens."""

    def __init__(self, ranks: NDArray[np.uint8]) -> None:
        """ranks: [positions, depth]. For a draft that begins at a position, the number of the right
        guess at each depth. 0 is the best guess."""
        self.ranks = ranks

    def accepted(self, position: int, num_drafted: int) -> int:
        """Of the chain of best guesses."""
        if position >= len(self.ranks):
            return 0
        return int(np.argmax(np.append(self.ranks[position, :num_drafted], NO_RANK) != 0))

    def available(self, position: int) -> int:
        return self.ranks.shape[1]

    def path(self, position: int, tree: Tree) -> tuple[int, ...]:
        """The accepted drafts of a tree."""
        right = self.ranks[position].tolist() if position < len(self.ranks) else []
        found: list[int] = []
        for draft, (parent, rank) in enumerate(zip(*tree, strict=True)):
            is_next = parent == (found[-1] if found else ROOT)
            if is_next and len(found) < len(right) and right[len(found)] == rank:
                found.append(draft)
        return tuple(found)


HEADS_DEPTH, HEADS_WIDTH = 4, 4
"""Number of heads, and guesses of each."""

HEADS_DECAY = 0.9
"""Ratio of the accuracies of successive heads. It was 0.87 to 1.0 for the heads of the shipped
target."""


def draw_ranks(rng: np.random.Generator, num_positions: int, accept_prob: float) -> GuessRanks:
    """Draw the right guesses of a text.

    The best guess for the next token is right with probability accept_prob, and the best guess for
    each further token with HEADS_DECAY times that. For the other guesses, see
    `core.learn.ranks.PRIOR`.
    """
    probs = RankEstimate(HEADS_DEPTH, HEADS_WIDTH).probs()
    probs[:, 0] = accept_prob * HEADS_DECAY ** np.arange(HEADS_DEPTH)
    probs[:, 1:] *= 1.0 - probs[:, :1]
    draws = rng.random((num_positions, HEADS_DEPTH, 1))
    found = (draws >= probs.cumsum(axis=1)).sum(axis=2)
    return GuessRanks(np.where(found < HEADS_WIDTH, found, NO_RANK).astype(np.uint8))


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
