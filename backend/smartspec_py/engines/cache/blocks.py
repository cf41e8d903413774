"""The pool of cache blocks: which sequence uses which block, and which tokens the rest still hold.

A block holds the keys and values of `block_len` tokens. A sequence has a table of blocks and takes
another one when its text needs it, so memory belongs to whoever needs it.

Blocks whose tokens may be shared stand in a tree: a node is a block, and its parent is the
block before it in the text. A new sequence that begins with the same tokens uses the same blocks,
also while others use them. Only its last block is a copy, if a part of it is common. When nobody
uses a block any more, it stays in the tree until its memory is needed. Then the one that was used
longest ago goes first, and those behind it in a text before it.

Only keys of the same LoRA adapter are shared, and of a target only what was read as the prompt:
generated tokens are attended otherwise (`openvino.runner`), so their keys differ in the last bits
from those of the same tokens in the prompt of a next turn. The text must not depend on what is
cached.

If a model has recurrent states beside keys, a prefix ends where the state behind it is kept: see
`states`.

A store of rows is the same with blocks as long as the longest text: then a sequence has one block,
and what is common is always copied.

This file only does the bookkeeping. The caller copies keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.cache.states import KeptStates
from smartspec_py.engines.cache.tree import Entry, Node, is_idle, is_valid, up_to_state

MIN_REUSED = 8
"""Shorter common prefixes are not reused. Prefilling them costs less than a copy."""

MOST_OUTDATED = 1024
"""The heap of idle nodes is cleaned when it has so many entries more than valid ones."""


class OutOfBlocksError(RuntimeError):
    """No block is free. Admission must prevent this."""


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of a sequence.

    row: a number below `num_rows` that no other sequence has. tokens: of the sequence, a list that
    only grows; empty if no keys may be shared. num_shared: how many of them may come from other
    sequences, and go to others. num_cached: how many of them the blocks hold. nodes: of its first
    blocks, those in the tree. states: slots of kept states, by the number of tokens before them,
    until their block is in the tree.
    """

    row: int
    blocks: NDArray[np.int32]
    tokens: Sequence[int]
    num_shared: int
    adapter: str
    num_blocks: int = 0
    num_cached: int = 0
    nodes: list[Node] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)

    @property
    def used(self) -> NDArray[np.int32]:
        """The blocks in the order of the text."""
        return self.blocks[: self.num_blocks]

    @property
    def own(self) -> NDArray[np.int32]:
        """The blocks that no other table has: the last ones."""
        return self.blocks[sum(node.num_users > 1 for node in self.nodes) : self.num_blocks]


class Memory:
    """The memory of several pools together. If it is used up, they forget what nobody uses."""

    def __init__(self, num_bytes: float = math.inf) -> None:
        self.num_bytes = num_bytes
        self.pools: list[BlockPool] = []

    @property
    def used(self) -> int:
        return sum(pool.num_used * pool.block_bytes for pool in self.pools)

    def make_room(self, num_bytes: int) -> None:
        """Draft models come last, and forget first: that costs less."""
        last_first = self.pools[::-1]
        while self.used + num_bytes > self.num_bytes and any(pool.evict() for pool in last_first):
            pass


class BlockPool:
    """Blocks 0..num_blocks-1 of one cache."""

    def __init__(
        self,
        num_blocks: int,
        block_len: int,
        num_rows: int,
        *,
        max_len: int,
        copy: Callable[[int, int, int], None],
        block_bytes: int = 0,
        memory: Memory | None = None,
        first: int = 0,
        reuses_prefixes: bool = True,
        states: KeptStates | None = None,
    ) -> None:
        """max_len: tokens of a sequence. copy: copies the first tokens of a block: source,
        destination, number of tokens. first: the first token that has a key; it is in slot 0.
        states: None if the model has no recurrent states."""
        self.block_len, self.block_bytes, self.first = block_len, block_bytes, first
        self._per_table = -(-max_len // block_len)
        self._has_rows = self._per_table > 1 or states is not None
        """Whether rows have numbers of their own, and not those of their only blocks."""

        self._copy = copy
        self._reuses_prefixes, self._states = reuses_prefixes, states
        self._memory = memory or Memory()
        self._memory.pools.append(self)
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._rows = list(range(num_rows))
        self._dirty: set[int] = set()
        """Free blocks that were used since the last `take_unused`."""

        self.tables: dict[SequenceId, Table] = {}
        self._roots: dict[tuple[str, tuple[int, ...]], Node] = {}
        self._idle: list[Entry] = []
        """A heap of nodes that may be evicted, by last use. Some have been used again since."""

        self._numbers = count()
        self._num_releases = 0
        self.num_shared = 0
        """Blocks that would be needed in addition if no two sequences shared any."""

    @property
    def num_used(self) -> int:
        """Blocks that a sequence uses or that hold a prefix."""
        return self._num_blocks - len(self._free)

    def allocate(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        num_shared: int,
        reuses_prefix: bool = True,
        adapter: str = "",
    ) -> Table:
        """A table for a sequence with these tokens. It begins with the longest cached prefix of the
        first num_shared, except for the last token.
        Without reuses_prefix, others do not use its blocks either. From now on, the caller may only
        append to `tokens`."""
        assert sequence not in self.tables, f"sequence {sequence} already has a table"
        blocks = np.zeros(self._per_table, np.int32)
        table = Table(-1, blocks, tokens, num_shared if reuses_prefix else 0, adapter)
        nodes, partial, num = self._find(table)
        self._begin(table, nodes, partial, num)
        table.row = heappop(self._rows) if self._has_rows else int(blocks[0])
        self.tables[sequence] = table
        self._load_state(table, nodes, partial, num)
        return table

    def num_found(
        self, tokens: Sequence[int], num_shared: int, reuses_prefix: bool = True, adapter: str = ""
    ) -> int:
        """The length of the cached prefix that `allocate` would find."""
        num_shared = num_shared if reuses_prefix else 0
        return self._find(Table(-1, np.zeros(0, np.int32), tokens, num_shared, adapter))[2]

    def num_common(
        self,
        tokens: Sequence[int],
        num_prompt: int,
        adapter: str = "",
        gone: Iterable[SequenceId] = (),
    ) -> int:
        """The tokens in blocks of other sequences that a sequence with these tokens would use, if
        those of `gone` had been released."""
        table = Table(-1, np.zeros(0, np.int32), tokens, num_prompt, adapter)
        nodes, _, _ = self._find(table)
        leaving = self._num_users(gone)
        return self.block_len * sum(node.num_users > leaving[node] for node in nodes)

    def num_shared_without(self, gone: Iterable[SequenceId]) -> int:
        """`num_shared` if these sequences had been released."""
        leaving = self._num_users(gone).items()
        return self.num_shared - sum(min(num, node.num_users - 1) for node, num in leaving)

    def find_more(self, sequence: SequenceId) -> int:
        """Look again for a cached prefix, for a sequence that has read nothing itself since
        `allocate`: another one may have read it since. Returns the tokens that are cached."""
        table = self.tables[sequence]
        nodes, partial, num = self._find(table)
        if num >= table.num_cached + self.block_len:
            self._drop_blocks(table)
            self._begin(table, nodes, partial, num)
            self._load_state(table, nodes, partial, num)
        return table.num_cached

    def reserve_state(self, table: Table, start: int, end: int) -> tuple[int, int] | None:
        """Where to keep a state while tokens start..end - 1 of the prompt are read: the last one.
        Returns the number of tokens before it, and the slot; None if no state is to be kept."""
        if self._states is None or not self._reuses_prefixes or not start < end <= table.num_shared:
            return None
        num = end - end % self._states.step
        slot = self._states.take() if num > start else None
        if slot is None:
            return None
        table.states[num] = slot
        return num, slot

    def extend(self, table: Table, num_tokens: int) -> None:
        """Take blocks until the table has room for this many tokens. Raises OutOfBlocksError."""
        while table.num_blocks * self.block_len < num_tokens - self.first:
            table.blocks[table.num_blocks] = self._take()
            table.num_blocks += 1

    def cut(self, table: Table, num_tokens: int) -> None:
        """Keep the first num_tokens tokens. The next ones will be written: whole blocks behind
        them that others may have become blocks of this table alone."""
        kept, num_partial = divmod(max(0, num_tokens - self.first), self.block_len)
        for node in reversed(table.nodes[kept:]):
            place = len(table.nodes) - 1
            if len(node.tokens) < self.block_len:
                if place == kept:
                    break  # nobody else has it
                self._lose(node)
            else:
                block = self._take()
                if place == kept and num_partial:
                    self._copy(node.block, block, num_partial)
                table.blocks[place] = block
                self._leave(node)
            table.nodes.pop()
        table.num_cached = min(table.num_cached, num_tokens)
        self._free_states(table, num_tokens)

    def release(self, sequence: SequenceId) -> None:
        """The sequence ends. What may be shared stays in the tree."""
        table = self.tables.pop(sequence)
        self._publish(table)
        self._free_states(table)
        self._drop_blocks(table)
        if self._has_rows:
            heappush(self._rows, table.row)

    def forget(self, table: Table) -> None:
        """Share no keys of this table any more, also not those that are in the tree."""
        for node in table.nodes:
            self._lose(node)
        self._free_states(table)
        table.tokens, table.num_cached = (), 0

    def evict(self) -> bool:
        """Free the block that nobody has used for the longest time; False if there is none."""
        while self._idle:
            if is_valid(entry := heappop(self._idle)):
                self._lose(entry[-1])
                return True
        return False

    def take_unused(self) -> list[int]:
        """The free blocks whose memory is still held, sorted, if no sequence is left; each once."""
        if self.tables or not self._dirty:
            return []
        blocks, self._dirty = sorted(self._dirty), set()
        return blocks

    def _num_users(self, sequences: Iterable[SequenceId]) -> Counter[Node]:
        """How many of these sequences use each block."""
        return Counter(node for each in sequences for node in self.tables[each].nodes)

    def _root(self, table: Table) -> Node:
        """Of all texts with this adapter, and with these tokens before the first that has a key."""
        key = table.adapter, tuple(table.tokens[: self.first])
        return self._roots.setdefault(key, Node(-1))

    def _load_state(self, table: Table, nodes: list[Node], partial: Node | None, num: int) -> None:
        """Give a table that begins with a cached prefix the state behind it. See `_begin`."""
        if self._states is None or not num:
            return
        last = partial or nodes[-1]
        if table.num_cached == num and last.state is not None:
            self._states.use(last)
            self._states.load(last.state, table.row, num)
        else:  # no block was free for a copy
            self._drop_blocks(table)

    def _free_states(self, table: Table, num_tokens: int = 0) -> None:
        """Of those that are not in the tree, behind more than so many tokens."""
        for num in [num for num in table.states if num > num_tokens]:
            slot = table.states.pop(num)
            if self._states is not None:
                self._states.free(slot)

    def _find(self, table: Table) -> tuple[list[Node], Node | None, int]:
        """The nodes of the longest cached prefix; a node of which only the first tokens are common;
        and the length of the prefix."""
        most = min(table.num_shared, len(table.tokens) - 1)
        if not self._reuses_prefixes or most < MIN_REUSED:
            return [], None, 0
        for other in self.tables.values():
            self._publish(other)
        nodes: list[Node] = []
        node, length, place = self._root(table), self.block_len, self.first
        while place + length <= most:
            child = node.children.get(tuple(table.tokens[place : place + length]))
            if child is None:
                break
            nodes.append(child)
            node, place = child, place + length
        rest = tuple(table.tokens[place : min(most, place + length)])
        partial, num_partial = node.closest(rest, self._states is not None)
        num = place + num_partial
        if self._states is not None and not num_partial:
            return up_to_state(nodes, length)
        return (nodes, partial, num) if num >= MIN_REUSED else ([], None, 0)

    def _begin(self, table: Table, nodes: list[Node], partial: Node | None, num: int) -> None:
        """Give the table these nodes, and a copy of what is common with the partial one if a block
        is free, up to num tokens in all."""
        whole, num_partial = divmod(max(0, num - self.first), self.block_len)
        source = nodes[whole] if whole < len(nodes) else partial
        table.nodes = nodes[:whole]
        for place, node in enumerate(table.nodes):
            node.num_users += 1
            self.num_shared += node.num_users > 1
            table.blocks[place] = node.block
        table.num_blocks, table.num_cached = whole, num - num_partial if whole else 0
        if num_partial and source is not None:
            source.last_used = self._num_releases
            self._note_idle(source)
            with suppress(OutOfBlocksError):
                self.extend(table, num)
                block = int(table.blocks[whole])
                if block != source.block:  # else the source was evicted, and this is its block
                    self._copy(source.block, block, num_partial)
                table.num_cached = num
        if self._per_table == 1:
            self.extend(table, self.first + 1)

    def _publish(self, table: Table) -> None:
        """Put the blocks into the tree that have been filled since the last time."""
        length, nodes = self.block_len, table.nodes
        num = min(table.num_cached, table.num_shared, len(table.tokens)) - self.first
        if nodes and len(nodes[-1].tokens) < min(length, num - (len(nodes) - 1) * length):
            last = nodes.pop()  # its block is published again, with more tokens
            if self._states is not None and (slot := self._states.take_from(last)) is not None:
                table.states[self.first + len(nodes) * length + last.num_before] = slot
            self._lose(last)
        while len(nodes) * length < num:
            place = len(nodes)
            start = self.first + place * length
            tokens = tuple(table.tokens[start : start + min(length, num - place * length)])
            parent = nodes[-1] if nodes else self._root(table)
            if parent.is_lost:
                return
            node = parent.children.get(tokens)
            if node is None:
                node = Node(int(table.blocks[place]), tokens, parent, num_users=1)
                parent.add(node)
            elif len(tokens) < length:
                return
            else:  # both have read it at the same time: keep one
                self._free_block(int(table.blocks[place]))
                table.blocks[place] = node.block
                node.num_users += 1
                self.num_shared += node.num_users > 1
            nodes.append(node)
            self._publish_states(table, node, start)

    def _publish_states(self, table: Table, node: Node, start: int) -> None:
        """Keep the last of the table's states in this node, whose first token is the text's token
        number `start`."""
        within = [num for num in table.states if start < num <= start + len(node.tokens)]
        for num in sorted(within):
            slot = table.states.pop(num)
            assert self._states is not None
            if node.state is None or node.num_before <= num - start:
                self._states.keep(node, slot, num - start)
            else:
                self._states.free(slot)

    def _drop_blocks(self, table: Table) -> None:
        """Leave the table without blocks."""
        self._num_releases += 1
        for block in table.blocks[len(table.nodes) : table.num_blocks].tolist():
            self._free_block(block)
        for node in reversed(table.nodes):
            self._leave(node)
        table.nodes, table.num_blocks, table.num_cached = [], 0, 0

    def _leave(self, node: Node) -> None:
        """A table does not use this node any more."""
        node.num_users -= 1
        self.num_shared -= node.num_users > 0
        node.last_used = self._num_releases
        if node.is_lost and not node.num_users:
            self._free_block(node.block)
        else:
            self._note_idle(node)

    def _note_idle(self, node: Node) -> None:
        if is_idle(node) and node.parent is not None:
            heappush(self._idle, (node.last_used, next(self._numbers), node))
        if len(self._idle) > 2 * self._num_blocks + MOST_OUTDATED:
            self._idle = sorted(entry for entry in self._idle if is_valid(entry))

    def _lose(self, node: Node) -> None:
        """Take a node and all behind it out of the tree. Blocks that a table has stay with it."""
        parent, node.parent = node.parent, None
        if parent is not None:
            parent.remove(node)
            self._note_idle(parent)
        waiting = [node]
        while waiting:
            lost = waiting.pop()
            waiting += lost.children.values()
            lost.children, lost.keys, lost.parent, lost.is_lost = {}, [], None, True
            if self._states is not None:
                self._states.drop(lost)
            if not lost.num_users:
                self._free_block(lost.block)

    def _take(self) -> int:
        self._memory.make_room(self.block_bytes)
        if not self._free and not self.evict():
            raise OutOfBlocksError("no block of the cache is free")
        block = heappop(self._free)
        self._dirty.discard(block)
        return block

    def _free_block(self, block: int) -> None:
        heappush(self._free, block)
        self._dirty.add(block)
