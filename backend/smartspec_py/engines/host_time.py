"""How long the work for one request beside the model's passes takes: grammar, shaping, scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Cause(StrEnum):
    """What the time was for; a label of metrics."""

    GRAMMAR = "grammar"  # masks and forced tokens
    SHAPING = "shaping"  # biases, bans and penalties
    LOG_PROBS = "log_probs"  # of the prompt


class HostTime:
    """Of one request. Used by the loop's thread.

    It counts time of the processor and not of the clock, so that a busy machine makes no request
    expensive.
    """

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = dict[Cause, float]()

    def of(self, cause: Cause, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Measure a call. Returns its result."""
        start_s = time.thread_time()
        try:
            return call(*arguments, **named)
        finally:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + time.thread_time() - start_s

    def take(self) -> Mapping[Cause, float]:
        """Seconds by cause since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
