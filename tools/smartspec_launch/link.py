"""The launcher's end of the link to the backend; see `smartspec_py.serving.link`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time

from smartspec_py.serving.link import DRAIN, Beat, News, received

LOOK_S = 0.1
SILENT_S = 1.5
"""A process that sends nothing for this time counts as stopped. Triton 2.51 aborts if its Python
process does not respond for about the same time and a request arrives."""


class LauncherEnd:
    """The launcher's view of the backend process. Used by one thread."""

    def __init__(self) -> None:
        self._socket, self._child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._pidfd: int | None = None
        self._silent_s = 0.0
        self._is_dead = False
        self.beat: Beat | None = None
        """The newest beat; None before the model has been loaded."""

        self.news = News()
        """The newest message of the start."""

        self.phases: dict[str, float] = {}
        """Seconds of each phase of the start that has ended, in order."""

        self._phase_s = time.monotonic()

    @property
    def child_fd(self) -> int:
        """The descriptor of the backend's end, which tritonserver inherits."""
        return self._child.fileno()

    def hand_over(self) -> None:
        """Close this process's copy of the backend's end, after tritonserver has inherited it."""
        self._child.close()

    def look(self, timeout_s: float) -> None:
        """Wait up to timeout_s for the next beat or the end of the process."""
        poller = select.poll()
        for source in (self._socket.fileno(), self._pidfd):
            if source is not None:
                poller.register(source, select.POLLIN)
        ready = [source for source, _ in poller.poll(timeout_s * 1e3)]
        # Counts the time spent in poll, not clock time: the launcher or the machine may be
        # suspended.
        self._silent_s = 0.0 if ready else self._silent_s + timeout_s
        self._is_dead |= self._pidfd in ready
        if self._socket.fileno() in ready:
            self._receive()

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
            return f"{name} has not responded for {SILENT_S:g} s."
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
        """Wait up to timeout_s until the process has ended."""
        if self._pidfd is not None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(timeout_s * 1e3)

    def close(self) -> None:
        """Close the link. Idempotent."""
        self._socket.close()
        self._child.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _receive(self) -> None:
        """Read all waiting beats. The stream ends when every process that holds it has ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message = received(self._socket)
                if not message:
                    self._is_dead = True
                    return
                kind, fields = json.loads(message)
                if kind == "news":
                    self._note(News(**fields))
                    continue
                if self.beat is not None and self.beat.is_ended:
                    continue  # another thread of the backend began this beat earlier
                is_first = self.beat is None
                self.beat = Beat(**fields)
                if is_first:
                    self._open_process(self.beat.pid)

    def _note(self, news: News) -> None:
        self.news = news
        if news.phase:
            self.end_phase(news.phase)

    def end_phase(self, name: str) -> None:
        """Count the time since the end of the last phase, or since the start, as this phase."""
        now_s = time.monotonic()
        self.phases[name] = now_s - self._phase_s
        self._phase_s = now_s

    def _open_process(self, pid: int) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_dead = True
        except (OSError, AttributeError):
            pass  # an old kernel, or a Python built on one: SILENT_S detects the end later
