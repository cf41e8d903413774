"""The KV cache blocks of the executor's fake: reuse by prefix, eviction, and who holds what.

A block holds `tokens_per_block` tokens and is known by all tokens up to its end. With four tokens a
block, the text 1 2 3 4 5 6 ends with one full block (1 2 3 4) and a tail (5 6). A later prompt that
begins with 1 2 3 4 5 9 reuses the full block as it is, and copies one token of the tail into a
block of its own: it finds 5 tokens.

Blocks that nobody holds stay known until their place is needed; then the one used longest ago
goes, tails of texts before their beginnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq


@dataclass(eq=False)
class _Block:
    """A block that is known by its text. parent: key of the one before. num_holders: requests."""

    key: int
    parent: int
    tokens: tuple[int, ...]
    num_holders: int = 0


@dataclass(frozen=True)
class Allocation:
    """What a request holds: blocks it shares, and the number of those of its own.

    num_cached: leading tokens of the prompt that were found.
    """

    shared: tuple[int, ...]
    num_own: int
    num_cached: int
    salt: int | None


@dataclass
class BlockPool:
    """num_reused, num_missed, num_allocated: blocks since the beginning, for the statistics.

    _known: blocks by key, those used longest ago first. _num_own, _num_shared: held ones.
    """

    num_blocks: int
    tokens_per_block: int
    reuses: bool = True
    reuses_partially: bool = True
    num_reused: int = 0
    num_missed: int = 0
    num_allocated: int = 0
    _known: dict[int, _Block] = field(default_factory=dict)
    _children: dict[int, set[int]] = field(default_factory=dict)
    _num_own: int = 0
    _num_shared: int = 0

    def num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests in the executor hold; a shared one counts once."""
        return self._num_own + self._num_shared

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a new request can have; known ones that nobody holds are among them."""
        return self.num_blocks - self.num_held_blocks

    def allocate(
        self, tokens: Sequence[int], num_tokens: int, salt: int | None = None
    ) -> Allocation | None:
        """Blocks for `num_tokens` tokens, the first of them `tokens`; None where too few are free.

        salt: requests share blocks only with those of the same salt.
        """
        if not self.can_allocate(tokens, num_tokens, salt):
            return None
        shared, num_cached = self._find(tokens[:-1], salt)  # the last token is always computed
        num_own = self.num_needed(num_tokens) - len(shared)
        for block in shared:
            self._num_shared += not block.num_holders
            block.num_holders += 1
        self._use(block.key for block in shared)
        self._num_own += num_own
        self.num_reused += len(shared)
        self.num_missed += self.num_needed(len(tokens)) - len(shared)
        self.num_allocated += num_own
        self._evict()
        return Allocation(tuple(block.key for block in shared), num_own, num_cached, salt)

    def can_allocate(self, tokens: Sequence[int], num_tokens: int, salt: int | None = None) -> bool:
        shared, _ = self._find(tokens[:-1], salt)
        num_taken = sum(1 for block in shared if not block.num_holders)
        num_own = self.num_needed(num_tokens) - len(shared)
        return num_own + num_taken <= self.num_free_blocks

    def free(self, held: Allocation, computed: Sequence[int], stores: bool) -> None:
        """Give all of it back. computed: the tokens whose keys and values the blocks hold.

        stores: whether they stay known.
        """
        for key in held.shared:
            self._known[key].num_holders -= 1
            self._num_shared -= not self._known[key].num_holders
        self._num_own -= held.num_own
        if stores and self.reuses:
            self._store(computed, held.salt, len(held.shared) + held.num_own)
        self._evict()

    def num_cached(self, tokens: Sequence[int], salt: int | None = None) -> int:
        """Leading tokens that `allocate` would find."""
        return self._find(tokens[:-1], salt)[1]

    def _find(self, tokens: Sequence[int], salt: int | None) -> tuple[list[_Block], int]:
        """The known blocks that the tokens begin with, and how many tokens are found in all."""
        found: list[_Block] = []
        parent = hash((salt,))
        while self.reuses:
            start = len(found) * self.tokens_per_block
            piece = tuple(tokens[start : start + self.tokens_per_block])
            block = self._known.get(hash((parent, piece)))
            if block is None or len(piece) < self.tokens_per_block:
                return found, start + self._partial_match(parent, piece)
            found.append(block)
            parent = block.key
        return [], 0

    def _partial_match(self, parent: int, piece: tuple[int, ...]) -> int:
        if not self.reuses_partially:
            return 0
        children = [self._known[key].tokens for key in self._children.get(parent, ())]
        return max((sum(takewhile(bool, map(eq, c, piece))) for c in children), default=0)

    def _use(self, keys: Iterable[int]) -> None:
        """keys: from the beginning of a text on; its tail counts as used before its beginning."""
        for key in reversed(list(keys)):
            self._known[key] = self._known.pop(key)

    def _store(self, tokens: Sequence[int], salt: int | None, num_blocks: int) -> None:
        parent, size = hash((salt,)), self.tokens_per_block
        stored = []
        for start in range(0, min(len(tokens), num_blocks * size), size):
            piece = tuple(tokens[start : start + size])
            key = hash((parent, piece))
            if key not in self._known:
                self._known[key] = _Block(key, parent, piece)
                self._children.setdefault(parent, set()).add(key)
            stored.append(key)
            parent = key
        self._use(stored)

    def _evict(self) -> None:
        """Forget unheld blocks until all that is known and held fits; tails first."""
        while len(self._known) + self._num_own > self.num_blocks:
            oldest = next(
                block
                for block in self._known.values()
                if not block.num_holders and not self._children.get(block.key)
            )
            del self._known[oldest.key]
            self._children.pop(oldest.key, None)
            self._children[oldest.parent].discard(oldest.key)
