"""Whatever comes, in whatever order: arrivals, cancels, time, a drain; the budget holds at every
step, every request has exactly one last word, and nothing is held when all is quiet."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from harness import LoopHarness
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from smartspec_py.core.types import SamplingParams
from smartspec_py.serving.request import ErrorCode, RequestError, RequestState

POLICIES = ["none", "fixed:2", "fixed:8", "goodput"]

LONGEST = 90
"""Prompt and generated tokens of a request: the least budget below holds it."""


class Serving(RuleBasedStateMachine):
    """One byte a token in both caches. Sampled requests have a text of their own."""

    harness: LoopHarness

    @initialize(
        capacity=st.integers(LONGEST, 300),
        max_sequences=st.integers(1, 5),
        burst=st.sampled_from([1, 1, 3]),
        max_queue=st.sampled_from([2, 50]),
        accept_prob=st.sampled_from([0.0, 0.6, 1.0]),
    )
    def start(
        self, capacity: int, max_sequences: int, burst: int, max_queue: int, accept_prob: float
    ) -> None:
        self.capacity, self.max_queue, self.is_draining = capacity, max_queue, False
        self.harness = LoopHarness(
            accept_prob=accept_prob,
            max_sequences=max_sequences,
            max_queue=max_queue,
            prefill_chunk=24,
            max_cache_tokens=capacity,
            max_decode_tokens=burst,
        )
        self.harness.after_admission(self.check_budget)

    def check_budget(self) -> None:
        """With bursts in flight the target's cache may outgrow the budget until they end."""
        in_flight = any(request.is_in_flight for request in self.harness.requests.values())
        assert in_flight or self.harness.cache_used <= self.capacity

    @rule(
        length=st.integers(1, 60),
        max_tokens=st.integers(1, 30),
        policy=st.sampled_from(POLICIES),
        priority=st.sampled_from([0, 0, 0, 1, 3]),
        deadline_s=st.none() | st.floats(0.0, 1.0),
        seed=st.sampled_from([None, None, 5]),
    )
    def submit(
        self,
        length: int,
        max_tokens: int,
        policy: str,
        priority: int,
        deadline_s: float | None,
        seed: int | None,
    ) -> None:
        is_full = self.harness.num_places_taken >= self.max_queue
        greedy = SamplingParams()
        with pytest.raises(RequestError) if is_full or self.is_draining else nullcontext():
            self.harness.submit(
                tuple((length + i) % 100 for i in range(length)),
                max_tokens,
                policy=policy,
                sampling=greedy if seed is None else SamplingParams(temperature=1.0, seed=seed),
                priority=priority,
                deadline_s=deadline_s,
            )

    @rule(number=st.integers(1, 20))
    def cancel(self, number: int) -> None:
        """It ends at the next step."""
        self.harness.inbox.cancel(number)
        self.harness.step()
        assert number not in self.harness.requests or self.harness.requests[number].is_over

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self.harness.step(count)

    @rule(seconds=st.floats(0.0, 0.5))
    def wait(self, seconds: float) -> None:
        self.harness.clock.sleep(seconds)

    @precondition(lambda self: not self.is_draining)
    @rule(grace_s=st.floats(0.0, 0.5))
    def drain(self, grace_s: float) -> None:
        self.is_draining = True
        self.harness.inbox.refuse("draining")
        self.harness.loop.drain(grace_s)

    @invariant()
    def parts_agree(self) -> None:
        harness = self.harness
        harness.target.check_integrity()
        harness.loop.lifecycle.check_integrity()
        waiting = [r for r in harness.requests.values() if r.state is RequestState.WAITING]
        num_unread = len(harness.inbox._arrivals)  # what the loop does not know of yet
        assert harness.loop.num_waiting + num_unread == len(waiting)
        assert harness.num_places_taken == sum(r.scheduled_s is None for r in waiting)
        live = [
            r
            for r in harness.requests.values()
            if r.sequence in harness.loop.lifecycle.batcher.live
        ]
        assert harness.target.num_sequences == len(live)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        ends = self.harness.drain()
        assert self.harness.num_places_taken == 0
        assert self.harness.cache_used == 0
        assert ErrorCode.INTERNAL not in ends
        for end, story in zip(ends, self.harness.stories.values(), strict=True):
            assert (end is ErrorCode.UNAVAILABLE) <= (not story.tokens)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
