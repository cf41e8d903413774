"""A draft: tokens that a target verifies, a chain or a tree.

Nodes are numbered as in a pass of the target: node 0 is the last known token, and node i is the
i-th token of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a draft that is not a chain.

    parents[i - 1]: the node that node i follows, always a smaller number than i.
    """

    parents: tuple[int, ...]

    @property
    def depths(self) -> list[int]:
        """Of each node, its distance from node 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def seen(self) -> list[int]:
        """Of each node, the nodes that it attends to, as bits: itself and its ancestors."""
        bits = [1]
        for node, parent in enumerate(self.parents, start=1):
            bits.append(1 << node | bits[parent])
        return bits


class Draft(NamedTuple):
    """Drafted tokens.

    probs: [len(tokens), vocab_size], the distribution from which each token was drawn, in the
        array type of the target's engine; None if the tokens were not sampled. Required where
        rejection verifies sampled drafts. Verify every sampled token: leaving one out because of
        its value would bias the text. A draft may still stop after a token, such as an end token.
    tree: None for a chain. Nodes with the same parent have different tokens, and the first of them
        is the best guess. Rejection verifies only chains.
    on_device: the tokens as a tensor [len(tokens)], if only the device knows them yet: `tokens` are
        then NO_TOKEN. The host reads them with the results of their verification, so drafting never
        waits for the device. Not used if earlier tokens shape the logits.
    """

    tokens: tuple[int, ...] = ()
    probs: Any = None
    tree: Tree | None = None
    on_device: Any = None

    @property
    def length(self) -> int:
        """The most tokens that can be accepted: those of the longest path."""
        return max(self.tree.depths) if self.tree else len(self.tokens)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Of each node, the drafted tokens up to and including it."""
        if self.tree is None:
            return [self.tokens[:node] for node in range(len(self.tokens) + 1)]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens, self.tree.parents, strict=True):
            paths.append((*paths[parent], token))
        return paths

    def accepted(self, drawn: Sequence[int]) -> list[int]:
        """The accepted nodes, in the order of the text. drawn: the target's token after each
        node."""
        parents = self.tree.parents if self.tree else range(len(self.tokens))
        nodes = {pair: node for node, pair in enumerate(zip(parents, self.tokens, strict=True), 1)}
        accepted, node = list[int](), 0
        while node := nodes.get((node, drawn[node]), 0):
            accepted.append(node)
        return accepted


NO_DRAFT = Draft()
