"""Who is admitted, who gives way, and who is told what: the ledger by hand, then the whole loop.

A token costs a byte in the target's cache and one in the draft's. A request with n tokens is
charged n + 1 in the target's, so that its next token has room; a newcomer and everybody live must
find 16 more each, or as many as they may still come to hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import pytest
from harness import LoopHarness

from smartspec_py.constants import PRIORITY_WORTH_S
from smartspec_py.core.types import FinishReason, SamplingParams
from smartspec_py.engines.base import SequenceStart
from smartspec_py.engines.cache.blocks import BlockPool
from smartspec_py.serving.admission import CacheBudget, CacheLedger, victims
from smartspec_py.serving.batcher import Batcher
from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.lifecycle import Lifecycle
from smartspec_py.serving.request import ErrorCode, Request, RequestError, RequestState
from smartspec_py.serving.speculation import Speculation
from smartspec_testing.fake_engine import FakeTarget


class Drafts:
    """The draft cache as the ledger sees it: a byte a token, and what it has read of each."""

    def __init__(
        self, num_computed_tokens: Mapping[int, int] | None = None, num_bytes: int = 1
    ) -> None:
        self._num_computed_tokens, self._num_bytes = dict(num_computed_tokens or {}), num_bytes

    def bytes_per_token(self, request: Request) -> int:
        return self._num_bytes

    def num_computed_tokens(self, request: Request) -> int:
        return self._num_computed_tokens.get(request.sequence, 0)


def live_one(
    number: int, num_tokens: int, *, remaining: int = 100, priority: int = 0, max_draft_len: int = 8
) -> Request:
    """All of its tokens are its prompt."""
    tokens = [1] * num_tokens
    return Request(
        number,
        tokens,
        num_tokens,
        remaining,
        SamplingParams(),
        "goodput",
        max_draft_len,
        priority=priority,
        arrival_s=float(number),
    )


def ledger(
    capacity: int, num_computed_tokens: Mapping[int, int] | None = None, **costs: int
) -> CacheLedger:
    draft_bytes = costs.get("draft_bytes", 1)
    budget = CacheBudget(capacity, costs.get("target_bytes", 1), draft_bytes)
    return CacheLedger(budget, Drafts(num_computed_tokens, draft_bytes), FakeTarget())


def test_used_is_every_token_the_next_one_and_what_the_draft_has_read() -> None:
    """(10 + 1) + (20 + 1) in the target's cache; 9 in the draft's. At 3 and 2 bytes: 96 + 18."""
    live = [live_one(1, 10), live_one(2, 20)]
    assert ledger(0, {1: 9}).used(live) == 41
    assert ledger(0, {1: 9}, target_bytes=3, draft_bytes=2).used(live) == 114
    assert ledger(0).used([]) == 0


@pytest.mark.parametrize(
    ("lengths", "remaining", "needed"),
    [
        ([10], 100, 11 + 16),
        ([10, 30], 100, 11 + 31 + 32),
        # 5 more tokens are all that come: with 11 charged already, 14 is the most it ever holds
        # but for the last, which is never read; 15 are room for every one of them.
        ([10], 5, 15),
        ([10], 1, 11),
        ([10, 10], 2, 12 + 12),
    ],
)
def test_a_newcomer_needs_its_tokens_and_headroom(
    lengths: list[int], remaining: int, needed: int
) -> None:
    """What draft caches hold does not stand in the way. The last length is the newcomer's."""
    *live, newcomer = [live_one(i, n, remaining=remaining) for i, n in enumerate(lengths)]
    for capacity in (needed - 1, needed):
        fits = ledger(capacity, dict.fromkeys(range(9), 1000)).fits(live, newcomer)
        assert fits is (capacity >= needed)


@pytest.mark.parametrize("remaining", [1, 2, 15, 16, 17, 18, 50])
def test_whatever_the_whole_budget_can_hold_fits_alone(remaining: int) -> None:
    """`Intake` takes whatever prompt and max_tokens together do not exceed the budget: were such a
    request not admitted to an empty cache, it and all behind it would wait for good."""
    assert ledger(60).fits([], live_one(1, 60 - remaining, remaining=remaining))


@pytest.mark.parametrize(
    ("capacity", "num_computed_tokens", "room"),
    [
        # 22 used of 62: 40 left, 20 each. A draft costs 2; catching up 10 leaves 10, that is 5.
        (62, {}, {1: 5, 2: 5}),
        # request 1 has been read: used 32, 15 each: 15 // 2 = 7 for it, (15 - 10) // 2 = 2
        (62, {1: 10}, {1: 7, 2: 2}),
        (22, {}, {1: 0, 2: 0}),
        (10, {}, {1: 0, 2: 0}),  # over the budget
        (75, {1: 10}, {1: 8, 2: 5}),  # no more than it may draft at all; (21 - 10) // 2
        (76, {}, {}),  # not tight: nobody is held
    ],
)
def test_drafts_have_an_equal_share_of_what_is_left(
    capacity: int, num_computed_tokens: Mapping[int, int], room: dict[int, int]
) -> None:
    live = [live_one(1, 10), live_one(2, 10)]
    assert ledger(capacity, num_computed_tokens).draft_room(live, live) == room


@pytest.mark.parametrize(
    ("remaining", "max_draft_len", "most"),
    [
        (100, 8, 10 + 1 + 8),
        (100, 0, 10 + 1),
        # prompt and max_tokens are the most that it can ever hold
        (5, 8, 15),
        (1, 8, 11),
    ],
)
def test_a_budget_is_tight_where_the_next_step_could_outgrow_it(
    remaining: int, max_draft_len: int, most: int
) -> None:
    """Two of 10 tokens, each of `most` in the next step, at 3 and 2 bytes a token."""
    live = [
        live_one(number, 10, remaining=remaining, max_draft_len=max_draft_len) for number in (1, 2)
    ]
    for capacity, is_tight in ((2 * most * 5 - 1, True), (2 * most * 5, False)):
        assert ledger(capacity, target_bytes=3, draft_bytes=2).is_tight(live) is is_tight


@pytest.mark.parametrize(
    ("capacity", "in_flight", "dropped"),
    [(63, 0, []), (62, 0, [3]), (53, 0, [3]), (52, 0, [3, 1]), (30, 0, [3, 1]), (62, 3, [1])],
)
def test_draft_caches_go_from_the_last_in_rank_until_it_fits(
    capacity: int, in_flight: int, dropped: list[int]
) -> None:
    """Three of 10 tokens: 33. Draft caches of 10 and 20 of requests 3 and 1: 63 in all. Drafts in
    flight will be observed, so they are not dropped."""
    live = [live_one(number, 10) for number in (1, 2, 3)]
    live[2].is_in_flight = in_flight == 3
    found = ledger(capacity, {1: 20, 3: 10}).drafts_to_drop(live)
    assert [request.sequence for request in found] == dropped


def test_victims_have_lower_priority_a_later_rank_and_no_prompt_in_flight() -> None:
    """Ranks: arrival less 10 s a level. The newcomer's is 8 - 20 = -12."""
    newcomer = live_one(8, 5, priority=2)
    same = live_one(9, 5, priority=2)
    lower, lowest = live_one(3, 5, priority=1), live_one(4, 5)
    reading, decoding = live_one(5, 5), live_one(7, 5)
    for in_flight in (reading, decoding):
        in_flight.is_in_flight = True
        in_flight.move_to(RequestState.PREFILLING)
    decoding.move_to(RequestState.DECODING)
    long_ago = live_one(6, 5)
    long_ago.arrival_s = -12.5
    live = [same, lower, lowest, reading, decoding, long_ago]
    assert victims(live, newcomer) == [decoding, lowest, lower]


def prompt_of(length: int, first: int = 10) -> tuple[int, ...]:
    return tuple((first + i) % 100 for i in range(length))


def test_speculation_shrinks_then_draft_caches_go_then_the_last_is_preempted() -> None:
    """Two of 40 tokens with 60 to write, and a budget of 180. With n tokens each they take
    2 (n + 1) and at most 2 (n - 1) for drafting: from 45 on one draft cache must go, from 60 or so
    the other, and when they have 179 tokens together, the second must wait: 179 + 2 > 180.

    They are equal, so they draft equally well; only their ranks differ. In the step of the
    preemption the first has room for 2 drafts again, so it gains up to 3.
    """
    harness = LoopHarness(accept_prob=0.5, max_cache_tokens=180, prefill_chunk=100)
    first, second = (harness.submit(prompt_of(40), 60, policy="fixed:2") for _ in range(2))
    used: list[int] = []
    harness.after_admission(lambda: used.append(harness.cache_used))
    last_draft = {first: 0, second: 0}
    while True:
        harness.step()
        if harness.loop.lifecycle.num_preemptions:
            break
        for number, draft_len in harness.loop.records[-1].decision.plan.draft_lens.items():
            if draft_len:
                last_draft[number] = len(harness.requests[number].tokens)
    assert 40 < last_draft[second] < last_draft[first] < 85
    assert 179 <= sum(len(request.tokens) for request in harness.requests.values()) <= 183
    assert harness.requests[second].state is RequestState.WAITING
    assert harness.drain() == [FinishReason.LENGTH] * 2
    assert [request.num_preemptions for request in harness.requests.values()] == [0, 1]
    assert max(used) <= 180
    assert harness.states[-1][1].num_preemptions == harness.loop.lifecycle.num_preemptions


def test_nobody_starves() -> None:
    """One row. There is always a newcomer of priority 3 that waits; each takes 50 steps of 10 ms.

    Three levels are worth 30 s: newcomers that arrive later than that rank behind the low one. Then
    at most two are before it, one running and one waiting, 0.5 s and a chunk of 2 ms each; with its
    own 20 steps it ends within 30 s + 2 * 0.52 s + 0.22 s.
    """
    harness = LoopHarness(max_sequences=1)
    low = harness.submit(prompt_of(5), 20, policy="none")
    harness.step(3)
    while not harness.stories[low].finals:
        if harness.num_places_taken == 0:
            harness.submit(prompt_of(5), 50, policy="none", priority=3)
        harness.step()
        assert harness.clock.now() < 3 * PRIORITY_WORTH_S + 1.26
    assert harness.clock.now() > 3 * PRIORITY_WORTH_S
    assert harness.requests[low].num_preemptions == 1
    assert harness.stories[low].finals == [FinishReason.LENGTH]


def test_priority_preempts_only_what_is_lower_and_the_last_in_rank_first() -> None:
    """Rows for three of priorities 0, 1, 1. The newcomer of 1 takes the place of the one of 0; the
    next has nobody below it; one of 2 takes that of the later of the first two 1s."""
    harness = LoopHarness(max_sequences=3)
    submit = partial(harness.submit, prompt_of(5), 40, policy="none")
    submit()
    highs = [submit(priority=1) for _ in range(2)]
    harness.step(3)
    third, _ = submit(priority=1), submit(priority=1)
    harness.step()
    assert set(harness.loop.lifecycle.batcher.live) == {*highs, third}
    top = submit(priority=2)
    harness.step()
    assert set(harness.loop.lifecycle.batcher.live) == {*highs, top}, "the later arrival gives way"
    assert harness.drain() == [FinishReason.LENGTH] * 6
    assert [request.num_preemptions for request in harness.requests.values()] == [1, 0, 0, 1, 0, 0]


def test_a_larger_newcomer_preempts_as_many_as_it_takes_or_none() -> None:
    """Budget 120; three of 20 with 10 to write: 3 * 30. One of 60 with 10 needs 70, so two of
    them go. One of 80 cannot be served by preempting, and preempts nobody."""
    harness = LoopHarness(max_cache_tokens=120)
    for _ in range(3):
        harness.submit(prompt_of(20), 10, policy="none")
    harness.step(2)
    for length in (60, 80):
        harness.submit(prompt_of(length), 10, policy="none", priority=1)
        harness.step()
        counts = [request.num_preemptions for request in harness.requests.values()]
        assert counts[:3] == [0, 1, 1]
    assert harness.drain() == [FinishReason.LENGTH] * 5


class Blocks(FakeTarget):
    """The cache of a target with blocks of four tokens."""

    def __init__(self) -> None:
        self.pool = BlockPool(40, 4, 4, max_len=40, copy=lambda *_: None)

    def begin(self, start: SequenceStart) -> int:
        table = self.pool.allocate(start.sequence, start.tokens, start.num_prompt)
        self.pool.extend(table, len(start.tokens))
        table.num_cached = len(start.tokens)
        return 0

    def num_common(self, *arguments: Any) -> int:
        return self.pool.num_common(*arguments)

    def num_shared_tokens(self, gone: Collection[int] = ()) -> int:
        return 4 * self.pool.num_shared_without(gone)

    def release(self, sequence: int) -> None:
        self.pool.release(sequence)


def alike(number: int, head: int = 0, priority: int = 0) -> Request:
    """Sixteen tokens, and one to write: five blocks. Three are those of others with this head."""
    request = live_one(number, 16, remaining=1, priority=priority)
    request.tokens[:] = [*[head] * 12, *[number] * 4]
    return request


@pytest.mark.parametrize(
    ("live", "preempted", "head", "needed"),
    [
        ([1, 2, 3], [], 9, 4 * 20 - 24),
        ([1, 2], [3], 9, 3 * 20 - 12),
        ([1], [3, 2], 9, 2 * 20),
        ([1], [3, 2], 0, 2 * 20 - 12),
        ([], [3, 2, 1], 0, 20),
        ([], [3, 2, 1], 9, 20),
    ],
)
def test_what_is_shared_with_the_preempted_is_no_room(
    live: list[int], preempted: list[int], head: int, needed: int
) -> None:
    """The newcomer has the head of the others, 0, or another one. What `fits` says before the
    preemption is what it says after it."""
    target, requests = Blocks(), {number: alike(number) for number in (1, 2, 3)}
    for request in requests.values():
        target.begin(request.start)
    of_live, gone = ([requests[number] for number in some] for some in (live, preempted))
    for capacity in (needed - 1, needed):
        found = CacheLedger(CacheBudget(capacity, 1, 0, 4), Drafts(), target)
        assert found.fits(of_live, alike(4, head), gone) is (capacity >= needed)
    for request in gone:
        target.release(request.sequence)
    assert found.fits(of_live, alike(4, head))


@pytest.mark.parametrize(("capacity", "num_preempted"), [(39, 0), (40, 1)])
def test_nobody_is_preempted_in_vain(capacity: int, num_preempted: int) -> None:
    """Two share three blocks and need 28. With the newcomer instead of one of them, it is 40."""
    target, batcher = Blocks(), Batcher(4, 64, 64, 4)
    speculation, inbox = Speculation({}), Inbox(10)
    budget = CacheBudget(capacity, 1, 0, 4)
    lifecycle = Lifecycle(
        target,  # type: ignore[arg-type]
        speculation,
        batcher,
        budget,
        inbox,
        lambda _: None,
        lambda: 0.0,
    )
    for request in (alike(1, priority=1), alike(2), alike(3, head=9, priority=1)):
        batcher.add(request)
        lifecycle.admit()
    assert lifecycle.num_preemptions == num_preempted
    assert [*batcher.live] == ([1, 3] if num_preempted else [1, 2])


def test_a_deadline_ends_a_request_with_its_text_or_with_an_error() -> None:
    """Two rows, 64 prompt tokens a step: one writes, one reads 2000 tokens, one waits."""
    harness = LoopHarness(max_sequences=2)
    writing = harness.submit(prompt_of(5), 500, deadline_s=0.4)
    reading = harness.submit(prompt_of(2000), 5, deadline_s=0.25)
    waiting = harness.submit(prompt_of(5), 5, deadline_s=0.15)
    ends = harness.drain()
    assert ends == [FinishReason.DEADLINE, ErrorCode.UNAVAILABLE, ErrorCode.UNAVAILABLE]
    assert 5 < len(harness.stories[writing].tokens) < 500
    for number, allowed_ms in ((reading, 250), (waiting, 150)):
        message = f"deadline_ms: {allowed_ms} ms passed before the first token"
        assert [update.error for update in harness.stories[number].updates] == [
            (ErrorCode.UNAVAILABLE, message)
        ]


@pytest.mark.parametrize("burst", [1, 8])
def test_draining_lets_finish_what_can_and_ends_the_rest(burst: int) -> None:
    """Three rows and 0.5 s of grace: 10 tokens take 0.3 s, 500 and a prompt of 4000 take longer.
    The fourth has a row in the end, but no chunk of its prompt was read; the fifth waits.

    A burst in flight is cut short: the row is free a step later.
    """
    harness = LoopHarness(max_sequences=3, max_decode_tokens=burst)
    harness.submit(prompt_of(5), 10, policy="none")
    long = harness.submit(prompt_of(5), 500, policy="none")
    reading = harness.submit(prompt_of(4000), 5)
    fourth = harness.submit(prompt_of(4000), 500)
    waiting = harness.submit(prompt_of(5), 5)
    harness.step(2)
    harness.inbox.refuse("the server is shutting down")
    harness.loop.drain(0.5)
    with pytest.raises(RequestError, match="shutting down"):
        harness.submit(prompt_of(5), 5)
    ends = harness.drain()
    assert ends[:2] == [FinishReason.LENGTH, FinishReason.CANCELLED]
    assert 0.5 < harness.clock.now() < 0.7
    assert 5 < len(harness.stories[long].tokens) < 500
    assert harness.requests[fourth].scheduled_s is not None
    for number in (reading, fourth, waiting):
        (update,) = harness.stories[number].updates
        assert update.error == (ErrorCode.UNAVAILABLE, "the server is shutting down")
