"""What a drain makes of a backend's beats. Real Tritons: `tests/test_triton_server.py`."""

from __future__ import annotations

import time

import pytest
from fake_backend import SILENCE, Backend

from smartspec_launch import link
from smartspec_launch.drain import Drained, drain
from smartspec_py.serving.link import Beat

WAIT_S = 10.0
BUSY = Beat(0, num_open=3, is_draining=True)
IDLE, ANSWERED, ENDED = Beat(0), Beat(0, is_draining=True), Beat(0, is_ended=True)
FAILED = Beat(0, num_open=3, failure="the step loop ended")


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([IDLE, BUSY, ANSWERED], Drained.ANSWERED),
        ([IDLE], Drained.LATE),
        ([BUSY], Drained.LATE),
        ([BUSY, ENDED], Drained.DEAD),
        ([BUSY, FAILED], Drained.DEAD),
        ([BUSY, SILENCE], Drained.DEAD),
    ],
    ids=["answered", "not draining", "busy", "unloaded", "failed", "does not respond"],
)
def test_a_drain_tells_how_it_ended(
    beats: list[Beat | None], expected: Drained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.5)
    wait_s = 1.0 if expected is Drained.LATE else WAIT_S
    with Backend(*beats) as backend:
        while backend.launcher.beat is None:
            backend.launcher.look(0.1)
        assert drain(backend.launcher, time.monotonic() + wait_s) is expected
        assert backend.is_asked.wait(WAIT_S)


def test_a_dead_backend_is_not_waited_for() -> None:
    with Backend(BUSY) as backend:
        while backend.launcher.beat is None:
            backend.launcher.look(0.1)
        backend.process.kill()
        assert drain(backend.launcher, time.monotonic() + WAIT_S) is Drained.DEAD
