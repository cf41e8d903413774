"""The trees that the planner can choose from, and the tasks of a chosen tree.

A proposer with several guesses for each position (`TreeProposer`) drafts trees. If it runs no
model, as Medusa heads, its tree can have a branch: the chain of prompt lookup. Both are then
verified in one pass, and the longer accepted path counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.learn.ranks import BranchEstimate
from smartspec_py.core.plan.trees import TreeSpace
from smartspec_py.core.types import SequenceId, Tree
from smartspec_py.engines.base import Draft, Event, TreeProposer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_BRANCH: Floats = np.zeros(0)


class Parts(NamedTuple):
    """What is asked for a planned tree. num_own: nodes of its proposer. tree: those nodes; None for
    a chain. num_branch: drafts of the branch."""

    num_own: int
    tree: Tree | None
    num_branch: int


class Trees:
    """The trees of the last plan, by proposer and sequence. Owned by the loop thread."""

    def __init__(self, proposers: Mapping[str, TreeProposer]) -> None:
        self._proposers = proposers
        able = {name: one.capabilities for name, one in proposers.items()}
        self.spaces = {n: TreeSpace(one.tree_depth, one.tree_width) for n, one in able.items()}
        # Ranked nodes, see `TreeSpace`.
        self._nodes: dict[tuple[str, SequenceId], Ints] = {}
        self._branch = BranchEstimate()
        # For sequences whose tree may have a branch: the probability of each of its drafts.
        self._survivals: dict[SequenceId, Floats] = {}
        # For sequences whose last draft had one: the drafts before it, and its planned length.
        self._drafted: dict[SequenceId, tuple[int, int]] = {}

    @property
    def sequences(self) -> set[SequenceId]:
        return {sequence for _, sequence in self._nodes} | self._survivals.keys()

    def accept_probs(
        self,
        name: str,
        sequences: Sequence[SequenceId],
        num_nodes: int,
        chain_probs: Floats,
        branches: Mapping[SequenceId, Floats],
    ) -> Floats:
        """`DraftOption.accept_probs` of the best num_nodes nodes, shape [B, num_nodes].

        chain_probs: of the best guesses, [B, depth]. branches: for each sequence whose tree may
        have a branch, the acceptance probabilities of the branch's drafts.
        """
        space = self.spaces[name]
        nodes, probs = space.ranked(chain_probs, self._proposers[name].rank_probs(), num_nodes)
        if branches:
            survivals = np.zeros_like(probs)
            for row, sequence in zip(survivals, sequences, strict=True):
                own = branches.get(sequence, NO_BRANCH)[: len(row)]
                row[: len(own)] = own
            survivals = survivals.cumprod(axis=1)
            self._survivals.update(zip(sequences, survivals, strict=True))
            nodes, probs = space.with_branch(nodes, probs, survivals * self._branch.share)
        self._nodes.update(zip([(name, one) for one in sequences], nodes, strict=True))
        return probs

    def num_passes(self, name: str, sequence: SequenceId, num_nodes: int) -> Ints:
        """`DraftOption.num_passes`. Only for trees without a branch."""
        return self.spaces[name].num_passes(self._nodes[name, sequence][:num_nodes])

    def parts(self, name: str, sequence: SequenceId, num_nodes: int) -> Parts:
        """Of the best num_nodes nodes."""
        space = self.spaces[name]
        nodes = self._nodes[name, sequence][:num_nodes]
        own = nodes[nodes < len(space)].tolist()
        tree = space.tree(own)
        return Parts(len(own), tree if any(tree.ranks) else None, num_nodes - len(own))

    def joined(self, sequence: SequenceId, draft: Draft, branch: Draft) -> Draft:
        """The draft with the branch."""
        self._drafted[sequence] = len(draft.tokens), len(branch.tokens)
        return draft.with_branch(branch.tokens)

    def observe(self, event: Event) -> bool:
        """Learn what the branch added, if the last draft had one. Returns whether it had."""
        drafted = self._drafted.pop(event.sequence, None)
        if drafted is None or not event.num_drafted:
            return False
        num_own, length = drafted
        accepted = event.path or range(event.num_accepted)
        num_added = sum(1 for node in accepted if node >= num_own)
        self._branch.observe(float(self._survivals[event.sequence][:length].sum()), num_added)
        return True

    def release(self, name: str, sequence: SequenceId) -> None:
        self._nodes.pop((name, sequence), None)
        self._survivals.pop(sequence, None)
        self._drafted.pop(sequence, None)
