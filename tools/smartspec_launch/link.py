"""The launcher's end of the link to the backend; see `smartspec_py.serving.link`."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time

from smartspec_py.serving.link import DRAIN, Beat, News, received

LOOK_S = 0.1
SILENT_S = 1.5
"""A process that sends nothing for this time has died or hangs. Triton 2.51 aborts if its Python
process does not respond for about the same time and a request arrives."""


class LauncherEnd:
    """The launcher's view of the backend process. Used by one thread."""

    def __init__(self) -> None:
        self._socket, self._child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._silent_s = 0.0
        self._is_dead = False
        self.beat: Beat | None = None
        """The newest beat; None before the model has been loaded."""

        self.news = News()
        """The newest message of the start."""

    @property
    def child_fd(self) -> int:
        """The descriptor of the backend's end, which tritonserver inherits."""
        return self._child.fileno()

    def hand_over(self) -> None:
        """Close this process's copy of the backend's end, after tritonserver has inherited it."""
        self._child.close()

    def look(self, timeout_s: float) -> None:
        """Wait up to timeout_s for the next message."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if poller.poll(timeout_s * 1e3):
            self._silent_s = 0.0
            self._receive()
        else:
            # The time spent in poll, not clock time: the launcher may be suspended.
            self._silent_s += timeout_s

    @property
    def trouble(self) -> str | None:
        """One sentence that says why the backend cannot serve; None while it can."""
        name = f"Triton's Python process (pid {self.beat.pid})" if self.beat else "The backend"
        if self.beat is not None and self.beat.failure:
            return f"The model has stopped: {self.beat.failure}"
        if self.beat is not None and self.beat.is_ended:
            return "The model has been unloaded."
        if self._is_dead:
            return f"{name} has died."
        if self._silent_s >= SILENT_S:
            return f"{name} has died or hangs."
        return None

    def drain(self, timeout_s: float) -> bool:
        """Ask the backend to take no more requests, and wait up to timeout_s until each has its
        last response. Returns whether that is so. There is no wait for a backend in trouble.

        A SIGTERM to Triton alone would not reach the backend.
        """
        with contextlib.suppress(OSError):  # the backend has ended or does not read
            self._socket.send(DRAIN)
        deadline = time.monotonic() + timeout_s
        while self.trouble is None and time.monotonic() < deadline:
            if self.beat is not None and self.beat.is_draining and self.beat.num_open == 0:
                return True
            self.look(LOOK_S)
        return False

    def wait_gone(self, timeout_s: float) -> None:
        """Wait up to timeout_s until all processes that hold the link have ended."""
        deadline = time.monotonic() + timeout_s
        while not self._is_dead and time.monotonic() < deadline:
            self.look(LOOK_S)

    def close(self) -> None:
        """Close the link. Idempotent."""
        self._socket.close()
        self._child.close()

    def _receive(self) -> None:
        """Read all waiting messages. The link ends when all processes that hold it have ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message = received(self._socket)
                if not message:
                    self._is_dead = True
                    return
                kind, fields = json.loads(message)
                if kind == "news":
                    self.news = News(**fields)
                elif self.beat is None or not self.beat.is_ended:
                    # After the last beat, one can come that another thread began earlier.
                    self.beat = Beat(**fields)
