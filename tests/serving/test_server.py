"""The server with its threads, over the fake engine: many callers, a full queue, death and hangs.

Times are limits against a hang, not expectations.
"""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from harness import (
    CAPABILITIES,
    LIMITS,
    TOKENIZER,
    LoopHarness,
    fake_engine,
    fake_server,
    fake_serving,
    fake_text,
    wait_until,
)

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.constants import DRAFT_MODEL
from smartspec_py.core.types import FinishReason, SamplingParams
from smartspec_py.engines.base import Event
from smartspec_py.engines.engine import Engine
from smartspec_py.serving.inbox import MAX_CALLS
from smartspec_py.serving.lifecycle import EngineStalledError
from smartspec_py.serving.request import ErrorCode, RequestError
from smartspec_py.serving.server import Server
from smartspec_testing.fake_engine import FakeTarget
from smartspec_testing.local import LocalSink, generate

WAIT_S = 60.0
POLICIES = ["none", "fixed:1", "fixed:4", "goodput"]


def expected_text(text: str, num_tokens: int, sampling: SamplingParams | None = None) -> str:
    prompt = tuple(TOKENIZER.encode(text).ids)
    return str(TOKENIZER.decode(fake_text(prompt, num_tokens, sampling)))


def test_many_callers_at_once() -> None:
    """6 threads submit 15 requests each, with 4 rows and every policy among them."""
    sinks: dict[tuple[int, int], LocalSink] = {}
    engine = fake_engine(max_sequences=4)

    def call(server: Server, worker: int) -> None:
        for i in range(15):
            sink = sinks[worker, i] = LocalSink()
            policy = POLICIES[(worker + i) % 4]
            params = GenerateParams(f"{worker} asks {i}", 5 + i, stream=i % 2 == 0, policy=policy)
            server.submit(params, sink)

    with fake_serving(engine) as server:
        threads = [threading.Thread(target=call, args=(server, worker)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for sink in sinks.values():
            sink.wait(WAIT_S)
        wait_until(lambda: server.loop.num_live == 0)
    assert len(sinks) == 90
    for (worker, i), sink in sinks.items():
        assert (sink.num_tokens, sink.num_finals) == (5 + i, 1)
        assert sink.text == expected_text(f"{worker} asks {i}", 5 + i)
        assert sink.finish_reason is FinishReason.LENGTH
        assert i % 2 == 0 or len(sink.pieces) == 1
    assert isinstance(engine.target, FakeTarget)
    assert engine.target.num_sequences == 0


def test_a_full_queue_refuses_at_once() -> None:
    """One row and a queue of two: the fourth is refused, and served once there is room."""
    limits = LIMITS.model_copy(update={"max_queue": 2})
    params = GenerateParams("hello", 10)
    sinks = [LocalSink() for _ in range(5)]
    with fake_serving(fake_engine(max_sequences=1, step_s=0.01), limits) as server:
        server.submit(params, sinks[0])
        wait_until(lambda: server.loop.num_live == 1)
        server.submit(params, sinks[1])
        server.submit(params, sinks[2])
        with pytest.raises(RequestError, match=r"limits\.max_queue is 2") as caught:
            server.submit(params, sinks[3])
        assert caught.value.code is ErrorCode.UNAVAILABLE
        sinks[0].wait(WAIT_S)
        wait_until(lambda: server.loop.num_waiting < 2)
        server.submit(params, sinks[4])
        for i in (1, 2, 4):
            sinks[i].wait(WAIT_S)
    assert [sink.num_finals for sink in sinks] == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("fail_at_step", [1, 4])
def test_the_loop_s_death_reaches_everyone_once(fail_at_step: int) -> None:
    """Two rows, so that two requests wait; one of them stays unread in the queue."""
    deaths: list[str] = []
    engine = fake_engine(max_sequences=2, fail_at_step=fail_at_step)
    sinks = [LocalSink() for _ in range(4)]
    server = fake_server(engine, on_failure=deaths.append)
    for i, sink in enumerate(sinks):
        server.submit(GenerateParams("hello", 30, stream=i % 2 == 0), sink)
    server.start()
    for sink in sinks:
        sink.wait(WAIT_S)
    wait_until(lambda: bool(deaths))
    with pytest.raises(RequestError, match="as asked") as caught:
        server.submit(GenerateParams("hello", 30), LocalSink())
    assert caught.value.code is ErrorCode.UNAVAILABLE
    server.stop()
    assert len(deaths) == 1
    assert "RuntimeError" in deaths[0]
    for sink in sinks:
        assert sink.num_finals == 1
        assert sink.error == (ErrorCode.INTERNAL, deaths[0])


def test_stopping_gives_everyone_a_final_and_leaves_nothing_behind() -> None:
    """Two decode, two wait; none of them could finish. Frozen objects are not looked through by
    the garbage collector; a thousand are far less than the libraries have."""
    threads = set(threading.enumerate())
    sinks = [LocalSink() for _ in range(4)]
    engine = fake_engine(max_sequences=2, step_s=0.01)
    with fake_serving(engine) as server:
        assert gc.get_freeze_count() > 1000
        assert len(set(threading.enumerate()) - threads) == 2
        for i, sink in enumerate(sinks):
            server.submit(GenerateParams("hello", 4000, stream=i % 2 == 0), sink)
        wait_until(lambda: server.loop.num_live == 2 and bool(server.loop.records))
    for sink in sinks:
        assert sink.num_finals == 1
        assert sink.error == (ErrorCode.UNAVAILABLE, "the server is shutting down")
    with pytest.raises(RequestError, match="shutting down"):
        server.submit(GenerateParams("hello", 5), LocalSink())
    with pytest.raises(RuntimeError, match="closed"):
        engine.target.submit([])
    assert gc.get_freeze_count() == 0
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("max_sequences", [1, 2])
def test_a_client_that_leaves_is_cancelled_alone(max_sequences: int) -> None:
    """Whether it waits for a row or is served."""
    sinks = [LocalSink(), LocalSink()]
    with fake_serving(fake_engine(max_sequences=max_sequences, step_s=0.001)) as server:
        for sink, num_tokens in zip(sinks, (100, 4000), strict=True):
            server.submit(GenerateParams("hello", num_tokens, policy="none"), sink)
        wait_until(lambda: server.loop.num_live == max_sequences)
        sinks[1].is_gone = True
        for sink in sinks:
            sink.wait(WAIT_S)
    assert sinks[0].text == expected_text("hello", 100)
    assert sinks[1].finish_reason is FinishReason.CANCELLED
    assert [sink.num_finals for sink in sinks] == [1, 1]


def test_seeds() -> None:
    """A drawn seed is returned, and gives the same text again."""
    asked = GenerateParams("hello", 12, temperature=1.0)
    with fake_serving(fake_engine()) as server:
        sinks = generate(server, [asked, asked, replace(asked, seed=0)], WAIT_S)
        sinks += generate(server, [replace(asked, seed=sinks[0].seed)], WAIT_S)
    first, second, given, again = (sink.seed for sink in sinks)
    assert (given, again) == (0, first)
    assert len({first, second, given}) == 3
    for sink in sinks:
        sampling = SamplingParams(temperature=1.0, seed=sink.seed)
        assert sink.text == expected_text("hello", 12, sampling)


def test_what_cannot_be_drafted_or_verified_runs_without_drafts() -> None:
    """An engine without proposers; and one that verifies greedy text only."""
    greedy = GenerateParams("hello", 20, policy="fixed:4")
    with fake_serving(replace(fake_engine(), proposers={})) as server:
        (sink,) = generate(server, [greedy], WAIT_S)
    assert (sink.progress.num_drafted, sink.text) == (0, expected_text("hello", 20))
    target = FakeTarget(replace(CAPABILITIES, verifies_sampling=False))
    with fake_serving(replace(fake_engine(), target=target)) as server:
        params = [greedy, replace(greedy, temperature=1.0, seed=3)]
        drafted, drawn = generate(server, params, WAIT_S)
    assert drafted.progress.num_drafted > 0
    assert drawn.progress.num_drafted == 0
    assert drawn.text == expected_text("hello", 20, SamplingParams(temperature=1.0, seed=3))


def test_a_drain_finishes_what_it_can_and_takes_no_more() -> None:
    """Within the grace of 20 s that is the default; asking twice changes nothing."""
    sink = LocalSink()
    with fake_serving(fake_engine(max_sequences=2, step_s=0.001)) as server:
        server.submit(GenerateParams("hello", 60, policy="none"), sink)
        server.drain()
        server.drain()
        with pytest.raises(RequestError, match="shutting down"):
            server.submit(GenerateParams("hello", 5), LocalSink())
        sink.wait(WAIT_S)
    assert sink.finish_reason is FinishReason.LENGTH
    assert sink.text == expected_text("hello", 60)


def test_a_drain_ends_what_lasts_too_long_and_is_asked_for_by_whoever_watches() -> None:
    """One row, 8 s of work, 50 ms of grace: the one that writes keeps its text, the one that waits
    has none to keep."""
    should_drain = threading.Event()
    limits = LIMITS.model_copy(update={"drain_s": 0.05})
    engine = fake_engine(max_sequences=1, step_s=0.002)
    sinks = [LocalSink(), LocalSink()]
    with fake_serving(engine, limits, should_drain=should_drain.is_set) as server:
        for sink in sinks:
            server.submit(GenerateParams("hello", 4000, stream=True, policy="none"), sink)
        wait_until(lambda: len(sinks[0].tokens) > 3)
        should_drain.set()
        for sink in sinks:
            sink.wait(WAIT_S)
    writing, waiting = sinks
    assert writing.finish_reason is FinishReason.CANCELLED
    assert writing.text == expected_text("hello", writing.num_tokens)
    assert waiting.error == (ErrorCode.UNAVAILABLE, "the server is shutting down")
    assert [sink.num_finals for sink in sinks] == [1, 1]


# Hangs and health checks


HURRIED = LIMITS.model_copy(update={"engine_timeout_s": 0.1})
HEALTH = GenerateParams("health", 1, health_check=True)


class SilentTarget(FakeTarget):
    """Polls return in time; from the third with work on, without an event of sequence 1."""

    def poll(self, timeout_s: float) -> list[Event]:
        held = self._in_flight.pop(1, None) if self.num_steps >= 2 else None
        events = super().poll(timeout_s)
        if held is not None:
            self._in_flight[1] = held
            time.sleep(0.001)
        return events


def hanging_engine(hanging: str, is_blocked: threading.Event, let_go: threading.Event) -> Engine:
    """In this method from the third step on, or without events. Sets is_blocked when it hangs."""
    engine = fake_engine()
    if hanging == "silent":
        is_blocked.set()
        return replace(engine, target=SilentTarget(CAPABILITIES))
    owner = engine.target if hanging == "poll" else engine.proposers[DRAFT_MODEL]
    works = getattr(owner, hanging)

    def blocked(argument: Any) -> Any:
        if engine.target.num_steps >= 2:
            is_blocked.set()
            let_go.wait(WAIT_S)
        return works(argument)

    setattr(owner, hanging, blocked)
    return engine


@pytest.mark.parametrize("hanging", ["poll", "propose", "silent"])
def test_a_hung_engine_fails_every_request_once_and_ends_the_server(hanging: str) -> None:
    """Nobody answers a health check while the engine hangs; then it has the reason."""
    deaths: list[str] = []
    is_blocked, let_go = threading.Event(), threading.Event()
    engine = hanging_engine(hanging, is_blocked, let_go)
    sinks = [LocalSink() for _ in range(3)]
    check = LocalSink()
    with fake_serving(engine, HURRIED, on_failure=deaths.append) as server:
        for i, sink in enumerate(sinks):
            server.submit(GenerateParams("hello", 4000, stream=i == 1, policy="fixed:2"), sink)
        is_blocked.wait(WAIT_S)
        server.submit(HEALTH, check)
        for sink in (*sinks, check):
            sink.wait(WAIT_S)
        wait_until(lambda: bool(deaths))
        assert server.failure == deaths[0]
        for params in (GenerateParams("hello", 5), HEALTH):
            with pytest.raises(RequestError, match="engine_timeout_s") as caught:
                server.submit(params, LocalSink())
            assert caught.value.code is ErrorCode.UNAVAILABLE
        let_go.set()
    assert len(deaths) == 1
    assert "limits.engine_timeout_s" in deaths[0]
    for sink in sinks:
        assert sink.error == (ErrorCode.INTERNAL, deaths[0])
        assert sink.num_finals == 1, "the loop came back, and answered again"
    expected = None if hanging == "silent" else (ErrorCode.UNAVAILABLE, deaths[0])
    assert (check.error, check.num_finals) == (expected, 1)


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


def test_health_checks_are_answered_by_the_loop_alone_and_bounded() -> None:
    """Not before it starts, and not in the queue of requests; then at its next turn, with an empty
    text."""
    server = fake_server(fake_engine(), LIMITS.model_copy(update={"max_queue": 1}))
    request = LocalSink()
    server.submit(GenerateParams("hello", 5), request)
    with pytest.raises(RequestError, match="the queue is full"):
        server.submit(GenerateParams("hello", 5), LocalSink())
    sinks = [LocalSink() for _ in range(MAX_CALLS)]
    for sink in sinks:
        server.submit(HEALTH, sink)
    with pytest.raises(RequestError, match="64 calls wait for the next step"):
        server.submit(HEALTH, LocalSink())
    assert {sink.num_finals for sink in sinks} == {0}
    server.start()
    for sink in (request, *sinks):
        sink.wait(WAIT_S)
    server.stop()
    assert {(sink.error, sink.text, sink.num_finals) for sink in sinks} == {(None, "", 1)}
    assert server.num_open == 0
