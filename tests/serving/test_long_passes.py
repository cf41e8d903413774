"""Passes that take longer than the loop's wait for events: nothing of their step is lost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from harness import LoopHarness, fake_text
from test_trtllm_loop import PROMPTS, Pair

from smartspec_py.core.types import FinishReason
from smartspec_py.serving.loop import POLL_S

PASS_S = 3.4 * POLL_S


def with_long_passes(pair: Pair) -> Pair:
    """The target's responses come PASS_S after their requests, as from a real executor: a wait
    that ends before them returns nothing. The fake always runs whole iterations."""
    executor, clock = pair.executors[0], pair.clock
    enqueue, wait = executor.enqueue_requests, executor.await_responses
    due_s = [0.0]

    def enqueue_requests(requests: Any) -> list[int]:
        due_s[0] = clock.now() + PASS_S
        return enqueue(requests)

    def await_responses(timeout: timedelta) -> list[Any]:
        left_s = due_s[0] - clock.now()
        if left_s > timeout.total_seconds():
            clock.sleep(timeout.total_seconds())
            return []
        clock.sleep(max(left_s, 0.0))
        return wait(timedelta(0))

    executor.enqueue_requests = enqueue_requests  # type: ignore[method-assign]
    executor.await_responses = await_responses  # type: ignore[method-assign, assignment]
    return pair


@pytest.mark.parametrize(("policy", "fewest"), [("fixed:4", 4), ("none", 1), ("goodput", 4)])
def test_the_step_of_a_long_pass_is_recorded(policy: str, fewest: int) -> None:
    """Each step with a plan has the events and the time of its pass. Without drafts, a burst has
    8 tokens."""
    pair = with_long_passes(Pair())
    numbers = [pair.harness.submit(prompt, 60, policy=policy) for prompt in PROMPTS[:3]]
    pair.harness.drain()
    for number, prompt in zip(numbers, PROMPTS, strict=False):
        assert pair.harness.stories[number].tokens == fake_text(prompt, 60)
    planned = [record for record in pair.harness.loop.records if record.decision.views]
    assert len(planned) >= fewest
    assert all(record.target_s >= PASS_S for record in planned)
    drafted = sum(record.num_drafted for record in pair.harness.loop.records)
    assert drafted == sum(record.num_drafted for record in planned)


def test_messages_are_taken_in_during_a_long_pass() -> None:
    """A cancel, a deadline and a closed inbox do not wait for the pass."""
    pair = with_long_passes(Pair())
    harness: LoopHarness = pair.harness
    first = harness.submit(PROMPTS[0], 60, policy="fixed:4")
    second = harness.submit(PROMPTS[1], 60, policy="fixed:4", deadline_s=2 * PASS_S)
    while not harness.stories[second].finals:
        harness.step()
    assert harness.stories[second].finals == [FinishReason.DEADLINE]
    close_s = pair.clock.now() + 1.5 * POLL_S
    sleep = pair.clock.sleep

    def sleep_and_close(seconds: float) -> None:
        sleep(seconds)
        if pair.clock.now() > close_s:
            harness.inbox.close("the test ends")

    pair.clock.sleep = sleep_and_close  # type: ignore[method-assign]
    harness.step(4)
    assert pair.clock.now() - close_s < PASS_S
    assert harness.stories[first].finals == []
