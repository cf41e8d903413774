"""Trees of a draft model: what it drafts in a step, and how good its guesses were.

A tree takes one pass for each depth. The pass reads the last known token again, with all nodes so
far that have children, and gives guesses after those of the last depth. The cache does not keep the
keys of nodes, because accepted nodes have other slots in the text. So the next step reads accepted
drafts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smartspec_py.core.types import NO_TOKEN, ROOT, Tree
from smartspec_py.engines.base import Draft, DraftTask
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.processors import TokenHistory
from smartspec_py.engines.torch.sampling import DraftRequest
from smartspec_py.engines.torch.tree import path_to


@dataclass(slots=True)
class DraftedTree:
    """num_known: tokens of the sequence when it was drafted. guesses: after each node that was
    read, and after ROOT, best first. tokens: of the nodes that were drafted."""

    num_known: int
    tree: Tree
    guesses: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def ranks(self, true: Sequence[int]) -> Iterator[int | None]:
        """The number of the right guess for each depth, given the true tokens. It ends at the last
        guess that was made; None if no guess was right."""
        node: int | None = ROOT
        for token in true:
            guesses = None if node is None else self.guesses.get(node)
            if guesses is None:
                return
            rank = guesses.index(token) if token in guesses else None
            yield rank
            node = None if rank is None else self._child(node, rank)

    def best_chain(self) -> list[int]:
        """The tokens of the chain of best guesses, as far as guesses were made."""
        found: list[int] = []
        node: int | None = ROOT
        while node is not None and node in self.guesses:
            found.append(self.guesses[node][0])
            node = self._child(node, 0)
        return found

    def _child(self, node: int | None, rank: int) -> int | None:
        pairs = enumerate(zip(*self.tree, strict=True))
        return next((index for index, pair in pairs if pair == (node, rank)), None)


class TreeDrafting:
    """A tree in progress. `frontier` has the nodes whose guesses come next, at first ROOT."""

    def __init__(self, task: DraftTask, history: TokenHistory | None) -> None:
        assert task.tree is not None
        self.task = task
        self.drafted = DraftedTree(len(task.tokens), task.tree)
        self.frontier = [ROOT]
        self._history = history
        self._read: list[int] = []
        self._inner = set(task.tree.parents)

    @property
    def width(self) -> int:
        """Most guesses that a node needs."""
        return max(self.drafted.tree.ranks) + 1

    @property
    def requests(self) -> list[DraftRequest]:
        """Of the guesses after each node of the frontier."""
        found = []
        for node in self.frontier:
            path = path_to(node, self.drafted.tree.parents)
            tokens = tuple([self.drafted.tokens[one] for one in path])
            position = len(self.task.tokens) + len(path)
            found.append(DraftRequest(self.task.sampling, position, self._history, tokens))
        return found

    def branches(self, row: int) -> RowInput:
        """The input of a pass after the first."""
        places = {node: place for place, node in enumerate(self._read)} | {ROOT: ROOT}
        known, drafted = self.task.tokens, self.drafted
        tokens = [known[-1], *(drafted.tokens[node] for node in self._read)]
        parents = [places[drafted.tree.parents[node]] for node in self._read]
        return RowInput(row, len(known) - 1, tokens, len(self.frontier), parents)

    def take(self, guesses: Sequence[list[int]]) -> None:
        """guesses: after each node of the frontier."""
        drafted, ends = self.drafted, self.task.sampling.end_tokens
        drafted.guesses.update(zip(self.frontier, guesses, strict=True))
        before, self.frontier = set(self.frontier), []
        for node, (parent, rank) in enumerate(zip(*drafted.tree, strict=True)):
            token = drafted.guesses[parent][rank] if parent in before else NO_TOKEN
            if token == NO_TOKEN:
                continue
            drafted.tokens[node] = token
            if node in self._inner and token not in ends:
                self.frontier.append(node)
        self._read += self.frontier

    @property
    def draft(self) -> Draft:
        """The planned tree without missing guesses, and without nodes after these or after an end
        token."""
        tokens = self.drafted.tokens
        kept = sorted(tokens)
        places = {node: place for place, node in enumerate(kept)} | {ROOT: ROOT}
        parents = tuple([places[self.drafted.tree.parents[node]] for node in kept])
        return Draft(tuple([tokens[node] for node in kept]), None, parents)
