"""Blocks and what they remember, worked by hand; then a model that carries every copy out.

In the tables a letter is a token, and a block has four.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from local_models import check_pool

from smartspec_py.engines.cache.blocks import (
    MIN_REUSED,
    BlockPool,
    Memory,
    OutOfBlocksError,
    Table,
)
from smartspec_py.engines.cache.states import KeptStates

LONG = "abcdefghijkl"
"""Twelve tokens, all different: what is common is easy to count."""


def letters(text: str) -> list[int]:
    return [ord(char) for char in text]


class Keys:
    """The tokens whose keys are in each block, and what was copied."""

    def __init__(
        self, num_blocks: int = 16, block_len: int = 4, num_states: int = 0, **more: Any
    ) -> None:
        """num_states: slots for states of prefixes; 0 for a model without states."""
        self.block_len = block_len
        self.has_states, self.state_of_row = num_states > 0, dict[int, Any]()
        self.kept: dict[int, Any] = {}
        if num_states:
            more["states"] = KeptStates(range(num_states), 2, self._load)
        self.held: list[list[Any]] = [[None] * block_len for _ in range(num_blocks)]
        self.copies: list[tuple[int, int, int]] = []
        more = {"max_len": 40, "num_rows": 4, **more}
        self.pool = BlockPool(num_blocks, block_len, copy=self._copy, **more)

    def _copy(self, source: int, destination: int, num_tokens: int) -> None:
        self.copies.append((source, destination, num_tokens))
        self.held[destination][:num_tokens] = self.held[source][:num_tokens]

    def _load(self, slot: int, row: int, num_tokens: int) -> None:
        self.state_of_row[row] = self.kept[slot]
        assert len(self.kept[slot][1]) == num_tokens

    def begin(self, sequence: int, text: str, num_prompt: int | None = None, **more: Any) -> Table:
        tokens = letters(text)
        most = len(tokens) if num_prompt is None else num_prompt
        return self.pool.allocate(sequence, tokens, most, **more)

    def read(self, table: Table, end: int) -> None:
        """Read tokens up to this one: each key depends on the text before it."""
        self.pool.extend(table, end)
        found = self.pool.reserve_state(table, table.num_cached, end)
        if found is not None:
            num, slot = found
            assert table.num_cached < num <= end
            self.kept[slot] = table.adapter, tuple(table.tokens[:num])
        if table.num_cached and self.has_states:
            state = table.adapter, tuple(table.tokens[: table.num_cached])
            assert self.state_of_row[table.row] == state
        self.state_of_row[table.row] = table.adapter, tuple(table.tokens[:end])
        for place in range(table.num_cached, end):
            block, slot = divmod(place - self.pool.first, self.block_len)
            if place >= self.pool.first:
                key = table.adapter, tuple(table.tokens[: place + 1])
                self.held[table.blocks[block]][slot] = key
        table.num_cached = end

    def fill(self, sequence: int, text: str, **more: Any) -> Table:
        """A sequence that has read all but the last token."""
        table = self.begin(sequence, text, **more)
        self.read(table, len(text) - 1)
        return table

    def check(self) -> None:
        """Each table holds the keys of its own text."""
        check_pool(self.pool)
        for table in self.pool.tables.values():
            for place in range(self.pool.first, min(table.num_cached, len(table.tokens))):
                block, slot = divmod(place - self.pool.first, self.block_len)
                key = table.adapter, tuple(table.tokens[: place + 1])
                assert self.held[table.blocks[block]][slot] == key


OTHERS = ("mnopqrstuvwx", "MNOPQRSTUVWX")


@pytest.mark.parametrize(
    ("known", "text", "num_cached", "num_shared", "copied"),
    [
        # 11 tokens of the first were read: two whole blocks, and 3 of the third.
        ([LONG], LONG, 11, 2, 3),
        ([LONG], LONG + "mn", 11, 2, 3),
        ([LONG], "abcdefghXYZ", 8, 2, 0),
        ([LONG], "abcdefghijX", 10, 2, 2),
        ([LONG], "abcdefgXX", 0, 0, 0),  # 7 are less than MIN_REUSED
        ([LONG], "abcdefgh", 0, 0, 0),  # the last must be read
        ([LONG], "Xbcdefghijkl", 0, 0, 0),
        ([LONG], "a", 0, 0, 0),
        ([*OTHERS, LONG], LONG, 11, 2, 3),
        (["abcdefghiX", "abcdefghijX"], LONG, 10, 2, 2),  # of the one with more in common
    ],
)
@pytest.mark.parametrize("is_released", [False, True])
def test_what_is_reused(
    known: list[str], text: str, num_cached: int, num_shared: int, copied: int, is_released: bool
) -> None:
    assert MIN_REUSED == 8
    keys = Keys()
    tables = [keys.fill(number, each) for number, each in enumerate(known)]
    if is_released:
        for number in range(len(known)):
            keys.pool.release(number)
    keys.copies.clear()
    before = keys.pool.num_shared
    common = keys.pool.num_common(letters(text), len(text))
    assert common == (0 if is_released else 4 * num_shared)
    table = keys.begin(9, text)
    assert table.num_cached == num_cached
    assert len(table.nodes) == num_shared
    if num_shared:
        assert any(table.blocks[0] == other.blocks[0] for other in tables)
    assert [num for _, _, num in keys.copies] == [copied] * (copied > 0)
    assert keys.pool.num_shared == (0 if is_released else before + num_shared)
    keys.check()


def test_ten_that_begin_the_same_hold_it_once() -> None:
    """Also if all have begun before anyone has read it."""
    keys = Keys(num_rows=10, num_blocks=13)
    tables = [keys.begin(number, LONG + str(number)) for number in range(10)]
    keys.read(tables[0], 13)
    for number, table in enumerate(tables[1:], 1):
        assert keys.pool.find_more(number) == 12
        assert keys.pool.find_more(number) == 12
        keys.read(table, 13)
    assert keys.pool.num_used == 3 + 10
    assert keys.pool.num_shared == 9 * 3
    keys.check()


def test_what_two_have_read_at_the_same_time_is_kept_once() -> None:
    keys = Keys()
    for table in [keys.begin(number, LONG) for number in range(2)]:
        keys.read(table, 12)
    assert keys.pool.num_used == 6
    keys.begin(2, LONG)
    assert keys.pool.num_used == 4, "three, and a copy of the last one"
    keys.check()


def test_the_oldest_memory_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    """Six blocks hold two texts. A third one needs two of them, and then two more."""
    keys = Keys(num_blocks=6)
    for number, text in enumerate(OTHERS):
        keys.read(keys.begin(number, text), 12)
        keys.pool.release(number)
    keys.read(keys.begin(8, "X" * 12), 8)
    assert num_found(keys) == [0, 12], "4 of the first are too few"
    keys.read(keys.pool.tables[8], 12)
    assert num_found(keys) == [0, 12]
    with pytest.raises(OutOfBlocksError):
        keys.read(keys.begin(9, "Y" * 20), 16)


class Counted(int):
    """A token that counts how often it is compared."""

    num = 0

    def _noted(self, result: bool) -> bool:
        Counted.num += 1
        return result

    def __eq__(self, other: object) -> bool:
        return self._noted(int.__eq__(self, other))

    def __ne__(self, other: object) -> bool:
        return self._noted(int.__ne__(self, other))

    __hash__ = int.__hash__


@pytest.mark.parametrize("num_common", [0, 3, 11])
def test_a_search_does_not_compare_all_that_is_known(num_common: int) -> None:
    """A thousand texts that begin with up to 11 common tokens, and go on with others each."""
    keys = Keys(5000, 4, max_len=20, num_rows=2)
    head = letters(LONG)[:num_common]
    for number in range(1000):
        tokens = [*head, *[1000 + number * 14 % 2000] * (14 - num_common)]
        keys.read(keys.pool.allocate(number, tokens, 14), 14)
        keys.pool.release(number)
    Counted.num = 0
    table = keys.pool.allocate(2000, [*map(Counted, [*head, *[1501] * 9])], 20)
    keys.pool.find_more(2000)
    assert table.num_cached == (num_common if num_common >= MIN_REUSED else 0)
    assert 0 < Counted.num < 300


def test_a_prefix_without_room_for_its_last_block_is_used_as_far_as_it_goes() -> None:
    keys = Keys(num_blocks=4)
    keys.read(keys.begin(1, LONG), 12)
    keys.read(keys.begin(2, "XYZ"), 3)
    assert keys.begin(3, LONG + "m").num_cached == 12
    assert keys.begin(4, LONG[:11] + "m").num_cached == 8
    keys.check()


def num_found(keys: Keys) -> list[int]:
    """Tokens in the cache of each of the two texts."""
    tables = [Keys().begin(0, text + "!") for text in OTHERS]
    return [keys.pool._find(table)[2] for table in tables]


def test_pools_with_one_memory_forget_what_is_needed_elsewhere() -> None:
    memory = Memory(60)
    target = Keys(block_bytes=10, memory=memory)
    draft = Keys(block_bytes=5, memory=memory)
    for keys in (target, draft):
        keys.read(keys.begin(1, LONG), 12)
        keys.pool.release(1)
    assert memory.used == 45
    target.read(target.begin(2, OTHERS[0]), 12)
    assert (target.pool.num_used, draft.pool.num_used) == (6, 0), "drafts forget first"
    draft.read(draft.begin(2, OTHERS[0]), 12)
    assert memory.used <= 60
    assert target.pool.num_used == 4


def test_memory_goes_back_when_the_last_sequence_ends() -> None:
    keys = Keys()
    keys.read(keys.begin(1, LONG, num_prompt=8), 12)
    keys.read(keys.begin(2, OTHERS[0]), 4)
    keys.pool.release(1)
    assert keys.pool.take_unused() == []
    keys.pool.release(2)
    assert keys.pool.take_unused() == [2], "the others hold what was read as a prompt"
    assert keys.pool.take_unused() == []


def test_only_what_was_read_as_a_prompt_is_reused() -> None:
    keys = Keys()
    keys.read(keys.begin(1, LONG, num_prompt=9), 12)
    assert keys.begin(2, LONG + "mn").num_cached == 9


@pytest.mark.parametrize(
    ("of_pool", "of_first", "of_second"),
    [
        ({"reuses_prefixes": False}, {}, {}),
        ({}, {}, {"reuses_prefix": False}),
        ({}, {"reuses_prefix": False}, {}),
        ({}, {"adapter": "one"}, {"adapter": "two"}),
    ],
)
def test_what_is_not_reused(
    of_pool: dict[str, Any], of_first: dict[str, Any], of_second: dict[str, Any]
) -> None:
    keys = Keys(**of_pool)
    keys.fill(1, LONG, **of_first)
    assert keys.begin(2, LONG, **of_second).num_cached == 0
    assert keys.pool.find_more(2) == 0
    keys.pool.release(1)
    assert keys.pool.find_more(2) == 0


def test_tokens_that_are_read_again_get_blocks_of_their_own() -> None:
    keys = Keys()
    keys.read(keys.begin(1, LONG), 12)
    table = keys.begin(2, LONG + "mn")
    assert (table.num_cached, len(table.nodes)) == (12, 3)
    keys.pool.cut(table, 6)
    assert (table.num_cached, len(table.nodes)) == (6, 1)
    keys.read(table, 14)
    keys.check()


def test_what_is_not_to_be_shared_leaves_the_tree() -> None:
    """Two share two blocks. The first one fails: nobody finds these blocks any more."""
    keys = Keys()
    first, second = keys.fill(1, LONG), keys.fill(2, "abcdefghXYZ")
    keys.begin(3, LONG)
    assert first.own.tolist() == [first.blocks[2]]
    keys.pool.forget(first)
    assert keys.begin(4, LONG).num_cached == 0
    keys.check()
    keys.read(second, 11)
    for sequence in (1, 2, 3, 4):
        keys.pool.release(sequence)
        keys.check()
    assert keys.pool.num_used == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_store_of_rows(num_rows: int) -> None:
    """A block for each text. What is common is copied, or taken over if no other row is free."""
    keys = Keys(num_rows, 40, num_rows=num_rows)
    keys.fill(1, LONG)
    keys.pool.release(1)
    table = keys.begin(2, LONG)
    assert table.num_cached == 11
    assert table.row == table.blocks[0] == (0 if num_rows == 1 else 1)
    assert keys.copies == ([] if num_rows == 1 else [(0, 1, 11)])
    keys.read(table, 12)
    keys.check()


def test_a_head_begins_at_the_second_token() -> None:
    """Its first block holds tokens 1 to 4, and the token before them must be the same, too."""
    keys = Keys(first=1)
    keys.read(keys.begin(1, LONG), 12)
    assert keys.begin(2, LONG + "m").num_cached == 12
    assert len(keys.pool.tables[2].nodes) == 2
    assert keys.begin(3, "X" + LONG[1:]).num_cached == 0
    keys.check()


def test_a_prefix_ends_where_a_state_is_kept() -> None:
    """Behind an even number of tokens, at the end of each chunk."""
    keys = Keys(num_states=3)
    table = keys.begin(0, LONG + "mn")
    keys.read(table, 7)
    keys.read(table, 8)
    keys.read(table, 13)
    keys.pool.release(0)
    assert keys.begin(1, LONG + "XX").num_cached == 12
    assert not keys.copies
    assert keys.begin(2, "abcdefghijX").num_cached == 8
    assert keys.begin(3, "abcdefgX").num_cached == 0  # the state behind 6 was in the same block
    for number in (1, 2, 3):
        keys.pool.release(number)
    table = keys.begin(4, "abcdefghijX")
    keys.read(table, 11)  # keeps the state behind 10, in the middle of a block
    keys.pool.release(4)
    assert keys.begin(5, "abcdefghijY").num_cached == 10
    [(_, _, num_copied)] = keys.copies
    assert num_copied == 2
    keys.pool.release(5)
    for number, text in enumerate(["XXXXX", "YYYYY"], 6):  # take slots that were used longest ago
        keys.read(keys.begin(number, text), 5)
        keys.pool.release(number)
    assert keys.begin(8, LONG + "XX").num_cached == 0
    assert keys.begin(9, "abcdefghijY").num_cached == 10


class Pool(RuleBasedStateMachine):
    """Sequences of three letters, which often begin alike."""

    more: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(20)
        self.keys = Keys(14, 4, block_bytes=2, memory=self.memory, num_rows=3, **self.more)
        self.number = 0

    @precondition(lambda self: len(self.keys.pool.tables) < 3)
    @rule(text=st.text("ab", min_size=1, max_size=16))
    def begin(self, text: str) -> None:
        text = "a" * 9 + text
        self.number += 1
        num_prompt = len(text) - self.number % 3
        self.keys.begin(self.number, text, num_prompt=num_prompt)

    @precondition(lambda self: self.keys.pool.tables)
    @rule(which=st.integers(0, 2), num=st.integers(1, 6))
    def read(self, which: int, num: int) -> None:
        table = self._table(which)
        end = min(table.num_cached + num, len(table.tokens))
        own = sum(len(each.own) for each in self.keys.pool.tables.values())
        if end > table.num_cached and own + self.keys.pool.num_shared < 8:
            self.keys.read(table, end)

    @precondition(lambda self: self.keys.pool.tables and not self.keys.has_states)
    @rule(which=st.integers(0, 2), end=st.integers(0, 20))
    def cut(self, which: int, end: int) -> None:
        table = self._table(which)
        own = sum(len(each.own) for each in self.keys.pool.tables.values())
        if own + 4 < 10:
            self.keys.pool.cut(table, min(end, table.num_cached))

    @precondition(lambda self: self.keys.pool.tables)
    @rule(which=st.integers(0, 2))
    def find_more(self, which: int) -> None:
        table = self._table(which)
        if not table.num_cached:
            self.keys.pool.find_more(self._sequence(which))

    @precondition(lambda self: self.keys.pool.tables)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.keys.pool.release(self._sequence(which))

    @precondition(lambda self: self.keys.pool.tables)
    @rule(which=st.integers(0, 2))
    def forget(self, which: int) -> None:
        self.keys.pool.forget(self._table(which))

    def _sequence(self, which: int) -> int:
        sequences = [*self.keys.pool.tables]
        return sequences[which % len(sequences)]

    def _table(self, which: int) -> Table:
        return self.keys.pool.tables[self._sequence(which)]

    @invariant()
    def is_sound(self) -> None:
        self.keys.check()


class PoolWithStates(Pool):
    """Each table has the state behind its own text."""

    more: ClassVar[dict[str, Any]] = {"num_states": 3}


PoolWithStates.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
test_pool_with_states = PoolWithStates.TestCase
Pool.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
test_pool_of_random_sequences = Pool.TestCase
