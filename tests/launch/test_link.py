"""The link: each end detects that the other died, stopped or is only suspended."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_backend import SILENCE, Backend

from smartspec_launch import link
from smartspec_launch.link import LauncherEnd
from smartspec_py.config import LimitsConfig
from smartspec_py.engines.phases import Phase
from smartspec_py.serving.link import LINK_VARIABLE, Beat, News, Notice, inherited_link, report_of

WAIT_S = 60.0
BEAT = Beat(os.getpid(), num_open=2)


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
        assert replace(launcher.beat, num_steps=0) == replace(said, pid=backend.pid)
        assert launcher.trouble == "The model has stopped: the loop ended"


IDLE, ANSWERED, ENDED = Beat(0), Beat(0, is_draining=True), Beat(0, is_ended=True)
FAILED = Beat(0, num_open=3, failure="the step loop ended")


@pytest.mark.parametrize(
    ("beat", "is_drained"),
    [(IDLE, False), (Beat(0, num_open=3, is_draining=True), False), (ANSWERED, True)],
)
def test_a_drain_ends_when_the_backend_takes_no_more_and_has_answered_all(
    beat: Beat, is_drained: bool
) -> None:
    """Real Tritons: `tests/test_triton_server.py`."""
    with Backend(beat) as backend:
        launcher = backend.launcher
        look_until(launcher, lambda: launcher.beat is not None)
        launcher.ask_to_drain()
        assert backend.is_asked.wait(WAIT_S)
        assert launcher.is_drained == is_drained


@pytest.mark.parametrize(
    ("beat", "trouble"), [(ENDED, "has been unloaded."), (FAILED, "stopped: the step loop ended")]
)
def test_the_trouble_that_a_beat_tells(beat: Beat, trouble: str) -> None:
    with Backend(beat) as backend:
        launcher = backend.launcher
        look_until(launcher, lambda: launcher.trouble is not None)
        assert str(launcher.trouble).endswith(trouble)


def test_a_backend_hangs_only_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """59 s without a message, as while another thread holds Python's lock, are no hang."""
    now = 0.0
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: now))
    with Backend(BEAT, SILENCE) as backend:
        launcher = backend.launcher
        launcher.look(WAIT_S)
        assert launcher.beat is not None
        for _ in range(59):
            now += 1.0
            launcher.look(0.0)
        assert launcher.trouble is None
        now += 1.0
        launcher.look(0.0)
        assert launcher.trouble == (
            f"Triton's Python process (pid {backend.pid}) hangs: no message for 60 s "
            "(limits.hang_s)."
        )


def test_a_loop_that_stands_still_is_noticed_although_beats_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the time in which the backend itself should have reported it."""
    monkeypatch.setattr(link, "REPORT_S", 0.0)
    with Backend(BEAT, limits=LimitsConfig(engine_timeout_s=1.0), is_stuck=True) as backend:
        launcher = backend.launcher
        look_until(launcher, lambda: launcher.trouble is not None)
        assert "hangs: no step for 1 s (limits.engine_timeout_s)" in str(launcher.trouble)


def test_a_process_that_ends_is_dead_at_once_although_triton_holds_its_link() -> None:
    """This process holds the link, as Triton does."""
    with Backend(SILENCE) as backend, subprocess.Popen(["sleep", "60"]) as process:
        launcher = backend.launcher
        backend.end.send(Beat(process.pid))
        look_until(launcher, lambda: launcher.beat is not None)
        assert launcher.trouble is None
        process.kill()
        look_until(launcher, lambda: launcher.trouble is not None)
        assert launcher.trouble == f"Triton's Python process (pid {process.pid}) has died."


def test_the_start_is_told() -> None:
    """The newest phase, all warnings, and the reason of a failure."""
    with Backend(SILENCE) as backend:
        launcher = backend.launcher
        assert launcher.phase == Phase("starting Triton")
        for phase in (Phase("reading weights", 0.5, 1000), Phase("measuring costs")):
            backend.end.send(phase)
            look_until(launcher, lambda phase=phase: launcher.phase == phase)
        for text in ("the machine is busy", "the profile cannot be stored"):
            backend.end.send(Notice(text))
        look_until(launcher, lambda: len(launcher.notices) == 2)
        assert launcher.notices == ["the machine is busy", "the profile cannot be stored"]
        assert launcher.beat is None
        backend.end.send(News(error="x" * 99_999 + "why"))
        look_until(launcher, lambda: launcher.news.error.endswith("why"))


@pytest.mark.parametrize(
    ("name", "level", "extra", "report"),
    [
        ("smartspec_py.engines.profile", logging.WARNING, {}, Notice("3 of 4")),
        ("smartspec_py.engines.profile", logging.INFO, {}, None),
        ("transformers.modeling_utils", logging.WARNING, {}, None),
        ("smartspec_py.engines.phases", logging.DEBUG, {"phase": Phase("x")}, Phase("x")),
    ],
)
def test_phases_and_own_warnings_are_for_people(
    name: str, level: int, extra: dict[str, Phase], report: Phase | Notice | None
) -> None:
    record = logging.getLogger(name).makeRecord(
        name, level, "f.py", 1, "%d of %d", (3, 4), None, extra=extra
    )
    assert report_of(record) == report


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
        assert not launcher.is_stopped


def test_a_backend_that_has_stored_all_says_so() -> None:
    with Backend(BEAT) as backend:
        backend.end.end()
        look_until(backend.launcher, lambda: backend.launcher.trouble is not None)
        assert not backend.launcher.is_stopped
        backend.end.stopped()
        look_until(backend.launcher, lambda: backend.launcher.is_stopped)
        backend.is_orphaned.set()  # it listens no more


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
    launcher = LauncherEnd(LimitsConfig())
    launcher.ask_to_drain()
    launcher.hand_over()
    look_until(launcher, lambda: launcher.trouble is not None)
    launcher.close()


def test_where_every_holder_has_ended_the_backend_is_dead() -> None:
    launcher = LauncherEnd(LimitsConfig())
    launcher.hand_over()
    launcher.look(1.0)
    assert launcher.trouble == "The backend has died."
    launcher.close()


def test_a_triton_that_no_launcher_started_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINK_VARIABLE, raising=False)
    assert inherited_link(lambda: None, lambda: None) is None
