"""Estimates for trees of drafts: how often other guesses than the best one are right."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

PRIOR = 0.3
"""Assumed probability that one of the other guesses is right if the best one is wrong. It was 0.22
to 0.45 with four guesses on the four workloads. Guess r has a share proportional to 1 / r^2."""

TRIALS = 64.0
"""Weight of this assumption, in wrong best guesses of a depth."""

MEMORY = 0.999
"""Decay factor of the counts of a depth for each wrong best guess."""


class RankEstimate:
    """See `engines.base.TreeProposer.rank_probs`."""

    def __init__(self, depth: int, width: int) -> None:
        """depth: number of depths. width: guesses for each depth."""
        shares = np.arange(1.0, width) ** -2.0
        self._right = np.zeros((depth, width))
        self._right[:, 1:] = PRIOR * TRIALS * shares / max(1.0, shares.sum())
        self._wrong = np.full((depth, 1), TRIALS)

    def probs(self) -> NDArray[np.float64]:
        """Shape [depth, width]; column 0 has no meaning."""
        found: NDArray[np.float64] = self._right / self._wrong
        return found

    def observe(self, ranks: Iterable[int | None]) -> None:
        """ranks: of the right guess for each depth of one draft, from depth 0; None if no guess was
        right. Depths after the first None do not count: their guesses were for another text."""
        for depth, rank in enumerate(ranks):
            if rank == 0:
                continue
            self._right[depth] *= MEMORY
            self._wrong[depth] = MEMORY * self._wrong[depth] + 1.0
            if rank is None:
                return
            self._right[depth, rank] += 1.0
