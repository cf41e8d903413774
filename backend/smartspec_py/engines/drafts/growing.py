"""Drafts that grow: chains by one token, and trees by one depth, after each row of logits.

Each depth of a tree is guessed after up to WIDTH nodes of the depth before, those with the most
probable paths. So with WIDTH guesses for each of them, a tree of depth d is chosen from
WIDTH + (d - 1) WIDTH^2 nodes (Li et al., "EAGLE-2", arXiv 2406.16858).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from smartspec_py.core.plan.trees import WIDTH
from smartspec_py.engines.decoding.sampling import DraftRequest, best_guesses, draft_tokens
from smartspec_py.engines.decoding.shaping import TokenHistory
from smartspec_py.engines.draft import NO_DRAFT, Draft, Tree
from smartspec_py.engines.proposer import DraftTask

MAX_TIMED = 8
"""Most trees that are timed together at the start. Trees pay for few requests only."""

NUM_TIMINGS = 5
"""How often drafting is timed. The fastest counts, because other processes only slow it down."""


class GrowingDraft(Protocol):
    """A draft in progress, of a proposer that reads what it has drafted.

    next_tokens: drafted ones that the next pass reads; none before the first pass, which reads
        known tokens. tree: of these tokens; None for a chain. num_logits: of the next pass, for the
        last tokens that it reads.
    """

    task: DraftTask

    @property
    def next_tokens(self) -> Sequence[int]: ...

    @property
    def tree(self) -> Tree | None: ...

    @property
    def num_logits(self) -> int: ...

    @property
    def draft(self) -> Draft: ...


class DraftGroup(Protocol):
    """Drafts that take their logits together."""

    @property
    def active(self) -> Sequence[GrowingDraft]:
        """Those that are not complete."""
        ...

    def take(self, logits: torch.Tensor) -> None:
        """Let the active ones grow. logits: [sum of their num_logits, vocab], float32."""
        ...


@dataclass(slots=True)
class GrowingChain:
    """See `GrowingDraft`. history: the tokens before it; None if sampling does not need them."""

    num_logits: ClassVar[int] = 1
    tree: ClassVar[None] = None

    task: DraftTask
    history: TokenHistory | None = None
    tokens: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    on_device: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        has_ended = bool(self.tokens) and self.tokens[-1] in self.task.start.sampling.end_tokens
        return len(self.tokens) >= self.task.draft_len or has_ended

    @property
    def next_tokens(self) -> Sequence[int]:
        return self.tokens[-1:]

    @property
    def request(self) -> DraftRequest:
        """For the next token."""
        position = len(self.task.tokens) + len(self.tokens)
        return DraftRequest(self.task.start.sampling, position, self.history, tuple(self.tokens))

    def take(self, token: int, prob: torch.Tensor | None) -> None:
        self.tokens.append(token)
        if prob is not None:
            self.probs.append(prob)

    @property
    def draft(self) -> Draft:
        probs = torch.stack(self.probs) if self.probs else None
        return Draft(tuple(self.tokens), probs, on_device=self.on_device)


@dataclass(slots=True)
class ChainGroup:
    """A `DraftGroup` of chains."""

    chains: Sequence[GrowingChain]

    @property
    def active(self) -> list[GrowingChain]:
        return [chain for chain in self.chains if not chain.is_complete]

    def take(self, logits: torch.Tensor) -> None:
        active = self.active
        tokens, probs = draft_tokens(logits, [chain.request for chain in active])
        for chain, token, prob in zip(active, tokens.tolist(), probs, strict=True):
            chain.take(token, prob)


@dataclass(slots=True)
class GrowingTree:
    """A tree in progress, as its proposer reads it: only the nodes that guesses follow, numbered
    from 0, the last known token. `TreeTensors.drafts` numbers the complete tree.

    first: the first node of the last depth. draft: once the tree is complete.
    """

    task: DraftTask
    history: TokenHistory | None = None
    next_tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    first: int = 0
    depth: int = 0
    draft: Draft = NO_DRAFT

    @property
    def tree(self) -> Tree | None:
        return Tree(tuple(self.parents)) if self.parents else None

    @property
    def ends(self) -> range:
        """The nodes of the last depth."""
        return range(self.first, len(self.next_tokens) + 1)

    @property
    def num_logits(self) -> int:
        return len(self.ends)

    @property
    def requests(self) -> list[DraftRequest]:
        """For the guesses after each of the ends."""
        position = len(self.task.tokens) + self.depth
        paths = Draft(tuple(self.next_tokens), tree=self.tree).paths
        return [
            DraftRequest(self.task.start.sampling, position, self.history, paths[end])
            for end in self.ends
        ]

    def grow(self, tokens: Sequence[int], before: Sequence[int]) -> None:
        """Add the nodes of the next depth. before: of each, the index of the end it follows."""
        ends, self.first = self.ends, len(self.next_tokens) + 1
        self.parents += [ends[place] for place in before]
        self.next_tokens += tokens
        self.depth += 1


class TreeGroup:
    """A `DraftGroup` of trees of the same depth."""

    def __init__(self, trees: Sequence[GrowingTree]) -> None:
        self._trees = trees
        self._growing: TreeTensors | None = None

    @property
    def active(self) -> Sequence[GrowingTree]:
        is_complete = self._trees[0].depth >= self._trees[0].task.depth
        return [] if is_complete else self._trees

    def take(self, logits: torch.Tensor) -> None:
        if self._growing is None:
            self._growing = TreeTensors(len(self._trees), logits.device)
        requests = [request for tree in self._trees for request in tree.requests]
        tokens, log_probs = best_guesses(logits, requests, WIDTH)
        shape = len(self._trees), self._growing.num_ends, -1
        ends = self._growing.grow(tokens.view(shape), log_probs.view(shape))
        for tree, *of_tree in zip(self._trees, *torch.stack(ends).tolist(), strict=True):
            tree.grow(*of_tree)
        if not self.active:
            drafts = self._growing.drafts([tree.task.draft_len for tree in self._trees])
            for tree, draft in zip(self._trees, drafts, strict=True):
                tree.draft = draft


class TreeTensors:
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
            Draft(tuple(tokens[1:count]), tree=Tree(tuple(places[1:count])))
            for (tokens, places), count in zip(both, counts, strict=True)
        ]


def tree_s(
    seconds: Callable[[int, int], float], depth: int, max_sequences: int
) -> tuple[float, float]:
    """`ProposerCapabilities.tree_s`. seconds: to draft for so many sequences: trees of this depth,
    or chains if it is 0."""
    most = min(max_sequences, MAX_TIMED)
    longer_s = [seconds(num, depth) - seconds(num, 0) for num in (1, most)]
    return first_and_further_s(longer_s[0] / depth, longer_s[1] / depth, most)


def first_and_further_s(alone_s: float, together_s: float, num: int) -> tuple[float, float]:
    """Seconds for the first sequence, and for each further one of num that are drafted together."""
    further_s = (together_s - alone_s) / (num - 1) if num > 1 else alone_s
    return max(0.0, alone_s), max(0.0, further_s)


def fastest_s(draft: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of some calls of `draft`, each after `prepare`."""
    seconds = []
    for _ in range(NUM_TIMINGS):
        prepare()
        start = time.perf_counter()
        draft()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
