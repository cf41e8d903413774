"""Counts the answers of a process, as its progress; see `smartspec_py.serving.liveness`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from smartspec_py.serving.liveness import ProgressWatch

ASK_S = 2.0
"""Most seconds between an answer and the next question."""


class Answers:
    """Asks from its own thread, because a process that hangs lets each question wait.

    ask: called with the longest wait in seconds; returns whether there was an answer.
    """

    def __init__(self, ask: Callable[[float], bool], limit_s: float) -> None:
        self._ask = ask
        self.limit_s = limit_s
        self._num_answers = 0
        self._watch = ProgressWatch(limit_s)
        self._is_closed = False
        threading.Thread(target=self._run, daemon=True).start()

    def look(self, now: float) -> None:
        """See `ProgressWatch.look`."""
        self._watch.look(self._num_answers, now)

    @property
    def is_hung(self) -> bool:
        return self._watch.is_hung

    def close(self) -> None:
        """Ask no more."""
        self._is_closed = True

    def _run(self) -> None:
        while not self._is_closed:
            self._num_answers += self._ask(self.limit_s)
            time.sleep(min(ASK_S, self.limit_s / 4))
