"""The launcher's end of the link to the backend; see `smartspec_py.serving.link`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket

from smartspec_py.serving.link import DRAIN, Beat, received

SILENT_S = 1.5
"""A process that sends nothing for so long is taken for stopped. Triton 2.51 aborts itself where
its Python process stands still for about as long and a request comes."""


class LauncherEnd:
    """What the launcher knows of the backend. Used by one thread."""

    def __init__(self) -> None:
        self._socket, self._child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._pidfd: int | None = None
        self._silent_s = 0.0
        self._is_dead = False
        self.beat: Beat | None = None
        """The newest; None before the model has been loaded."""

    @property
    def child_fd(self) -> int:
        """The backend's end, to be inherited by tritonserver."""
        return self._child.fileno()

    def hand_over(self) -> None:
        """Close the backend's end here, once tritonserver has it."""
        self._child.close()

    def look(self, timeout_s: float) -> None:
        """Wait for the next beat, or the process's death, timeout_s at most."""
        poller = select.poll()
        for source in (self._socket.fileno(), self._pidfd):
            if source is not None:
                poller.register(source, select.POLLIN)
        ready = [source for source, _ in poller.poll(timeout_s * 1e3)]
        # What was waited here counts, not what a clock shows: launcher and machine may be
        # suspended.
        self._silent_s = 0.0 if ready else self._silent_s + timeout_s
        self._is_dead |= self._pidfd in ready
        if self._socket.fileno() in ready:
            self._receive()

    @property
    def trouble(self) -> str | None:
        """In a sentence, why the backend is of no use; None where it is alive."""
        name = f"Triton's Python process (pid {self.beat.pid})" if self.beat else "The backend"
        if self.beat is not None and self.beat.is_ended:
            return "The model has been unloaded."
        if self._is_dead:
            return f"{name} has died."
        if self._silent_s >= SILENT_S:
            return f"{name} has stood still for {SILENT_S:g} s."
        return None

    def request_drain(self) -> None:
        with contextlib.suppress(OSError):  # nobody is left, or nobody reads
            self._socket.send(DRAIN)

    def wait_gone(self, timeout_s: float) -> None:
        """Until the process has ended."""
        if self._pidfd is not None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(timeout_s * 1e3)

    def close(self) -> None:
        """May be called again."""
        self._socket.close()
        self._child.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _receive(self) -> None:
        """All beats that have come; the end of the stream where every holder of it has ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message = received(self._socket)
                if not message:
                    self._is_dead = True
                    return
                if self.beat is not None and self.beat.is_ended:
                    continue  # a beat that another thread of the backend had begun before
                is_first = self.beat is None
                self.beat = Beat(**json.loads(message))
                if is_first:
                    self._open_process(self.beat.pid)

    def _open_process(self, pid: int) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_dead = True
        except (OSError, AttributeError):
            pass  # an old kernel, or a Python built on one: silence tells it, later
