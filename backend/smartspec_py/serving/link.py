"""The link between a launcher and the backend that it started: one pair of sockets.

tritonserver inherits the backend's end, and its Python process from it; LINK_VARIABLE names it. It
has no address and no key, so that nobody else can use it.

    backend to launcher     a `Beat`, every BEAT_S
    launcher to backend     DRAIN

A launcher that is killed closes its end; the backend then ends Triton's whole process group, which
nobody would watch or stop any more. (Linux could do that as well, by PR_SET_PDEATHSIG, but would
also do it when the thread ends that started Triton.)

This is the backend's end; `smartspec_launch.link` has the launcher's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

LINK_VARIABLE = "SMARTSPEC_LINK"
"""`FD,PREFIX`: the inherited descriptor, and how the names of Triton's shared memory begin."""

BEAT_S = 0.25

DRAIN = b"drain"
SHM_FOLDER = Path("/dev/shm")
_MAX_BYTES = 65_536
_MAX_FAILURE = 2000


@dataclass(frozen=True)
class Beat:
    """pid: of Triton's Python process. num_open: requests whose last response was not sent yet.
    failure: why the model left service; empty while it serves. is_ended: Triton has
    let go of the model, and the process is about to end."""

    pid: int
    num_open: int = 0
    failure: str = ""
    is_ended: bool = False


class BackendEnd:
    """Beats from a thread of its own, and calls back from it.

    status: the next beat; None sends none. on_drain: the launcher wants no more requests.
    on_orphaned: the launcher is gone; given how the names of Triton's shared memory begin.
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
        self._is_ended = False
        threading.Thread(target=self._run, name="smartspec-link", daemon=True).start()

    def beat(self) -> None:
        """Send the next beat now; any thread may."""
        beat = self._status()
        if beat is not None:
            self._send(beat)

    def end(self) -> None:
        """Say that Triton finalizes the model. To close big engines can take long, in silence."""
        self._send(Beat(os.getpid(), is_ended=True))
        self._is_ended = True

    def _run(self) -> None:
        with self._socket:
            while not self._is_ended:
                self.beat()
                if select.select([self._socket], [], [], BEAT_S)[0] and not self._receive():
                    self._on_orphaned()
                    return

    def _receive(self) -> bool:
        """Whether the launcher is there."""
        message = received(self._socket)
        if message == DRAIN:
            self._on_drain()
        return bool(message)

    def _send(self, beat: Beat) -> None:
        text = json.dumps(asdict(beat) | {"failure": beat.failure[:_MAX_FAILURE]})
        with contextlib.suppress(OSError):  # a launcher that is suspended, or gone
            self._socket.send(text.encode(), socket.MSG_DONTWAIT)


def received(source: socket.socket) -> bytes:
    """The next message; empty where the other end is closed, with or without messages unread."""
    try:
        return source.recv(_MAX_BYTES)
    except ConnectionResetError:
        return b""


def inherited_link(
    status: Callable[[], Beat | None], on_drain: Callable[[], None]
) -> BackendEnd | None:
    """The backend's end; None where no launcher started this Triton."""
    value = os.environ.pop(LINK_VARIABLE, None)
    if value is None:
        return None
    fd, _, prefix = value.partition(",")
    return BackendEnd(int(fd), status, on_drain, lambda: _end_group(prefix))


def _end_group(shm_prefix: str) -> None:
    """tritonserver and this process, which share a group of their own."""
    remove_shared_memory(shm_prefix)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def remove_shared_memory(prefix: str) -> None:
    """Triton's regions of that name."""
    for region in SHM_FOLDER.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
