"""Trees of drafts: how probable their nodes are.

In a tree, several guesses may follow the same token, best first. With p(d), the probability that
the best guess at depth d is right, and C, the probability that another guess is right if the best
one is wrong, guess r of WIDTH is right with the probability

    q(d, 0) = p(d)        q(d, r) = (1 - p(d)) C share(r)   for r > 0

and all guesses on the path to a node with the product of theirs. A verification accepts the drafts
of the one path that is right, so the expected number of accepted drafts is the sum of these
probabilities over all nodes. The best tree of n nodes therefore has the n most probable paths. A
path is at most as probable as its beginning, so these nodes are a tree, and to the planner they are
like the positions of a chain.

The planner counts nodes. Which nodes these are, the proposer decides by its own probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.types import DraftOption

Floats = NDArray[np.float64]

MAX_NODES = 63
"""Most drafts of a tree. With the last known token, these are the bits of one integer."""

MAX_STEP_NODES = 128
"""Most drafts of all trees of a step. On a GPU, a token more makes larger passes longer."""

WIDTH = 8
"""Guesses after one token, and tokens of each depth that further guesses may follow."""

MAX_DEPTH = 1 + MAX_NODES // WIDTH
"""Longest path of a tree. An EAGLE head then reads at most MAX_NODES tokens for the last depth."""

SHARES = np.arange(1.0, WIDTH) ** -2 / (np.arange(1.0, WIDTH) ** -2).sum()
"""share(r) for r > 0. The sum is 1."""


def tree_options(
    chains: Sequence[DraftOption], other_prob: float, num_nodes: int, depth_s: float
) -> list[list[DraftOption]]:
    """The trees that may take the place of each of these chains, which are of one proposer: one of
    each depth, or only the deepest if a depth takes no draft pass.

    other_prob: C, above 0. depth_s: seconds that each depth takes in addition to the chain's.
    """
    depths = [min(chain.max_draft_len, MAX_DEPTH) for chain in chains]
    accept_probs = np.full((len(chains), max(depths, default=0)), 0.5)  # the rest is not used
    for row, chain, deepest in zip(accept_probs, chains, depths, strict=True):
        row[:deepest] = chain.accept_probs[:deepest]
    trees: list[list[DraftOption]] = [[] for _ in chains]
    for depth, paths in enumerate(path_probs(accept_probs, other_prob, num_nodes), start=1):
        ratios = paths.copy()
        ratios[:, 1:] /= paths[:, :-1]
        for of_chain, chain, deepest, probs in zip(trees, chains, depths, ratios, strict=True):
            if depth == deepest or (depth < deepest and chain.has_draft_passes):
                tree = DraftOption(
                    max_draft_len=len(probs),
                    accept_probs=probs,
                    draft_prefill_len=chain.draft_prefill_len,
                    has_draft_passes=chain.has_draft_passes,
                    draft_s=chain.draft_s + depth * depth_s,
                    proposer=chain.proposer,
                    depth=depth,
                )
                of_chain.append(tree)
    return trees


def path_probs(accept_probs: Floats, other_prob: float, num_nodes: int) -> Iterator[Floats]:
    """For the depths 1, 2, .. the probabilities of the most probable paths of up to so many tokens.

    accept_probs: p, [B, depths]. other_prob: C, above 0. Yields shape [B, n], best first, with n at
    most num_nodes.
    """
    others = (1.0 - accept_probs)[..., None] * (other_prob * SHARES)
    guesses = np.concatenate([accept_probs[..., None], others], axis=-1)
    ends = np.ones((len(accept_probs), 1))
    best = np.zeros((len(accept_probs), 0))
    for depth in range(accept_probs.shape[1]):
        paths = ends[:, :, None] * guesses[:, depth, None]
        paths = _most(paths.reshape(len(paths), -1), num_nodes)
        ends = paths[:, :WIDTH]
        best = _most(np.concatenate([best, paths], axis=1), num_nodes)
        yield best


def _most(values: Floats, num: int) -> Floats:
    """The num largest of each row, in descending order."""
    return np.sort(values, axis=1)[:, : -num - 1 : -1]
