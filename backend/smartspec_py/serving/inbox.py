"""The one way into the loop: a bounded queue for arrivals, and word of cancellations.

The only object that several threads touch; everything in it is guarded by one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from smartspec_py.core.types import SequenceId
from smartspec_py.serving.request import ErrorCode, RequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mail(Generic[T]):
    arrivals: Sequence[T]
    cancelled: Sequence[SequenceId]


class Inbox(Generic[T]):
    """Counts as waiting whatever was put and has not been reported by `leave`."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._arrivals: list[T] = []
        self._cancelled: list[SequenceId] = []
        self._num_waiting = 0
        self._refused: str | None = None
        self._is_closed = False
        self._changed = threading.Condition()

    def check_open(self) -> None:
        """Raises RequestError(UNAVAILABLE) when the queue is full, or takes no more."""
        with self._changed:
            self._refuse_if_shut()

    def put(self, item: T) -> None:
        """Raises RequestError(UNAVAILABLE) at once when the queue is full, or takes no more."""
        with self._changed:
            self._refuse_if_shut()
            self._num_waiting += 1
            self._arrivals.append(item)
            self._changed.notify()

    def cancel(self, sequence: SequenceId) -> None:
        with self._changed:
            self._cancelled.append(sequence)
            self._changed.notify()

    def take(self, timeout_s: float) -> Mail[T]:
        """All that came; waits up to timeout_s for something to come."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            mail = Mail(tuple(self._arrivals), tuple(self._cancelled))
            self._arrivals.clear()
            self._cancelled.clear()
            return mail

    def leave(self, count: int) -> None:
        """`count` of those that were taken no longer wait."""
        with self._changed:
            self._num_waiting -= count

    def refuse(self, reason: str) -> None:
        """Take nothing from now on, for this reason; what was taken goes on."""
        with self._changed:
            self._refused = self._refused or reason

    def close(self, reason: str) -> None:
        """Take nothing from now on, and wake the loop to end it."""
        with self._changed:
            self._refused = self._refused or reason
            self._is_closed = True
            self._changed.notify()

    @property
    def is_closed(self) -> bool:
        with self._changed:
            return self._is_closed

    def _refuse_if_shut(self) -> None:
        if self._refused is not None:
            raise RequestError(ErrorCode.UNAVAILABLE, self._refused)
        if self._num_waiting >= self._max_waiting:
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"the queue is full: {self._num_waiting} requests wait, "
                f"limits.max_queue is {self._max_waiting}",
            )

    def _has_news(self) -> bool:
        return bool(self._arrivals or self._cancelled or self._is_closed)
