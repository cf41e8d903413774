"""Explanations beside a loop that goes on: off unless configured, one at a time, bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from harness import COST, LIMITS, fake_engine

from smartspec_py.config import ServerConfig
from smartspec_py.serving import step_trace as module
from smartspec_py.serving.request import ErrorCode, GenerateParams, RequestError
from smartspec_py.serving.server import Server
from smartspec_py.serving.step_trace import step_line
from smartspec_sim.traces import parse_steps
from smartspec_testing.engines import FakeEngineConfig
from smartspec_testing.local import LocalSink, generate

WAIT_S = 20.0
ASK = GenerateParams(text="-", max_tokens=1, explain_steps=1024)
TEXT = GenerateParams(text="a prompt", max_tokens=30)


def server_of(**options: Any) -> Server:
    config = ServerConfig(
        engine=FakeEngineConfig(kind="fake", tokenizer="unused"), limits=LIMITS, **options
    )
    return Server(fake_engine(), config)


@pytest.fixture
def server() -> Iterator[Server]:
    """It has served a request, and explains."""
    served = server_of(explain=True)
    served.start()
    generate(served, [TEXT])
    yield served
    served.stop()


class Gate:
    """Holds the explainer at its first step until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr(module, "step_line", self._line)

    def _line(self, step: Any) -> str:
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        return step_line(step)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def ask(server: Server, params: GenerateParams = ASK) -> LocalSink:
    sink = LocalSink()
    server.submit(params, sink)
    return sink


def test_without_the_setting_it_is_refused() -> None:
    server = server_of()
    with pytest.raises(RequestError, match="explain_steps: got 1024, must be left out: this ser"):
        server.submit(ASK, LocalSink())


def test_the_loop_goes_on_while_an_explanation_is_made(server: Server, gate: Gate) -> None:
    """`submit` returns at once, and a request is served from beginning to end meanwhile."""
    asked = ask(server)
    assert gate.reached.wait(WAIT_S)
    (served,) = generate(server, [TEXT])
    assert served.num_tokens == 30
    assert asked.num_finals == 0
    gate.opened.set()
    asked.wait(WAIT_S)
    trace = parse_steps("server", asked.trace)
    assert trace.steps
    assert all(step.decision.views for step in trace.steps)


def test_a_second_one_is_refused_until_the_first_has_ended(server: Server, gate: Gate) -> None:
    first = ask(server)
    second = ask(server)
    second.wait(WAIT_S)
    assert second.error is not None
    assert second.error[0] is ErrorCode.UNAVAILABLE
    assert "another explanation" in second.error[1]
    gate.opened.set()
    first.wait(WAIT_S)
    while True:  # the answer leaves just before the thread ends
        again = ask(server)
        again.wait(WAIT_S)
        if again.error is None:
            break
    assert again.trace == first.trace


def test_an_answer_is_bounded_in_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all steps the newest are kept."""
    whole = ask(server)
    whole.wait(WAIT_S)
    steps = parse_steps("server", whole.trace).steps
    num_bytes = sum(len(step_line(step)) for step in steps[-3:])
    monkeypatch.setattr(module, "MAX_BYTES", num_bytes)
    explainer = module.Explainer(COST, server.loop.controller.settings.batch_table)
    text = explainer.trace([r for r in server.loop.records if r.batch_size])
    assert text is not None
    assert parse_steps("server", text).steps == steps[-3:]


def test_a_stop_ends_it_with_an_error(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    served = server_of(explain=True)
    served.start()
    generate(served, [TEXT])
    asked = ask(served)
    assert gate.reached.wait(WAIT_S)
    monkeypatch.setattr(module, "REST", 1e6)
    stopping = threading.Thread(target=served.stop)
    stopping.start()
    gate.opened.set()
    asked.wait(WAIT_S)
    stopping.join(WAIT_S)
    assert asked.error == (ErrorCode.UNAVAILABLE, "the server is shutting down")


def test_a_closed_server_answers_at_once() -> None:
    """What was asked before the loop took it is refused by whoever closes the inbox."""
    served = server_of(explain=True)
    asked = ask(served)
    served.start()
    served.stop()
    asked.wait(WAIT_S)
    assert asked.num_finals == 1
