"""The link between a launcher and the backend that it started: one pair of sockets.

tritonserver inherits the backend's end, and its Python process inherits it from tritonserver. The
environment variable LINK_VARIABLE has its descriptor. The link has no address, so other processes
cannot connect to it.

    backend to launcher     `Phase`, `Notice` and `News` during the start, then a `Beat` every
                            BEAT_S, all in JSON
    launcher to backend     DRAIN

If the launcher is killed, its end is closed. The backend then kills Triton's whole process group,
because no process supervises it any more. (PR_SET_PDEATHSIG of Linux is not used. It would also
kill Triton when only the launcher's thread that started it ends.)

This module is the backend's end. `smartspec_launch.link` is the launcher's end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smartspec_py.engines.phases import Phase

LINK_VARIABLE = "SMARTSPEC_LINK"
"""Environment variable `FD,PREFIX`: the inherited descriptor, and the prefix of the names of
Triton's shared memory regions."""

BEAT_S = 0.25

DRAIN = b"drain"
OWN = "smartspec_py."
"""The names of this package's loggers begin with it."""
SHM_FOLDER = Path("/dev/shm")
_MAX_BYTES = 65_536
_MAX_TEXT = 4000


@dataclass(frozen=True)
class Notice:
    """A warning of the start, for people."""

    text: str


@dataclass(frozen=True)
class News:
    """Why the start fails. is_refusal: it is one sentence about engine.json or a checkpoint."""

    error: str = ""
    is_refusal: bool = False


@dataclass(frozen=True)
class Beat:
    """A status message of the backend.

    pid: process ID of Triton's Python process. num_open: requests without a final response.
    failure: why the model no longer serves requests; empty while it serves. is_draining: new
    requests are refused. is_ended: Triton has unloaded the model, and the process is about to end.
    is_stopped: what it had to store is stored, so it may be killed.
    num_steps: steps of the loop, which go on without requests; see `smartspec_py.serving.liveness`.
    facts: what is served, for example `context_len` in tokens; see `Server.facts`.
    """

    pid: int
    num_open: int = 0
    failure: str = ""
    is_draining: bool = False
    is_ended: bool = False
    is_stopped: bool = False
    num_steps: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


class BackendEnd:
    """Sends beats and calls the callbacks, both from its own thread.

    status: returns the next beat; None if none is to be sent. on_drain: called if the launcher asks
    to accept no more requests. on_orphaned: called if the launcher has ended.
    """

    def __init__(
        self,
        fd: int,
        status: Callable[[], Beat | None],
        on_drain: Callable[[], None],
        on_orphaned: Callable[[], None],
    ) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._status, self._on_drain, self._on_orphaned = status, on_drain, on_orphaned
        self._is_ended = self._is_stopped = False
        threading.Thread(target=self._run, name="smartspec-link", daemon=True).start()

    def beat(self) -> None:
        """Send the next beat now. Any thread may call it."""
        beat = self._status()
        if beat is not None:
            self.send(beat)

    def end(self) -> None:
        """Send no more beats of `status`, because Triton finalizes the model. Closing a large
        engine can take a long time."""
        self._is_ended = True
        self.send(Beat(os.getpid(), is_ended=True))

    def stopped(self) -> None:
        """Send the last beat: nothing is left to do."""
        self.send(Beat(os.getpid(), is_ended=True, is_stopped=True))
        self._is_stopped = True

    def _run(self) -> None:
        with self._socket:
            while not self._is_stopped:
                if not self._is_ended:
                    self.beat()
                if not select.select([self._socket], [], [], BEAT_S)[0]:
                    continue
                message = received(self._socket)
                if message == DRAIN:
                    self._on_drain()
                elif not message:  # the launcher has ended
                    self._on_orphaned()
                    return

    def send(self, report: Beat | News | Notice | Phase) -> None:
        """Send a message now. Any thread may call it."""
        fields = {
            name: value[-_MAX_TEXT:] if isinstance(value, str) else value
            for name, value in asdict(report).items()
        }
        message = json.dumps([type(report).__name__.lower(), fields])
        with contextlib.suppress(OSError):  # the launcher is suspended or has ended
            self._socket.send(message.encode(), socket.MSG_DONTWAIT)


def report_of(record: logging.LogRecord) -> Phase | Notice | None:
    """What a record of the log tells people during the start. Those of other packages are for
    developers."""
    phase: Phase | None = getattr(record, "phase", None)
    if phase is None and record.levelno == logging.WARNING and record.name.startswith(OWN):
        return Notice(record.getMessage())
    return phase


def received(source: socket.socket) -> bytes:
    """The next message; empty if the other end is closed, even if it had unread messages."""
    try:
        return source.recv(_MAX_BYTES)
    except ConnectionResetError:
        return b""


def inherited_link(
    status: Callable[[], Beat | None], on_drain: Callable[[], None]
) -> BackendEnd | None:
    """The backend's end; None if this Triton was not started by a launcher."""
    value = os.environ.pop(LINK_VARIABLE, None)
    if value is None:
        return None
    # The launcher blocks it in Triton, and this stub ignores it. Child processes should not.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    fd, _, prefix = value.partition(",")
    return BackendEnd(int(fd), status, on_drain, lambda: _end_group(prefix))


def _end_group(shm_prefix: str) -> None:
    """Remove Triton's shared memory, then kill tritonserver and this process. They share a process
    group."""
    remove_shared_memory(shm_prefix)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def remove_shared_memory(prefix: str) -> None:
    """Remove Triton's shared memory regions whose names have this prefix."""
    for region in SHM_FOLDER.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
