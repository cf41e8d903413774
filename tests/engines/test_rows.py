"""Rows and what they remember, worked by hand; then a model buffer that carries every copy out.

In the tables a letter is a token.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch_models import check_table

from smartspec_py.engines.local.rows import (
    MAX_SPREAD,
    MIN_REUSED,
    MIN_SPREAD,
    Move,
    RowTable,
)

LONG = "abcdefghijkl"
"""Twelve tokens, all different: what is common is easy to count."""


def letters(text: str) -> list[int]:
    return [ord(char) for char in text]


def fill(table: RowTable, sequence: int, text: str) -> int:
    """Own a row for the text, and read all of it but the last token; returns the row's index."""
    tokens = letters(text)
    row = table.allocate(sequence, tokens, len(tokens)).row
    row.num_cached = len(tokens) - 1
    return row.index


def place(
    table: RowTable, sequence: int, text: str, adapter: str = ""
) -> tuple[int, int | None, int]:
    """Row, source and number of tokens reused of a new sequence."""
    placement = table.allocate(sequence, letters(text), len(text), adapter=adapter)
    return placement.row.index, placement.source, placement.row.num_cached


OTHERS = (("mnopqrstuvwx", True), ("MNOPQRSTUVWX", True))


@pytest.mark.parametrize(
    ("most_kept", "forgotten", "reused"),
    [(33, [], 11), (32, [0], 0), (22, [0], 0), (21, [0, 1], 0), (0, [0, 1, 2], 0)],
)
def test_free_rows_forget_the_oldest_keys(
    most_kept: int, forgotten: list[int], reused: int
) -> None:
    """Four rows of 11 tokens, three of them free. The row in use does not count."""
    table = RowTable(5)
    for sequence, (text, _) in enumerate([(LONG, True), *OTHERS, ("ABCDEFGHIJKL", True)]):
        fill(table, sequence, text)
    for sequence in range(3):
        table.release(sequence)
    assert table.forget(most_kept) == forgotten
    assert table.forget(most_kept) == []
    assert place(table, 9, LONG)[2] == reused


@pytest.mark.parametrize(
    ("rows", "text", "expected"),
    [
        # Of one sequence only row 0 is near, whatever the others remember. It is taken over in
        # place, with as much as it holds, which is all but the last token.
        ([(LONG, True)], LONG, (0, None, 11)),
        ([(LONG, True)], LONG + "mn", (0, None, 11)),
        ([(LONG, True)], "abcdefghiXYZ", (0, None, 9)),
        ([(LONG, True)], "abcdefghX", (0, None, 8)),
        ([(LONG, True)], "abcdefgXX", (0, None, 0)),  # 7 are less than MIN_REUSED
        ([(LONG, True)], "abcdefgh", (0, None, 0)),  # the last must be read
        ([(LONG, True)], "Xbcdefghijkl", (0, None, 0)),
        ([(LONG, True)], "a", (0, None, 0)),
        # A row in use is copied from; of two, the one that holds more.
        ([(LONG, False)], "abcdefghiX", (1, 0, 9)),
        ([("abcdefghijX", False), (LONG, False)], LONG, (2, 1, 11)),
        # Of equal sources, a free row is taken in place.
        ([(LONG, False), (LONG, True)], LONG, (1, None, 11)),
        # Free rows that are not near give a copy.
        ([*OTHERS, (LONG, True)], LONG, (0, 2, 11)),
    ],
)
def test_what_is_reused(
    rows: list[tuple[str, bool]], text: str, expected: tuple[int, int | None, int]
) -> None:
    """rows: the text of each, and whether it is released."""
    assert MIN_REUSED == 8
    table = RowTable(4)
    for number, (known, _) in enumerate(rows):
        fill(table, number, known)
    for number, (_, is_released) in enumerate(rows):
        if is_released:
            table.release(number)
    assert place(table, 9, text) == expected
    check_table(table)


@pytest.mark.parametrize(
    ("num_computed_tokens", "row"),
    [
        (9, 1),  # row 0 was used last: row 1 is the older memory
        (0, 0),  # row 0 remembers nothing, so it goes first
    ],
)
def test_the_oldest_memory_goes_first(num_computed_tokens: int, row: int) -> None:
    """Rows 0 to 4 are in use, then 0 and 1 are left; a newcomer uses row 0 and leaves it again."""
    table = RowTable(6)
    for number in range(5):
        fill(table, number, f"{number}bcdefghij")
    table.release(0)
    table.release(1)
    assert place(table, 5, "..........") == (0, None, 0)
    table.row(5).num_cached = num_computed_tokens
    table.release(5)
    assert place(table, 6, ",,,,,,,,,,") == (row, None, 0)


def test_most_reused_is_the_most() -> None:
    table = RowTable(4)
    fill(table, 1, LONG)
    for number, most, num_reused in ((2, 9, 9), (3, 8, 8), (4, 7, 0)):
        placement = table.allocate(number, letters(LONG), most)
        assert placement.row.num_cached == num_reused


def test_only_what_was_read_as_a_prompt_is_reused() -> None:
    table = RowTable(4)
    table.allocate(1, letters(LONG), 9).row.num_cached = 12
    assert place(table, 2, LONG + "mn") == (1, 0, 9)


def test_nothing_is_reused_where_that_is_switched_off() -> None:
    table = RowTable(4, reuses_prefixes=False)
    fill(table, 1, LONG)
    assert place(table, 2, LONG) == (1, None, 0)


@pytest.mark.parametrize(
    ("num_rows", "released", "moves"),
    [
        # 8 rows in use, spread 8. 4 left in rows 4..7: 8 is not more than twice 4.
        (8, range(4), []),
        # 3 left in rows 5..7: 8 > 6. Row 7 comes down to 0, then 7 > 6: row 6 to 1; then 6 is not.
        (8, range(5), [(7, 0), (6, 1)]),
        # the last one comes down alone; up to 4 rows, nobody moves
        (8, range(7), [(7, 0)]),
        (4, range(3), []),
        (5, range(4), [(4, 0)]),
    ],
)
def test_moves(num_rows: int, released: range, moves: list[tuple[int, int]]) -> None:
    """As the last of them is released; before that nobody asks for moves."""
    assert MIN_SPREAD == 4
    table = RowTable(num_rows)
    for number in range(num_rows):
        fill(table, number, f"{number}bcdefghij")
    for number in released:
        table.release(number)
    found = list(table.moves())
    assert found == [Move(source, destination, 9) for source, destination in moves]
    for number, (_, destination) in zip(range(num_rows - 1, 0, -1), moves, strict=False):
        assert table.row(number).index == destination
    check_table(table)
    assert list(table.moves()) == []


def test_the_row_that_was_left_remembers_no_drafts() -> None:
    """10 tokens are known and 13 read, of which 3 are drafts: the memory holds 10, while the
    living row keeps its 13 until somebody says how many were accepted."""
    table = RowTable(5)
    for number in range(5):
        fill(table, number, f"{number}bcdefghij")
    table.row(4).num_cached = 13
    for number in range(4):
        table.release(number)
    assert list(table.moves()) == [Move(4, 0, 13)]
    tokens = table.row(4).tokens
    assert isinstance(tokens, list)
    table.row(4).num_cached = 10
    tokens.extend(letters("XYZ"))  # other than the drafts were
    assert place(table, 5, "4bcdefghijXYZW") == (1, 4, 10)


def test_keys_of_another_adapter_are_not_reused() -> None:
    """Rows 0 to 4 have the same text, and the last one an adapter, with which it moves to row 0."""
    table = RowTable(5)
    for number in range(5):
        adapter = "sql" if number == 4 else ""
        assert place(table, number, LONG, adapter) == (number, None, 0)
        table.row(number).num_cached = 11 if number == 4 else 0
    for number in range(4):
        table.release(number)
    assert list(table.moves()) == [Move(4, 0, 11)]
    assert place(table, 5, LONG)[2] == 0
    assert place(table, 6, LONG, "other")[2] == 0
    assert place(table, 7, LONG, "sql")[2] == 11


class Buffer(RuleBasedStateMachine):
    """What the caches do: a list of tokens for each row stands for its keys. Keys of an adapter are
    other ones.

    Every copy and move that the table orders is carried out on the lists; a read writes tokens to
    the row, and a pass of drafts writes wrong tokens behind the known ones, as rejected drafts do.
    """

    NUM_ROWS = 6

    def __init__(self) -> None:
        super().__init__()
        self.table = RowTable(self.NUM_ROWS)
        self.keys: list[list[int]] = [[] for _ in range(self.NUM_ROWS)]
        self.tokens: dict[int, list[int]] = {}
        self.adapters: dict[int, str] = {}
        self.num_made = 0

    def write(self, sequence: int, tokens: list[int]) -> None:
        row = self.table.row(sequence)
        self.keys[row.index][row.num_cached :] = self.keys_of(sequence, tokens)

    def keys_of(self, sequence: int, tokens: list[int]) -> list[int]:
        return [token + 100 * len(self.adapters[sequence]) for token in tokens]

    @precondition(lambda self: len(self.tokens) < self.NUM_ROWS)
    @rule(
        stem=st.integers(0, 3),
        cut=st.integers(0, 14),
        rest=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        most=st.none() | st.integers(0, 12),
        adapter=st.sampled_from(["", "", "a"]),
    )
    def allocate(
        self, stem: int, cut: int, rest: list[int], most: int | None, adapter: str
    ) -> None:
        """Four stems of 14 tokens over the alphabet 0, 1; two of them part at their tenth token."""
        stems = ([0] * 14, [0] * 9 + [1] * 5, [1, 0] * 7, [1] * 14)
        tokens = stems[stem][:cut] + rest
        most = len(tokens) - 1 if most is None else min(most, len(tokens) - 1)
        self.num_made += 1
        placement = self.table.allocate(self.num_made, tokens, most, adapter=adapter)
        self.adapters[self.num_made] = adapter
        row = placement.row
        assert row.num_cached == 0 or MIN_REUSED <= row.num_cached <= most
        if placement.source is not None:
            assert placement.source != row.index
            copied = self.keys[placement.source][: row.num_cached]
            self.keys[row.index][: row.num_cached] = copied
        self.tokens[self.num_made] = tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 9))
    def read(self, data: st.DataObject, count: int) -> None:
        """Some of what is known and not read yet."""
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        row, known = self.table.row(sequence), self.tokens[sequence]
        chunk = known[row.num_cached : row.num_cached + count]
        self.write(sequence, chunk)
        row.num_cached += len(chunk)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def verify(self, data: st.DataObject, new: list[int]) -> None:
        """Read all that is known and wrong drafts behind it; then learn the right tokens."""
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        row, known = self.table.row(sequence), self.tokens[sequence]
        self.write(sequence, known[row.num_cached :] + [9 - token for token in new])
        row.num_cached = len(known)
        known.extend(new)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        self.table.release(sequence)
        del self.tokens[sequence]
        for move in self.table.moves():
            moved = self.keys[move.source][: move.num_tokens]
            self.keys[move.destination][: move.num_tokens] = moved

    @invariant()
    def rows_hold_what_they_say(self) -> None:
        for sequence, known in self.tokens.items():
            row = self.table.row(sequence)
            keys = self.keys_of(sequence, known[: row.num_cached])
            assert self.keys[row.index][: row.num_cached] == keys
        check_table(self.table)
        assert len(self.table) == len(self.tokens)

    @invariant()
    def rows_lie_close_together(self) -> None:
        rows = [self.table.row(sequence).index for sequence in self.tokens]
        assert len(set(rows)) == len(rows)
        assert 1 + max(rows, default=0) <= max(MIN_SPREAD, MAX_SPREAD * len(rows))


TestBuffer = Buffer.TestCase
TestBuffer.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
