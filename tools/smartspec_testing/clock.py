"""Time as an object, so that one engine can run in real seconds or in simulated ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary start; never falls."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass. Raises ValueError where they are negative."""
        ...


class VirtualClock:
    """Starts at 0.0 and moves only by `sleep`, which returns at once.

    Two sleeps of 0.5 s leave `now()` at 1.0, whatever the machine does meanwhile.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"cannot sleep {seconds} s")
        self._now_s += seconds


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Stopwatch:
    """Starts at 0.0. Counts real seconds while `running`, and all seconds of `sleep`, which returns
    at once."""

    def __init__(self) -> None:
        self.ran_s = 0.0
        """Real seconds of all times that it ran before."""
        self._slept_s = 0.0
        self._since_s: float | None = None

    def now(self) -> float:
        shown = self.ran_s + self._slept_s
        return shown if self._since_s is None else shown + time.monotonic() - self._since_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"cannot sleep {seconds} s")
        self._slept_s += seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self.ran_s += time.monotonic() - self._since_s
            self._since_s = None
