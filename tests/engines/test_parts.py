"""How inputs are cut into passes of a bounded number of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smartspec_py.engines.runtimes.openvino.parts import bounded, with_copy
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
