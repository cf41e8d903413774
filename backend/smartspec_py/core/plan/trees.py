"""Trees of drafts from guesses that do not depend on each other, such as those of Medusa heads.

The proposer has several guesses for each depth, best first. Depth 0 is the token after the last
known one. A node of the tree is a guess after the guesses of a path. With p(d), the probability
that the best guess of depth d is right, and c(r), the probability that guess r is right if the best
one is wrong, the probability of a path is the product over its nodes of

    q(d, 0) = p(d)        q(d, r) = (1 - p(d)) c(r)   for r > 0

A tree is expected to have as many accepted drafts as the sum over its nodes of the probability of
the path to the node. So the best tree of k nodes has the k most probable nodes. It is closed under
parents, because a path is at most as probable as its beginning. The planner can therefore treat the
ranked nodes as the positions of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.types import ROOT, Tree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_RANKS = 16
"""Largest product of (rank + 1) over a path. Other nodes are not considered: their paths have
several unlikely guesses. With four depths of four guesses, 160 of 340 nodes are left."""

OTHERS = 0.3
"""Assumed probability that one of the other guesses is right if the best one is wrong. It was 0.22
to 0.45 with four guesses on four workloads. Guess r has a share proportional to 1 / r^2."""


class TreeSpace:
    """The nodes that are considered, parents first."""

    def __init__(self, depth: int, width: int) -> None:
        """depth: number of depths. width: guesses for each depth."""
        self.depth, self.width = depth, width
        nodes = [(ROOT, 0, rank, rank + 1) for rank in range(min(width, MAX_RANKS))]
        for number, (_, at, _, ranks) in enumerate(nodes):  # grows while it is read
            if at + 1 < depth:
                for rank in range(min(width, MAX_RANKS // ranks)):
                    nodes.append((number, at + 1, rank, ranks * (rank + 1)))
        self._parents, self._depths, self._ranks, _ = np.array(nodes).T
        shares = np.arange(1.0, width) ** -2.0
        self._others = np.append(0.0, OTHERS * shares / max(1.0, shares.sum()))
        # The nodes of each depth are adjacent.
        starts = np.searchsorted(self._depths, np.arange(depth + 1))
        self._levels = [slice(*ends) for ends in pairwise(starts.tolist())]

    def __len__(self) -> int:
        return len(self._parents)

    def ranked(self, accept_probs: Floats, num_nodes: int) -> tuple[Ints, Floats]:
        """The most probable nodes of B sequences, best first.

        accept_probs: p, [B, depth]. Returns the nodes, and the probability of each divided by
        that of the node before it, so that products are probabilities of paths. Both have shape
        [B, min(num_nodes, len(self))].
        """
        q = (1.0 - accept_probs)[:, :, None] * self._others
        q[:, :, 0] = accept_probs
        probs = q[:, self._depths, self._ranks]
        for level in self._levels[1:]:
            probs[:, level] *= probs[:, self._parents[level]]
        nodes = (-probs).argsort(axis=1, kind="stable")[:, :num_nodes]
        found = np.take_along_axis(probs, nodes, axis=1)
        found[:, 1:] /= found[:, :-1].copy()
        return nodes, found

    def tree(self, nodes: Sequence[int] | Ints) -> Tree:
        """The tree of these nodes, in this order. Parents must come before their children."""
        index = np.array(nodes)
        places = {node: place for place, node in enumerate(index.tolist())} | {ROOT: ROOT}
        parents = tuple([places[parent] for parent in self._parents[index].tolist()])
        return Tree(parents, tuple(self._ranks[index].tolist()))
