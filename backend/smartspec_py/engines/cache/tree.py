"""The tree of cached prefixes: a node is a block, and its parent is the block before it in the
text. See `blocks`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """tokens: of the block, at most block_len. keys: of `children`, sorted. num_users: tables that
    have the block. last_used: number of releases at the last use. is_lost: not in the tree any
    more. state, num_before: see `states.Prefix`."""

    block: int
    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    keys: list[tuple[int, ...]] = field(default_factory=list)
    num_users: int = 0
    last_used: int = 0
    is_lost: bool = False
    state: int | None = None
    num_before: int = 0

    def add(self, child: Node) -> None:
        self.children[child.tokens] = child
        insort(self.keys, child.tokens)

    def remove(self, child: Node) -> None:
        del self.children[child.tokens]
        del self.keys[bisect_left(self.keys, child.tokens)]

    def closest(
        self, tokens: tuple[int, ...], until_state: bool = False
    ) -> tuple[Node | None, int]:
        """The child with the longest common prefix, and its length: next to them in the order.
        until_state: of each, count only what is before its state."""
        place = bisect_left(self.keys, tokens)
        lengths: dict[tuple[int, ...], int] = {}
        for key in self.keys[max(0, place - 1) : place + 2]:
            lengths[key], child = num_common(key, tokens), self.children[key]
            if until_state:
                is_common = child.state is not None and child.num_before <= lengths[key]
                lengths[key] = child.num_before if is_common else 0
        key = max(lengths, key=lengths.__getitem__, default=())
        return (self.children[key], lengths[key]) if lengths.get(key) else (None, 0)


Entry = tuple[int, int, Node]
"""Of the heap of idle nodes: `last_used` then, a number that no other entry has, the node."""


def up_to_state(nodes: list[Node], block_len: int) -> tuple[list[Node], Node | None, int]:
    """The longest part of a prefix that ends where a state is kept. See `BlockPool._find`."""
    for place, node in reversed([*enumerate(nodes)]):
        if node.state is not None:
            is_whole = node.num_before == block_len
            num = place * block_len + node.num_before
            return nodes[: place + is_whole], None if is_whole else node, num
    return [], None, 0


def is_idle(node: Node) -> bool:
    return not node.num_users and not node.children


def is_valid(entry: Entry) -> bool:
    """Whether the node is still idle, and was not used since."""
    last_used, _, node = entry
    return not node.is_lost and is_idle(node) and node.last_used == last_used


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
