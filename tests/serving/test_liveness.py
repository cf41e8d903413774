"""The rule for dead and hung, with times as arguments."""

from __future__ import annotations

import subprocess
import sys

from smartspec_py.serving.liveness import MAX_GAP_S, ProgressWatch, has_ended

LIMIT_S = 60.0


def looked(watch: ProgressWatch, count: int, start_s: int, end_s: int) -> ProgressWatch:
    """Look at the same count once per second."""
    for second in range(start_s, end_s):
        watch.look(count, float(second))
    return watch


def test_a_pause_below_the_limit_is_no_hang_and_progress_starts_it_again() -> None:
    """59 s without progress twice; then 60 s."""
    watch = ProgressWatch(LIMIT_S)
    assert not looked(watch, 7, 0, 60).is_hung
    assert not looked(watch, 8, 60, 120).is_hung
    watch.look(8, 120.0)
    assert watch.is_hung
    watch.look(9, 121.0)
    assert not watch.is_hung


def test_time_in_which_the_watcher_was_suspended_does_not_count() -> None:
    """An hour counts MAX_GAP_S."""
    watch = ProgressWatch(LIMIT_S)
    looked(watch, 7, 0, 10)
    watch.look(7, 3609.0)
    assert not watch.is_hung
    rest_s = int(LIMIT_S - 9 - MAX_GAP_S)
    assert not looked(watch, 7, 3610, 3609 + rest_s).is_hung
    watch.look(7, 3609.0 + rest_s)
    assert watch.is_hung


def test_a_process_has_ended_when_it_is_a_zombie_or_gone() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert not has_ended(process.pid)
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b""  # closed: it is a zombie, because nobody waited
        while not has_ended(process.pid):
            assert process.returncode is None
    assert has_ended(process.pid)
