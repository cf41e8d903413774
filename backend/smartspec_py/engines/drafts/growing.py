"""Grows trees of drafts on the device: the most probable paths by the proposer's own guesses.

Each depth is guessed after up to WIDTH nodes of the depth before, those with the most probable
paths. So with WIDTH guesses for each of them, a tree of depth d is chosen from
WIDTH + (d - 1) WIDTH^2 nodes (Li et al., "EAGLE-2", arXiv 2406.16858).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from smartspec_py.core.plan.trees import WIDTH
from smartspec_py.engines.base import Draft

MAX_TIMED = 8
"""Most trees that are timed together at the start. Trees pay for few requests only."""

NUM_TIMINGS = 5
"""How often drafting is timed. The fastest counts, because other processes only slow it down."""


class GrowingTrees:
    """Trees of B sequences. Node 0 is the last known token, then nodes are numbered as they are
    added: depth by depth, and the children of a node best first."""

    def __init__(self, num_trees: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_trees, 1, dtype=torch.long, device=device)
        self._parents = self._ends = self._tokens
        self._log_probs = torch.zeros(num_trees, 1, device=device)

    @property
    def num_ends(self) -> int:
        """Nodes that the next guesses follow."""
        return self._ends.shape[1]

    def grow(
        self, tokens: torch.Tensor, log_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add guesses, best first, after each of the present ends; both [B, num_ends, width].

        Returns the tokens of the new ends, and the index of the end before each; both [B, n].
        """
        before = self._log_probs.gather(1, self._ends)[:, :, None]
        # No guess may be more probable than its parent, and NaN would come before all others.
        guesses = log_probs.clamp(max=0.0).masked_fill(log_probs.isnan(), -torch.inf)
        paths = (before + guesses).flatten(1)
        parents = self._ends[:, :, None].expand_as(tokens).flatten(1)
        num_nodes, width = self._tokens.shape[1], tokens.shape[2]
        best = paths.topk(min(WIDTH, paths.shape[1])).indices
        self._ends = num_nodes + best
        self._tokens = torch.cat([self._tokens, tokens.flatten(1)], 1)
        self._parents = torch.cat([self._parents, parents], 1)
        self._log_probs = torch.cat([self._log_probs, paths], 1)
        return tokens.flatten(1).gather(1, best), best // width

    def drafts(self, nums: Sequence[int]) -> list[Draft]:
        """The most probable nodes of each tree, up to so many. nums: [B].

        The order is stable, so a node comes after its parent even if both are equally probable, as
        with certain guesses and where float32 rounds a guess away. Node 0 is always the first.
        """
        num_nodes, device = self._tokens.shape[1], self._tokens.device
        values, order = self._log_probs.sort(descending=True, stable=True)
        num_best = min(1 + max(nums), num_nodes)
        values, order = values[:, :num_best], order[:, :num_best]
        limits = torch.tensor(nums, device=device)[:, None]
        is_kept = torch.arange(num_best, device=device) <= limits
        is_kept &= values > -torch.inf
        nodes = order.masked_fill(~is_kept, num_nodes).sort().values
        of_nodes = nodes.clamp(max=num_nodes - 1)
        parents = torch.searchsorted(nodes, self._parents.gather(1, of_nodes))
        counts = is_kept.sum(1).tolist()
        both = torch.stack([self._tokens.gather(1, of_nodes), parents], 1).tolist()
        return [
            Draft(tuple(tokens[1:count]), parents=tuple(places[1:count]))
            for (tokens, places), count in zip(both, counts, strict=True)
        ]


def tree_s(
    seconds: Callable[[int, int], float], depth: int, max_sequences: int
) -> tuple[float, float]:
    """`ProposerCapabilities.tree_s`. seconds: to draft for so many sequences: trees of this depth,
    or chains if it is 0."""
    extra_s = []
    for num in (1, min(max_sequences, MAX_TIMED)):
        longer_s = seconds(num, depth) - seconds(num, 0)
        extra_s.append(max(0.0, longer_s) / (num * depth))
    return extra_s[0], extra_s[1]


def fastest_s(draft: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of some calls of `draft`, each after `prepare`."""
    seconds = []
    for _ in range(NUM_TIMINGS):
        prepare()
        start = time.perf_counter()
        draft()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
