"""How inputs are cut into passes of a bounded number of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.engines.runtimes.openvino.parts import bounded, of_like_lengths, with_copy
from smartspec_py.engines.runtimes.runner import RowInput


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1), st.integers(2, 12))
def test_no_pass_has_more_tokens_with_the_copies_of_lone_prompt_tokens(
    rows: list[tuple[int, bool]], most: int
) -> None:
    inputs = [
        RowInput(i, 5, range(n), num_logits=n, num_prompt=n if is_prompt else 0)
        for i, (n, is_prompt) in enumerate(rows)
    ]
    passes = bounded(list(enumerate(inputs)), most)
    sizes = [sum(len(with_copy(part).tokens) for _, part in parts) for parts in passes]
    assert max(sizes) <= most
    for row in inputs:
        parts = [part for some in passes for index, part in some if index == row.row]
        assert [token for part in parts for token in part.tokens] == list(row.tokens)
        assert [slot for part in parts for slot in part.slots] == list(row.slots)
        assert sum(part.num_logits for part in parts) == row.num_logits
        assert sum(part.num_prompt for part in parts) == row.num_prompt


def test_rows_with_few_tokens_do_not_wait_for_long_ones() -> None:
    """Tiles of 8 tokens: 65, 61, 3, 2 and 1. Rows with one token change no state."""
    lengths = [1, 512, 3, 480, 16, 8, 1]
    rows = [RowInput(i, 5, range(n), num_logits=1) for i, n in enumerate(lengths)]
    passes = of_like_lengths(list(enumerate(rows)))
    assert [sorted(index for index, _ in parts) for parts in passes] == [[1, 3], [0, 2, 4, 5, 6]]
    for length, num in [(1, 1), (3, 2)]:
        many = [RowInput(i, 5, range(16 if i % 2 else length), num_logits=1) for i in range(30)]
        assert len(of_like_lengths(list(enumerate(many)))) == num
