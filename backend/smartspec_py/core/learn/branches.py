"""Learns how often another guess is right where the best guess of a tree is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from smartspec_py.core.plan.trees import SHARES

INITIAL_PROB, INITIAL_TRIALS = 0.4, 16.0
"""C before any observation, and its weight. It was 0.36 to 0.71 for an EAGLE-3 head on four
workloads (H200, 2026-11-26)."""

FORGETTING = 0.998
"""Decay factor of the counts at every step. The estimate returns to INITIAL_PROB if no tree was
drafted, so trees are tried again."""


class BranchTracker:
    """C of one proposer, see `core.plan.trees`."""

    def __init__(self) -> None:
        self._num_right = self._num_trials = 0.0

    @property
    def prob(self) -> float:
        num_right = INITIAL_PROB * INITIAL_TRIALS + self._num_right
        return min(1.0, num_right / (INITIAL_TRIALS + self._num_trials))

    def fade(self) -> None:
        """Account for a step."""
        self._num_right *= FORGETTING
        self._num_trials *= FORGETTING

    def observe(
        self, drafts: Sequence[int], parents: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        """Learn from the tokens that were generated in a step with a tree.

        parents: of each draft the node that it follows, as in `engines.draft`.

        The trial of a node counts the shares of those other guesses that the tree had. Returns the
        number of drafts on the path of best guesses, and how many of these were right.
        """
        children = defaultdict[int, list[int]](list)
        for node, parent in enumerate(parents, start=1):
            children[parent].append(node)
        best = [0]
        while follow := children[best[-1]]:
            best.append(follow[0])
        node, num_best = 0, 0
        for token in generated:
            guesses = [drafts[child - 1] for child in children[node]]
            if guesses and guesses[0] != token:
                self._num_right += token in guesses
                self._num_trials += float(SHARES[: len(guesses) - 1].sum())
            if token not in guesses:
                break
            node = children[node][guesses.index(token)]
            num_best += node in best
        return len(best) - 1, num_best
