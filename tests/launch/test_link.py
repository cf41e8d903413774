"""The link: each end detects that the other died, stopped or is only suspended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from fake_backend import SILENCE, Backend

from smartspec_launch import link
from smartspec_launch.link import LauncherEnd
from smartspec_py.serving.link import LINK_VARIABLE, Beat, News, inherited_link

WAIT_S = 10.0
BEAT = Beat(0, num_open=2)


def look_until(launcher: LauncherEnd, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        launcher.look(0.02)


def test_beats_arrive_with_all_they_say() -> None:
    said = Beat(0, 7, "the loop ended", is_draining=True, facts={"context_len": 512})
    with Backend(said) as backend:
        launcher = backend.launcher
        look_until(launcher, lambda: launcher.beat is not None)
        assert launcher.beat == replace(said, pid=backend.pid)
        assert launcher.trouble == "The model has stopped: the loop ended"


BUSY = Beat(0, num_open=3, is_draining=True)
IDLE, ANSWERED, ENDED = Beat(0), Beat(0, is_draining=True), Beat(0, is_ended=True)
FAILED = Beat(0, num_open=3, failure="the step loop ended")


@pytest.mark.parametrize(
    ("beats", "is_answered", "trouble"),
    [
        ([IDLE, BUSY, ANSWERED], True, None),
        ([IDLE], False, None),
        ([BUSY], False, None),
        ([BUSY, ENDED], False, "unloaded"),
        ([BUSY, FAILED], False, "the step loop ended"),
        ([BUSY, SILENCE], False, "has died or hangs"),
    ],
    ids=["answered", "not draining", "busy", "unloaded", "failed", "does not respond"],
)
def test_a_drain_tells_how_it_ended(
    beats: list[Beat | None],
    is_answered: bool,
    trouble: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real Tritons: `tests/test_triton_server.py`."""
    monkeypatch.setattr(link, "SILENT_S", 0.5)
    with Backend(*beats) as backend:
        launcher = backend.launcher
        look_until(launcher, lambda: launcher.beat is not None)
        assert launcher.drain(WAIT_S if is_answered or trouble else 1.0) == is_answered
        assert backend.is_asked.wait(WAIT_S)
        assert (trouble or "None") in str(launcher.trouble)


def test_the_start_is_told() -> None:
    """The newest message, and the reason of a failure."""
    with Backend(SILENCE) as backend:
        launcher = backend.launcher
        for news in (News("imported"), News("loaded")):
            backend.end.send(news)
            look_until(launcher, lambda news=news: launcher.news == news)
        assert launcher.beat is None
        backend.end.send(News(error="x" * 99_999 + "why"))
        look_until(launcher, lambda: launcher.news.error.endswith("why"))


def test_a_beat_behind_the_last_one_changes_nothing() -> None:
    """The backend's thread may have begun it before Triton finalized the model."""
    with Backend(BEAT) as backend:
        launcher = backend.launcher
        look_until(launcher, lambda: launcher.beat is not None)
        backend.end.send(Beat(backend.pid, is_ended=True))
        backend.end.send(BEAT)
        look_until(launcher, lambda: launcher.trouble is not None)
        launcher.look(0.1)
        assert launcher.trouble == "The model has been unloaded."


def test_a_launcher_that_was_suspended_takes_nobody_for_dead() -> None:
    """It did not look for longer than SILENT_S by the clock."""
    with Backend(BEAT) as backend:
        launcher = backend.launcher
        look_until(launcher, lambda: launcher.beat is not None)
        time.sleep(link.SILENT_S + 0.3)
        launcher.look(0.1)
        assert launcher.trouble is None


def test_a_launcher_that_never_looks_does_not_block_the_backend() -> None:
    with Backend(BEAT) as backend:
        for _ in range(5000):
            backend.end.send(BEAT)
        look_until(backend.launcher, lambda: backend.launcher.beat is not None)
        assert backend.launcher.trouble is None


def test_a_launcher_that_dies_with_beats_unread_is_noticed() -> None:
    with Backend(BEAT) as backend:
        for _ in range(3):
            backend.end.beat()
        backend.launcher.close()
        assert backend.is_orphaned.wait(WAIT_S)


def test_a_backend_that_dies_with_a_request_unread_is_noticed() -> None:
    launcher = LauncherEnd()
    launcher.drain(0.0)
    launcher.hand_over()
    look_until(launcher, lambda: launcher.trouble is not None)
    launcher.close()


def test_where_every_holder_has_ended_the_backend_is_dead() -> None:
    launcher = LauncherEnd()
    launcher.hand_over()
    launcher.look(1.0)
    assert launcher.trouble == "The backend has died."
    launcher.close()


def test_a_triton_that_no_launcher_started_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINK_VARIABLE, raising=False)
    assert inherited_link(lambda: None, lambda: None) is None
