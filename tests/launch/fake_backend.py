"""The backend's end of a link, in this process."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import TracebackType

from smartspec_launch.link import LauncherEnd
from smartspec_py.config import LimitsConfig
from smartspec_py.serving.link import BackendEnd, Beat

SILENCE = None


class Backend:
    """Sends these beats one after the other, the last again and again, each as a step.

    Use as a context manager. is_stuck: the steps do not go on.
    """

    def __init__(
        self, *beats: Beat | None, limits: LimitsConfig | None = None, is_stuck: bool = False
    ) -> None:
        self.launcher = LauncherEnd(limits or LimitsConfig())
        self.pid = os.getpid()
        self.is_asked = threading.Event()
        self.is_orphaned = threading.Event()
        self._beats = list(beats)
        self._num_steps, self._step = 0, 0 if is_stuck else 1
        fd = os.dup(self.launcher.child_fd)
        self.launcher.hand_over()
        self.end = BackendEnd(fd, self._next, self.is_asked.set, self.is_orphaned.set)

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.launcher.close()
        assert self.is_orphaned.wait(60.0), "the backend did not notice"

    def _next(self) -> Beat | None:
        beat = self._beats.pop(0) if len(self._beats) > 1 else self._beats[0]
        self._num_steps += self._step
        return beat and replace(beat, pid=self.pid, num_steps=self._num_steps)
