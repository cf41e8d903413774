"""What is killed or hangs under load ends the launcher with 1, every stream visibly, and leaves
nothing. Times are limits against a hang."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import (
    EXIT_S,
    Served,
    faulted,
    kill_gateway,
    kill_launcher,
    kill_stub,
    kill_triton,
    serve,
    stop_stub,
)

from smartspec_bench.streams import HttpStreams, ask_alone

pytestmark = pytest.mark.triton

LIMIT_S = 8.0
"""Far below the 35 s that a stop may take, above what a busy machine adds to two seconds."""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (kill_stub, "has died."),
        (stop_stub, "has not responded for 1.5 s."),
        (kill_triton, "Triton ended with exit code 137."),
        (kill_gateway, "The gateway ended with exit code 137."),
    ],
)
def test_a_fault_ends_the_launcher_and_every_stream(
    tmp_path: Path, fault: Callable[[Served], object], words: str
) -> None:
    result = faulted(serve(tmp_path), fault)
    assert result.code == 1
    assert words in result.said
    assert "Traceback" not in result.said
    assert result.exit_s < LIMIT_S
    assert not [end for end in result.streams if end.endswith(("hangs", "length"))]
    assert result.left == []


def test_a_launcher_that_is_killed_takes_its_triton_with_it(tmp_path: Path) -> None:
    """And the same run directory serves again at once."""
    result = faulted(serve(tmp_path), kill_launcher)
    assert result.code == -signal.SIGKILL
    assert not [end for end in result.streams if end.endswith(("hangs", "length"))]
    assert result.left == []
    again = serve(tmp_path)
    again.launcher.send_signal(signal.SIGTERM)
    _, said = again.launcher.communicate(timeout=EXIT_S)
    assert again.launcher.returncode == 0, said


def test_a_hung_engine_fails_the_streams_with_its_reason(tmp_path: Path) -> None:
    """A step of 10 s, where 1 s is allowed: the loop's own thread is inside of the engine."""
    served = serve(tmp_path, {"engine_timeout_s": 1.0}, step_s=10.0)
    result = faulted(served, lambda served: None, num_streams=2)
    assert result.code == 1
    assert "The model has stopped: a step takes longer" in result.said
    assert all("limits.engine_timeout_s" in end for end in result.streams), result.streams
    assert result.left == []


def test_a_stop_while_the_backend_stands_still_does_not_wait_for_it(tmp_path: Path) -> None:
    served = serve(tmp_path)
    ask_alone(HttpStreams(served.address.http_url), {"text_input": "a", "max_tokens": 1})
    stop_stub(served)
    start = time.monotonic()
    served.launcher.send_signal(signal.SIGTERM)
    _, said = served.launcher.communicate(timeout=EXIT_S)
    assert time.monotonic() - start < LIMIT_S
    assert served.launcher.returncode == 1, said
