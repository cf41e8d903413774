"""The request's states: the table of moves, written out, and what a wrong one leaves behind."""

import pytest

from smartspec_py.core.types import SamplingParams
from smartspec_py.serving.request import ErrorCode, InvalidField, Request, RequestState

LEGAL = {
    RequestState.WAITING: {"PREFILLING", "CANCELLED", "EXPIRED", "FAILED"},
    # the first token may end it, and it may be preempted
    RequestState.PREFILLING: {
        *("DECODING", "WAITING"),
        *("FINISHED", "CANCELLED", "EXPIRED", "FAILED"),
    },
    RequestState.DECODING: {"WAITING", "FINISHED", "CANCELLED", "EXPIRED", "FAILED"},
}


def make_request(state: RequestState = RequestState.WAITING) -> Request:
    return Request(7, [5, 6, 7], 3, 10, SamplingParams(), "goodput", 4, state=state)


@pytest.mark.parametrize("before", RequestState)
def test_moves(before: RequestState) -> None:
    legal = LEGAL.get(before, set())
    assert make_request(before).is_over == (not legal)
    for after in RequestState:
        request = make_request(before)
        if after.name in legal:
            request.move_to(after)
            assert request.state is after
            continue
        with pytest.raises(RuntimeError, match=f"request 7: {before.name} -> {after.name}"):
            request.move_to(after)
        assert request.state is before


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
    assert (request.num_generated, request.remaining) == (1, 9)


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
def test_rank_is_arrival_moved_by_priority(
    arrivals: list[tuple[float, int]], order: list[int]
) -> None:
    requests = [
        Request(
            number, [5], 1, 10, SamplingParams(), "none", 0, arrival_s=arrival, priority=priority
        )
        for number, (arrival, priority) in enumerate(arrivals, start=1)
    ]
    assert [r.sequence for r in sorted(requests, key=lambda r: r.rank)] == order


def test_an_invalid_field_names_field_value_and_range() -> None:
    error = InvalidField("top_p", 1.5, "in (0, 1]")
    assert str(error) == "top_p: got 1.5, must be in (0, 1]"
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert len(str(InvalidField("text_input", "x" * 10_000, "shorter"))) < 200
