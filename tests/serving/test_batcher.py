"""The batcher: served by rank, rows, and the budget of prompt tokens a step."""

import pytest

from smartspec_py.core.types import SamplingParams
from smartspec_py.serving.batcher import Batcher
from smartspec_py.serving.request import Request, RequestState


def request(number: int, num_prompt: int) -> Request:
    return Request(number, list(range(num_prompt)), num_prompt, 4, SamplingParams(), "goodput", 4)


def batcher(
    prompts: list[int], prefill_chunk: int, max_sequences: int = 8, largest: int | None = 1000
) -> Batcher:
    """Requests 1, 2, .. with these prompt lengths, as many of them admitted as fit."""
    made = Batcher(max_sequences, prefill_chunk, largest)
    for number, num_prompt in enumerate(prompts, start=1):
        made.add(request(number, num_prompt))
    admit_all(made)
    return made


def admit_all(made: Batcher) -> None:
    """As many as there are rows, each with all its tokens to read, as the scheduler does it."""
    while len(made.live) < made.max_batch_size and made.waiting:
        first = made.waiting[0]
        made.admit(first)
        first.move_to(RequestState.PREFILLING)
        first.num_prefill_tokens = len(first.tokens)
        first.num_computed_tokens = 0


def read_step(made: Batcher) -> list[tuple[int, int, int, bool]]:
    """One step's chunks as (sequence, start, length, is_last), taken as read."""
    chunks = made.prefills()
    for chunk in chunks:
        found = made.find(chunk.sequence)
        assert found is not None
        assert chunk.tokens == tuple(range(chunk.start, chunk.start + len(chunk.tokens)))
        found.num_computed_tokens += len(chunk.tokens)
        if chunk.is_last:
            found.move_to(RequestState.DECODING)
    return [(c.sequence, c.start, len(c.tokens), c.is_last) for c in chunks]


@pytest.mark.parametrize(
    ("prompts", "budget", "steps"),
    [
        # one long prompt, in chunks of the budget
        ([10], 4, [[(1, 0, 4, False)], [(1, 4, 4, False)], [(1, 8, 2, True)]]),
        # what one leaves, the next takes; the oldest first
        (
            [3, 10, 2],
            8,
            [[(1, 0, 3, True), (2, 0, 5, False)], [(2, 5, 5, True), (3, 0, 2, True)]],
        ),
        # an exact fit leaves nothing, and no empty chunk
        ([4, 4], 4, [[(1, 0, 4, True)], [(2, 0, 4, True)]]),
    ],
)
def test_chunks(
    prompts: list[int], budget: int, steps: list[list[tuple[int, int, int, bool]]]
) -> None:
    made = batcher(prompts, budget)
    assert [read_step(made) for _ in steps] == steps
    assert read_step(made) == []


@pytest.mark.parametrize(
    ("num_decode_tokens", "chunk"),
    [
        (0, 128),
        (1, 127),  # 128 in all
        (32, 96),
        (63, 65),
        (64, 128),
        (200, 120),  # 320 in all: five tiles
    ],
)
def test_the_tokens_of_a_step_fill_tiles(num_decode_tokens: int, chunk: int) -> None:
    made = batcher([1000], 128)
    assert [len(one.tokens) for one in made.prefills(num_decode_tokens)] == [chunk]


def test_a_small_budget_is_not_cut_by_half() -> None:
    made = batcher([1000], 30)
    assert [len(one.tokens) for one in made.prefills(64 - 16)] == [16]  # 64 in all
    assert [len(one.tokens) for one in made.prefills(64 - 15)] == [30]


def test_rows_are_given_in_order_of_arrival() -> None:
    made = batcher([1, 1, 1, 1], 8, max_sequences=2)
    assert list(made.live) == [1, 2]
    assert (len(made.live), len(made.waiting)) == (2, 2)
    del made.live[1]
    admit_all(made)
    assert list(made.live) == [2, 3]
    assert len(made.live) == made.max_batch_size


def test_who_ranks_first_is_admitted_first() -> None:
    """Priority 1 is worth ten seconds: of arrivals at 0, 5 and 3 the second is first."""
    made = Batcher(1, 8, 8)
    for number, (arrival_s, priority) in enumerate([(0.0, 0), (5.0, 1), (3.0, 0)], start=1):
        waiting = request(number, 1)
        waiting.arrival_s, waiting.priority = arrival_s, priority
        made.add(waiting)
    assert [r.sequence for r in made.waiting] == [2, 1, 3]


def test_a_preempted_request_waits_at_its_rank_and_reads_all_it_has() -> None:
    """Request 1 had read its 4 tokens and written 2: in chunks of 4 it reads 6, before request 2
    has a turn again."""
    made = batcher([4, 4], 4)
    first = made.live[1]
    read_step(made)
    first.tokens.extend([4, 5])
    made.add(request(3, 1))
    del made.live[1]
    first.move_to(RequestState.WAITING)
    made.add(first)
    assert [r.sequence for r in made.waiting] == [1, 3]
    admit_all(made)
    assert [read_step(made) for _ in range(3)] == [
        [(1, 0, 4, False)],
        [(1, 4, 2, True), (2, 0, 2, False)],
        [(2, 2, 2, True), (3, 0, 1, True)],
    ]


def test_what_was_cached_is_not_read() -> None:
    """Of 10 tokens 7 were found in the cache: the first chunk starts behind them."""
    made = batcher([10], 2)
    made.live[1].num_computed_tokens = 7
    assert [read_step(made), read_step(made)] == [[(1, 7, 2, False)], [(1, 9, 1, True)]]


def test_ready_are_those_that_decode_and_have_nothing_in_flight() -> None:
    made = batcher([1, 1, 9], 3)
    read_step(made)
    first, second, third = made.live.values()
    assert made.ready() == [first, second]
    assert third.state is RequestState.PREFILLING
    first.is_in_flight = True
    assert made.ready() == [second]


@pytest.mark.parametrize(
    ("prompts", "budget", "steps"),
    [
        ([10, 3], 13, [[1, 2]]),
        ([10, 3], 12, [[1], [2]]),
        # longer than the budget: alone
        ([3, 10, 3, 2], 8, [[1], [2], [3, 4]]),
        # strictly by rank: the third would fit beside the first
        ([5, 6, 3], 8, [[1], [2], [3]]),
    ],
)
def test_whole_prompts_share_the_budget(
    prompts: list[int], budget: int, steps: list[list[int]]
) -> None:
    made = batcher(prompts, budget, largest=None)
    found = [read_step(made) for _ in steps]
    assert [[chunk[0] for chunk in step] for step in found] == steps
    whole = [(number, 0, length, True) for number, length in enumerate(prompts, start=1)]
    assert [chunk for step in found for chunk in step] == whole
    assert read_step(made) == []


def test_whole_prompts_in_flight_count() -> None:
    """Of 8 tokens 5 are in flight: the next prompt of 4 waits, and then takes one of 3 along."""
    made = batcher([5, 4, 3], 8, largest=None)
    first = made.live[1]
    first.is_in_flight = True
    assert made.prefills() == []
    first.is_in_flight = False
    first.move_to(RequestState.DECODING)
    assert [chunk.sequence for chunk in made.prefills()] == [2, 3]


def test_waiting_requests_are_found_and_can_be_dropped() -> None:
    made = batcher([1, 1], 8, max_sequences=1)
    waiting = made.find(2)
    assert waiting is not None
    assert waiting.state is RequestState.WAITING
    made.waiting.remove(waiting)
    assert made.find(2) is None
    assert made.find(1) is not None
    assert list(made)
