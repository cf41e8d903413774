"""The request's states: the table of moves, written out, and what a wrong one leaves behind."""

import pytest

from smartspec_py.core.types import SamplingParams
from smartspec_py.serving.request import ErrorCode, InvalidField, Request, RequestState

WAITING, PREFILLING, DECODING, FINISHED, CANCELLED, EXPIRED, FAILED = RequestState

LEGAL = {
    (WAITING, PREFILLING),
    (WAITING, CANCELLED),
    (WAITING, EXPIRED),
    (WAITING, FAILED),
    (PREFILLING, DECODING),
    (PREFILLING, FINISHED),  # the first token ends it
    (PREFILLING, WAITING),  # preempted
    (PREFILLING, CANCELLED),
    (PREFILLING, EXPIRED),
    (PREFILLING, FAILED),
    (DECODING, FINISHED),
    (DECODING, WAITING),  # preempted
    (DECODING, CANCELLED),
    (DECODING, EXPIRED),
    (DECODING, FAILED),
}


def make_request(state: RequestState = WAITING) -> Request:
    return Request(7, [5, 6, 7], 3, 10, SamplingParams(), "goodput", 4, state=state)


@pytest.mark.parametrize("after", RequestState)
@pytest.mark.parametrize("before", RequestState)
def test_moves(before: RequestState, after: RequestState) -> None:
    request = make_request(before)
    if (before, after) in LEGAL:
        request.move_to(after)
        assert request.state is after
        return
    with pytest.raises(RuntimeError, match=f"request 7: {before.name} -> {after.name}"):
        request.move_to(after)
    assert request.state is before


@pytest.mark.parametrize("state", RequestState)
def test_the_states_without_a_way_out_are_over(state: RequestState) -> None:
    assert make_request(state).is_over == (state in (FINISHED, CANCELLED, EXPIRED, FAILED))


def test_counts_follow_the_tokens() -> None:
    """A prompt of 3, 10 to generate: after 2 tokens 8 remain."""
    request = make_request()
    assert (request.num_generated, request.remaining) == (0, 10)
    request.tokens.extend([8, 9])
    assert (request.num_generated, request.remaining) == (2, 8)


@pytest.mark.parametrize(
    ("num_computed_tokens", "budget", "chunk"),
    [(0, 2, [5, 6]), (2, 2, [7]), (0, 99, [5, 6, 7]), (3, 2, []), (0, 0, [])],
)
def test_next_chunk_ends_with_what_was_known_at_admission(
    num_computed_tokens: int, budget: int, chunk: list[int]
) -> None:
    request = make_request()
    request.num_prefill_tokens = 3
    request.tokens.append(8)  # generated since, and no part of any chunk
    request.num_computed_tokens = num_computed_tokens
    assert list(request.next_chunk(budget)) == chunk


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        # (arrival_s, priority): equal priorities by arrival, equal arrivals by number
        ([(0.0, 0), (1.0, 0)], [1, 2]),
        ([(1.0, 0), (0.0, 0), (1.0, 0)], [2, 1, 3]),
        # a level is worth 10 s: 9.9 s later it is still first, 10.1 s later no more
        ([(0.0, 0), (9.9, 1)], [2, 1]),
        ([(0.0, 0), (10.1, 1)], [1, 2]),
        ([(0.0, 0), (0.0, -1), (29.0, 3)], [3, 1, 2]),
    ],
)
def test_rank_is_arrival_moved_by_priority(
    arrivals: list[tuple[float, int]], order: list[int]
) -> None:
    requests = []
    for number, (arrival_s, priority) in enumerate(arrivals, start=1):
        request = Request(number, [5], 1, 10, SamplingParams(), "none", 0)
        request.arrival_s, request.priority = arrival_s, priority
        requests.append(request)
    assert [r.sequence for r in sorted(requests, key=lambda r: r.rank)] == order


def test_an_invalid_field_names_field_value_and_range() -> None:
    error = InvalidField("top_p", 1.5, "in (0, 1]")
    assert str(error) == "top_p: got 1.5, must be in (0, 1]"
    assert error.code is ErrorCode.INVALID_ARGUMENT


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(str(InvalidField("text_input", "x" * 10_000, "shorter"))) < 200
