"""Explanations: off unless configured, and bounded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import LIMITS, fake_engine

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.serving import step_trace as module
from smartspec_py.serving.request import ErrorCode, RequestError
from smartspec_py.serving.server import Server
from smartspec_py.serving.step import StepRecord
from smartspec_sim.traces import parse_steps
from smartspec_testing.engines import FakeEngineConfig
from smartspec_testing.local import LocalSink, generate

WAIT_S = 60.0


def ask(num_steps: int = 1024) -> GenerateParams:
    return GenerateParams(text="-", max_tokens=1, explain_steps=num_steps)


def server_of(**options: bool) -> Server:
    engine = FakeEngineConfig(kind="fake", tokenizer="unused")
    return Server(fake_engine(), ServerConfig(engine=engine, limits=LIMITS, **options))


@pytest.fixture
def server() -> Iterator[Server]:
    """It has served a request, and explains."""
    served = server_of(explain=True)
    served.start()
    generate(served, [GenerateParams(text="a prompt", max_tokens=30)])
    yield served
    served.stop()


def explained(server: Server, num_steps: int = 1024) -> list[StepRecord]:
    (sink,) = generate(server, [ask(num_steps)], WAIT_S)
    return parse_steps("server", sink.last.explanation)


def test_without_the_setting_it_is_refused() -> None:
    with pytest.raises(RequestError, match="explain_steps: got 1024, must be left out: this ser"):
        server_of().submit(ask(), LocalSink())


def test_the_newest_steps_up_to_a_number_and_a_size(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = explained(server)
    planned = [record for record in server.loop.records if record.batch_size]
    assert [step.decision.plan for step in steps] == [one.decision.plan for one in planned]
    assert all(step.decision.views for step in steps)
    assert explained(server, 2) == steps[-2:]
    num_bytes = sum(len(module.step_line(step)) for step in planned[-3:])
    monkeypatch.setattr(module, "MAX_BYTES", num_bytes)
    assert explained(server) == steps[-3:]


def test_a_server_that_stops_answers_with_an_error() -> None:
    served, sink = server_of(explain=True), LocalSink()
    served._inbox.close("it stops")
    with pytest.raises(RequestError, match="it stops") as caught:
        served.submit(ask(), sink)
    assert caught.value.code is ErrorCode.UNAVAILABLE
