"""An engine that hangs ends the server as an exception does, and a health check tells before.

Times are limits against a hang, not expectations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from harness import (
    CAPABILITIES,
    LIMITS,
    VOCAB_SIZE,
    LoopHarness,
    fake_engine,
    fake_server,
    wait_until,
)

from smartspec_py.config import DRAFT_MODEL
from smartspec_py.engines.base import Draft, DraftTask, Event
from smartspec_py.serving.inbox import MAX_CALLS
from smartspec_py.serving.request import ErrorCode, GenerateParams, RequestError
from smartspec_py.serving.scheduler import EngineStalledError
from smartspec_py.serving.server import Engine
from smartspec_testing.fake_engine import FakeTarget
from smartspec_testing.fake_proposer import FakeProposer
from smartspec_testing.local import LocalSink

WAIT_S = 20.0
HURRIED = LIMITS.model_copy(update={"engine_timeout_s": 0.1})
HEALTH = GenerateParams("health", 1, health_check=True)


class BlockedTarget(FakeTarget):
    """Its third poll with work lasts until it is let go."""

    def __init__(self, let_go: threading.Event) -> None:
        super().__init__(CAPABILITIES)
        self._let_go = let_go
        self.is_blocked = False

    def poll(self, timeout_s: float) -> list[Event]:
        if self.num_steps >= 2 and self._in_flight:
            self.is_blocked = True
            self._let_go.wait(WAIT_S)
        return super().poll(timeout_s)


class SilentTarget(FakeTarget):
    """Polls return in time; from the third with work on, without an event of sequence 1."""

    def poll(self, timeout_s: float) -> list[Event]:
        held = self._in_flight.pop(1, None) if self.num_steps >= 2 else None
        events = super().poll(timeout_s)
        if held is not None:
            self._in_flight[1] = held
            time.sleep(0.001)
        return events


class BlockedProposer(FakeProposer):
    """Asked for drafts, it blocks until it is let go."""

    def __init__(self, let_go: threading.Event) -> None:
        super().__init__(0.7, vocab_size=VOCAB_SIZE)
        self._let_go = let_go

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        if tasks:
            self._let_go.wait(WAIT_S)
        return super().propose(tasks)


def blocked_target(let_go: threading.Event) -> Engine:
    return replace(fake_engine(), target=BlockedTarget(let_go))


def silent_target(let_go: threading.Event) -> Engine:
    return replace(fake_engine(), target=SilentTarget(CAPABILITIES))


def blocked_draft(let_go: threading.Event) -> Engine:
    return replace(fake_engine(), proposers={DRAFT_MODEL: BlockedProposer(let_go)})


@pytest.mark.parametrize("make", [blocked_target, silent_target, blocked_draft])
def test_a_hung_engine_fails_every_request_once_and_ends_the_server(
    make: Callable[[threading.Event], Engine],
) -> None:
    deaths: list[str] = []
    let_go = threading.Event()
    server = fake_server(make(let_go), HURRIED, on_failure=deaths.append)
    sinks = [LocalSink() for _ in range(3)]
    server.start()
    for i, sink in enumerate(sinks):
        server.submit(GenerateParams("hello", 4000, stream=i == 1, policy="fixed:2"), sink)
    for sink in sinks:
        sink.wait(WAIT_S)
    wait_until(lambda: bool(deaths))
    assert server.failure == deaths[0]
    with pytest.raises(RequestError, match="engine_timeout_s") as caught:
        server.submit(GenerateParams("hello", 5), LocalSink())
    assert caught.value.code is ErrorCode.UNAVAILABLE
    let_go.set()
    server.stop()
    assert len(deaths) == 1
    assert "limits.engine_timeout_s" in deaths[0]
    for sink in sinks:
        assert sink.error == (ErrorCode.INTERNAL, deaths[0])
        assert sink.num_finals == 1, "the loop came back, and answered again"


def test_a_request_that_comes_after_the_failure_is_failed_too() -> None:
    """Between the check and the queue there is time for it."""
    server = fake_server(fake_engine(), HURRIED)
    server.start()
    server._fail("broken")
    sink = LocalSink()
    _, response = server.intake.receive(GenerateParams("hello", 5), sink)
    server._responder.post(response)
    sink.wait(WAIT_S)
    server.stop()
    assert sink.error == (ErrorCode.INTERNAL, "broken")
    assert sink.num_finals == 1


def test_the_loop_counts_from_the_last_event_of_each_request() -> None:
    """By hand: the second request goes on, the first has had no event for longer than allowed."""
    harness = LoopHarness(target=SilentTarget(CAPABILITIES))
    harness.loop._engine_timeout_s = 10.0
    first = harness.submit((3, 4), 500, policy="none")
    harness.submit((5, 6), 500, policy="none")
    harness.step(4)
    harness.clock.sleep(9.0)
    harness.step()
    harness.clock.sleep(1.5)
    with pytest.raises(EngineStalledError, match=f"no event of request {first} for 10 s"):
        harness.step()


def test_a_health_check_is_answered_by_the_loop_alone() -> None:
    """Not before it starts; then at its next turn, with an empty text."""
    server = fake_server(fake_engine(), LIMITS.model_copy(update={"max_queue": 1}))
    server.submit(GenerateParams("hello", 5), LocalSink())
    with pytest.raises(RequestError, match="the queue is full"):
        server.submit(GenerateParams("hello", 5), LocalSink())
    sink = LocalSink()
    server.submit(HEALTH, sink)
    assert sink.num_finals == 0
    server.start()
    sink.wait(WAIT_S)
    server.stop()
    assert (sink.error, sink.text, sink.num_finals) == (None, "", 1)


def test_health_checks_that_wait_are_bounded() -> None:
    server = fake_server(fake_engine())
    sinks = [LocalSink() for _ in range(MAX_CALLS)]
    for sink in sinks:
        server.submit(HEALTH, sink)
    with pytest.raises(RequestError, match="64 calls wait for the next step"):
        server.submit(HEALTH, LocalSink())
    server.start()
    for sink in sinks:
        sink.wait(WAIT_S)
    server.stop()
    assert [sink.num_finals for sink in sinks] == [1] * MAX_CALLS
    assert not server.loop.records, "a check is no step"
    assert server.num_open == 0


def test_a_health_check_of_a_hung_loop_ends_with_it() -> None:
    """Nobody answers it while the engine hangs; then it has the reason."""
    let_go = threading.Event()
    target = BlockedTarget(let_go)
    server = fake_server(replace(fake_engine(), target=target), HURRIED)
    server.start()
    busy, check = LocalSink(), LocalSink()
    server.submit(GenerateParams("hello", 50, stream=True), busy)
    wait_until(lambda: target.is_blocked)
    server.submit(HEALTH, check)
    check.wait(WAIT_S)
    busy.wait(WAIT_S)
    assert server.failure is not None
    assert check.error == (ErrorCode.UNAVAILABLE, server.failure)
    let_go.set()
    server.stop()
    with pytest.raises(RequestError, match="engine_timeout_s"):
        server.submit(HEALTH, LocalSink())
    assert [busy.num_finals, check.num_finals] == [1, 1]
