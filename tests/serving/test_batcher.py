"""Requests and the batcher: states, ranks, rows, and the budget of prompt tokens per step."""

from typing import Any

import pytest

from smartspec_py.core.types import SamplingParams
from smartspec_py.serving.batcher import Batcher
from smartspec_py.serving.request import ErrorCode, InvalidField, Request, RequestState

WAITING, PREFILLING, DECODING, ENDED = RequestState


def make_request(number: int, num_prompt: int, **fields: Any) -> Request:
    tokens = list(range(num_prompt))
    return Request(number, tokens, num_prompt, 4, SamplingParams(), "goodput", 4, **fields)


def test_an_illegal_move_changes_nothing() -> None:
    request = make_request(7, 3, state=ENDED)
    with pytest.raises(RuntimeError, match="request 7: ENDED -> WAITING"):
        request.move_to(WAITING)
    assert request.state is ENDED


def test_an_invalid_field_names_field_value_and_range() -> None:
    error = InvalidField("top_p", 1.5, "in (0, 1]")
    assert str(error) == "top_p: got 1.5, must be in (0, 1]"
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert len(str(InvalidField("text_input", "x" * 10_000, "shorter"))) < 200


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        # (arrival_s, priority): equal priorities by arrival, equal arrivals by number
        ([(1.0, 0), (0.0, 0), (1.0, 0)], [2, 1, 3]),
        # a level is worth 10 s: 9.9 s later it is still first, 10.1 s later no more
        ([(0.0, 0), (9.9, 1)], [2, 1]),
        ([(0.0, 0), (10.1, 1)], [1, 2]),
        ([(0.0, 0), (0.0, -1), (29.0, 3)], [3, 1, 2]),
    ],
)
def test_requests_wait_by_arrival_moved_by_priority(
    arrivals: list[tuple[float, int]], order: list[int]
) -> None:
    made = Batcher(1, 8, 8)
    for number, (arrival_s, priority) in enumerate(arrivals, start=1):
        made.add(make_request(number, 1, arrival_s=arrival_s, priority=priority))
    assert [request.sequence for request in made.waiting] == order


def batcher(
    prompts: list[int], prefill_chunk: int, max_sequences: int = 8, largest: int | None = 1000
) -> Batcher:
    """Requests 1, 2, .. with these prompt lengths, as many of them admitted as fit."""
    made = Batcher(max_sequences, prefill_chunk, largest)
    for number, num_prompt in enumerate(prompts, start=1):
        made.add(make_request(number, num_prompt))
    admit_all(made)
    return made


def admit_all(made: Batcher) -> None:
    """As many as there are rows, each with all its tokens to read, as `Lifecycle` does it."""
    while len(made.live) < made.max_batch_size and made.waiting:
        first = made.waiting[0]
        made.admit(first)
        first.move_to(PREFILLING)
        first.num_prefill_tokens = len(first.tokens)
        first.num_computed_tokens = 0


def read_step(made: Batcher) -> list[tuple[int, int, int, bool]]:
    """One step's chunks as (sequence, start, length, is_last), taken as read."""
    chunks = made.prefills()
    for chunk in chunks:
        request = made.live[chunk.sequence]
        assert chunk.tokens == tuple(range(chunk.start, chunk.start + len(chunk.tokens)))
        request.num_computed_tokens += len(chunk.tokens)
        if chunk.is_last:
            request.move_to(DECODING)
    return [(c.sequence, c.start, len(c.tokens), c.is_last) for c in chunks]


@pytest.mark.parametrize(
    ("prompts", "largest", "budget", "steps"),
    [
        # one long prompt, in chunks of the budget
        ([10], 1000, 4, [[(1, 0, 4, False)], [(1, 4, 4, False)], [(1, 8, 2, True)]]),
        # what one leaves, the next takes; the oldest first, then the shortest
        (
            [3, 10, 2],
            1000,
            8,
            [[(1, 0, 3, True), (3, 0, 2, True), (2, 0, 3, False)], [(2, 3, 7, True)]],
        ),
        # half for the oldest, and half for the shortest of the others
        (
            [14, 7, 3],
            1000,
            8,
            [
                [(1, 0, 4, False), (3, 0, 3, True), (2, 0, 1, False)],
                [(1, 4, 4, False), (2, 1, 4, False)],
                [(1, 8, 6, True), (2, 5, 2, True)],
            ],
        ),
        # the oldest is also the shortest, and has both halves
        (
            [10, 11],
            1000,
            8,
            [[(1, 0, 8, False)], [(1, 8, 2, True), (2, 0, 6, False)], [(2, 6, 5, True)]],
        ),
        # no chunk is larger than the engine takes
        ([10, 3], 5, 8, [[(1, 0, 5, False), (2, 0, 3, True)], [(1, 5, 5, True)]]),
        # an exact fit leaves nothing, and no empty chunk
        ([4, 4], 1000, 4, [[(1, 0, 4, True)], [(2, 0, 4, True)]]),
        # whole prompts share the budget
        ([10, 3], None, 13, [[(1, 0, 10, True), (2, 0, 3, True)]]),
        ([10, 3], None, 12, [[(1, 0, 10, True)], [(2, 0, 3, True)]]),
        # longer than the budget: alone
        ([10, 3], None, 8, [[(1, 0, 10, True)], [(2, 0, 3, True)]]),
        # the shortest that fits beside the oldest
        ([5, 6, 3], None, 8, [[(1, 0, 5, True), (3, 0, 3, True)], [(2, 0, 6, True)]]),
    ],
)
def test_chunks(
    prompts: list[int],
    largest: int | None,
    budget: int,
    steps: list[list[tuple[int, int, int, bool]]],
) -> None:
    made = batcher(prompts, budget, largest=largest)
    assert [read_step(made) for _ in steps] == steps
    assert read_step(made) == []


def test_the_shortest_prompt_comes_first_within_a_priority() -> None:
    """Beside the oldest, prompts of a higher priority come first, although they are longer."""
    made = Batcher(4, 64, 1000)
    for number, (num_prompt, priority) in enumerate([(900, 0), (10, 0), (20, 1), (30, 1)], 1):
        made.add(make_request(number, num_prompt, arrival_s=20.0 * number, priority=priority))
    admit_all(made)
    assert read_step(made) == [(1, 0, 32, False), (3, 0, 20, True), (4, 0, 12, False)]


def test_a_prompt_waits_for_one_that_begins_the_same() -> None:
    """Blocks of 4. The first two differ from token 10 on, the third has another adapter, the fourth
    uses no tokens of others, and the fifth begins otherwise."""
    made = Batcher(8, 6, 1000, block_len=4)
    fields: list[dict[str, Any]] = [{}, {}, {"adapter": "one"}, {"reuses_prefix": False}, {}]
    for number, more in enumerate(fields, start=1):
        made.add(make_request(number, 16 - number, **more))
    admit_all(made)
    made.live[2].tokens[10:] = [99] * 4
    made.live[5].tokens[0] = 99

    def chunks(budget: int) -> list[tuple[int, int]]:
        made._prefill_chunk = budget
        found = made.prefills()
        for chunk in found:
            request = made.live[chunk.sequence]
            request.num_computed_tokens += len(chunk.tokens)
            request.has_begun = True
        return [(chunk.sequence, len(chunk.tokens)) for chunk in found]

    assert chunks(48) == [(1, 15), (5, 11), (4, 12), (3, 10)]
    made.live[1].num_computed_tokens, made.live[1].has_begun = 3, True
    assert chunks(6) == [(1, 3), (3, 3)], "token 4 of the second is not read yet"
    made.live[2].num_computed_tokens = 4  # found in the cache
    assert chunks(4) == [(1, 4)]
    made.live[2].num_computed_tokens = 8
    assert chunks(6) == [(1, 5), (2, 1)], "what comes next differs"


def test_a_prompt_does_not_wait_for_one_that_shares_nothing() -> None:
    made = Batcher(2, 24, 1000, block_len=4)
    made.add(make_request(1, 12, reuses_prefix=False))
    made.add(make_request(2, 12))
    admit_all(made)
    assert read_step(made) == [(1, 0, 12, True), (2, 0, 12, True)]


def test_a_long_prompt_is_read_beside_any_number_of_short_ones() -> None:
    """A prompt of 4 tokens arrives at each step, and has half of the budget of 8. The oldest of 40
    has the other half: it is read in 10 steps."""
    made = batcher([40], 8, max_sequences=100)
    for number in range(2, 12):
        made.add(make_request(number, 4, arrival_s=1.0))
        admit_all(made)
        assert [chunk[0] for chunk in read_step(made)] == [1, number]
    assert made.num_prefilling == 0


@pytest.mark.parametrize(
    ("budget", "num_decode_tokens", "chunk"),
    [
        (128, 0, 128),
        (128, 1, 127),  # 128 in all
        (128, 63, 65),
        (128, 64, 128),
        (128, 200, 120),  # 320 in all: five tiles
        # a small budget is cut by at most a half
        (30, 64 - 16, 16),
        (30, 64 - 15, 30),
    ],
)
def test_the_tokens_of_a_step_fill_tiles(budget: int, num_decode_tokens: int, chunk: int) -> None:
    made = batcher([1000], budget)
    assert [len(one.tokens) for one in made.prefills(num_decode_tokens)] == [chunk]


def test_rows_are_given_in_order_of_arrival() -> None:
    made = batcher([1, 1, 1, 1], 8, max_sequences=2)
    assert list(made.live) == [1, 2]
    assert (made.find(2), made.find(3)) == (made.live[2], made.waiting[0])
    del made.live[1]
    admit_all(made)
    assert (list(made.live), made.find(1)) == ([2, 3], None)


def test_a_preempted_request_waits_at_its_rank_and_reads_all_it_has() -> None:
    """Request 1 had read its 4 tokens and written 2: it reads 6, with half of each chunk of 4
    because it has the lowest rank."""
    made = batcher([4, 4], 4)
    first = made.live[1]
    read_step(made)
    first.tokens.extend([4, 5])
    made.add(make_request(3, 1))
    del made.live[1]
    first.move_to(WAITING)
    made.add(first)
    assert [r.sequence for r in made.waiting] == [1, 3]
    admit_all(made)
    assert [read_step(made) for _ in range(3)] == [
        [(1, 0, 2, False), (3, 0, 1, True), (2, 0, 1, False)],
        [(1, 2, 2, False), (2, 1, 2, False)],
        [(1, 4, 2, True), (2, 3, 1, True)],
    ]


def test_what_was_cached_is_not_read() -> None:
    """Of 10 tokens 7 were found in the cache: the first chunk starts behind them."""
    made = batcher([10], 2)
    made.live[1].num_computed_tokens = 7
    assert [read_step(made), read_step(made)] == [[(1, 7, 2, False)], [(1, 9, 1, True)]]


def test_requests_in_flight_are_not_ready_and_their_prompts_count() -> None:
    """Of 8 tokens 5 are in flight: the next prompt of 4 waits, and then takes one of 3 along."""
    made = batcher([5, 4, 3], 8, largest=None)
    first = made.live[1]
    first.is_in_flight = True
    assert (made.prefills(), made.ready()) == ([], [])
    first.is_in_flight = False
    first.move_to(DECODING)
    assert [chunk.sequence for chunk in made.prefills()] == [2, 3]
    assert made.ready() == [first]
    first.is_in_flight = True
    assert made.ready() == []
