"""The number of correct drafts at each position of a text, for every draft length.

Under coupled verification, the text does not depend on the drafts. Accepted drafts are part of the
text. So whether a draft is correct depends only on the text before it. One number per position is
enough for all draft lengths: the number of consecutive correct drafts from this position on, called
a run. Position 0 is the first generated token. No draft after the last position is correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Runs = Sequence[int]

NO_DRAFT = -1
"""The run of a position at which the proposer has nothing to draft."""


def runs_of(is_right: Iterable[bool]) -> list[int]:
    """Runs from one flag per position: (True, True, False, True) has runs 2, 1, 0, 1."""
    runs, run = [], 0
    for right in reversed(list(is_right)):
        run = run + 1 if right else 0
        runs.append(run)
    return runs[::-1]


def num_accepted(runs: Runs, position: int, num_drafted: int) -> int:
    """Number of accepted drafts, out of num_drafted drafts that begin at `position`."""
    return max(0, min(runs[position], num_drafted)) if position < len(runs) else 0


def draw_runs(
    rng: np.random.Generator, num_positions: int, accept_prob: float, persistence: float
) -> list[int]:
    """Draw the runs of a text whose drafts are correct with probability accept_prob.

    persistence: correlation between neighbouring positions, at least 0 and below 1. With a for
    accept_prob, the probability of a correct draft is a + persistence (1 - a) after a correct
    draft, and a (1 - persistence) after a wrong one. Real text also has easy passages with long
    runs.
    """
    after = (accept_prob * (1 - persistence), accept_prob + persistence * (1 - accept_prob))
    is_right: list[bool] = []
    prob = accept_prob
    for uniform in rng.random(num_positions).tolist():
        is_right.append(uniform < prob)
        prob = after[is_right[-1]]
    return runs_of(is_right)


def with_pauses(
    runs: Runs, rng: np.random.Generator, match_len: float, pause_len: float
) -> list[int]:
    """Runs of prompt lookup whose matches come and go, as in a file that is copied with changes.

    match_len, pause_len: mean tokens of passages with a match and without one, at least 1
    (geometric). Drafts beyond the end of a passage are wrong.
    """
    paused, start = list(runs), 0
    while start < len(paused):
        end = min(len(paused), start + int(rng.geometric(1 / match_len)))
        paused[start:end] = [min(paused[at], end - at) for at in range(start, end)]
        start = min(len(paused), end + int(rng.geometric(1 / pause_len)))
        paused[end:start] = [NO_DRAFT] * (start - end)
    return paused
