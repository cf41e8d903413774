"""The launcher's end of the link to the backend; see `smartspec_py.serving.link`.

It watches two counts of the backend by the rule of `smartspec_py.serving.liveness`: the messages of
the process, and the steps of its loop.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time

from smartspec_py.config import LimitsConfig
from smartspec_py.engines.phases import Phase
from smartspec_py.serving.link import DRAIN, Beat, News, received
from smartspec_py.serving.liveness import ProgressWatch, has_ended

LOOK_S = 0.1
REPORT_S = 5.0
"""Time in which the backend reports that its own loop hangs, and answers its requests."""


class LauncherEnd:
    """The launcher's view of the backend process. Used by one thread."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._socket, self._child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._num_messages = 0
        self._messages = ProgressWatch(limits.hang_s)
        self._steps = ProgressWatch(limits.engine_timeout_s + REPORT_S)
        self._is_closed = False
        self._is_dead = False
        self.beat: Beat | None = None
        """The newest beat; None before the model has been loaded."""

        self.phase = Phase("starting Triton")
        """How far the start is."""

        self.notices: list[str] = []
        """Warnings of the start, in their order."""

        self.news = News()
        """Why the start fails."""

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
            self._receive()
        now = time.monotonic()
        self._messages.look(self._num_messages, now)
        if self.beat is not None:
            self._steps.look(self.beat.num_steps, now)
            # Triton holds the link too, so the end of the process does not close it.
            self._is_dead = self._is_dead or has_ended(self.beat.pid)

    @property
    def trouble(self) -> str | None:
        """One sentence that says why the backend cannot serve; None while it can."""
        name = f"Triton's Python process (pid {self.beat.pid})" if self.beat else "The backend"
        if self.beat is not None and self.beat.failure:
            return f"The model has stopped: {self.beat.failure}"
        if self.beat is not None and self.beat.is_ended:
            return "The model has been unloaded."
        if self._is_dead or self._is_closed:
            return f"{name} has died."
        if self._messages.is_hung:
            return f"{name} hangs: no message for {self._messages.limit_s:g} s (limits.hang_s)."
        if self._steps.is_hung:
            return f"{name} hangs: no step for {self._steps.limit_s:g} s (limits.engine_timeout_s)."
        return None

    def ask_to_drain(self) -> None:
        """Ask the backend to take no more requests. A SIGTERM to Triton would not reach it."""
        with contextlib.suppress(OSError):  # the backend has ended or does not read
            self._socket.send(DRAIN)

    @property
    def is_drained(self) -> bool:
        """Whether the backend takes no more requests, and each has its last response."""
        return self.beat is not None and self.beat.is_draining and self.beat.num_open == 0

    @property
    def is_stopped(self) -> bool:
        """Whether the backend has nothing left to do, so that its process may be killed."""
        return self.beat is not None and self.beat.is_stopped

    def wait_gone(self, timeout_s: float) -> None:
        """Wait up to timeout_s until all processes that hold the link have ended."""
        deadline = time.monotonic() + timeout_s
        while not self._is_closed and time.monotonic() < deadline:
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
                    self._is_closed = True
                    return
                self._num_messages += 1
                kind, fields = json.loads(message)
                if kind == "phase":
                    self.phase = Phase(**fields)
                elif kind == "notice":
                    self.notices.append(fields["text"])
                elif kind == "news":
                    self.news = News(**fields)
                elif self.beat is None or not self.beat.is_ended or fields["is_ended"]:
                    # After the end, a beat can come that another thread began earlier.
                    self.beat = Beat(**fields)
