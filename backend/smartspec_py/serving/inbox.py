"""The loop's inbox: a bounded queue of new requests, and lists of cancellations and calls.

One lock protects all of its state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from smartspec_py.core.types import SequenceId
from smartspec_py.serving.request import ErrorCode, Request, RequestError

Call = Callable[[str | None], object]
"""Called with None in the loop's thread, or with the reason why the loop has ended."""

MAX_CALLS = 64
"""Most calls that may wait for the next step. More are refused."""


class Messages(NamedTuple):
    """calls: the thread that took the messages must call each with None."""

    arrivals: Sequence[Request]
    cancelled: Sequence[SequenceId]
    calls: Sequence[Call] = ()


class Inbox:
    """The inbox. A request counts as waiting from `put` until `leave` is called for it."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self.num_taken = 0
        """Calls of `take`: the progress of the loop."""

        self._arrivals: list[Request] = []
        self._cancelled: list[SequenceId] = []
        self._calls: list[Call] = []
        self._num_waiting = 0
        self._refused: str | None = None
        self.is_closed = False
        self._changed = threading.Condition()

    def check_open(self) -> None:
        """Raises RequestError(UNAVAILABLE) if the queue is full or accepts no more requests."""
        with self._changed:
            self._refuse_if_shut()

    def put(self, request: Request, announce: Callable[[], object] = lambda: None) -> None:
        """Add a request. Raises RequestError(UNAVAILABLE) at once if the queue is full or accepts
        no more requests.

        announce: called if the request is accepted, before the loop can see it.
        """
        with self._changed:
            self._refuse_if_shut()
            announce()
            self._num_waiting += 1
            self._arrivals.append(request)
            self._changed.notify()

    def cancel(self, sequence: SequenceId) -> None:
        with self._changed:
            self._cancelled.append(sequence)
            self._changed.notify()

    def call(self, call: Call) -> None:
        """Run a call in the loop's thread at its next step, even if the queue is full.

        It runs exactly once. If the inbox is closed before that, `close` runs it with the reason.

        Raises RequestError(UNAVAILABLE) after `close`, and if MAX_CALLS are already waiting.
        """
        with self._changed:
            if self.is_closed:
                raise RequestError(ErrorCode.UNAVAILABLE, self._refused or "the server has ended")
            if len(self._calls) >= MAX_CALLS:
                message = f"{MAX_CALLS} calls wait for the next step: try again later"
                raise RequestError(ErrorCode.UNAVAILABLE, message)
            self._calls.append(call)
            self._changed.notify()

    def take(self, timeout_s: float) -> Messages:
        """All new messages. Waits up to timeout_s if there are none."""
        with self._changed:
            if timeout_s > 0.0:  # a wait of no time takes 20 us
                self._changed.wait_for(self._has_messages, timeout_s)
            self.num_taken += 1
            messages = Messages(tuple(self._arrivals), tuple(self._cancelled), tuple(self._calls))
            self._arrivals.clear()
            self._cancelled.clear()
            self._calls.clear()
            return messages

    def leave(self) -> None:
        """Report that a request no longer waits."""
        with self._changed:
            self._num_waiting -= 1

    def refuse(self, reason: str) -> None:
        """Reject new requests from now on, with this reason. Accepted requests continue."""
        with self._changed:
            self._refused = self._refused or reason

    def close(self, reason: str) -> None:
        """Reject everything from now on, and wake the loop so that it ends."""
        with self._changed:
            self._refused = self._refused or reason
            self.is_closed = True
            calls, self._calls = self._calls, []
            self._changed.notify()
        for call in calls:
            call(reason)

    def _refuse_if_shut(self) -> None:
        if self._refused is not None:
            raise RequestError(ErrorCode.UNAVAILABLE, self._refused)
        if self._num_waiting >= self._max_waiting:
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"the queue is full: {self._num_waiting} requests are waiting, "
                f"limits.max_queue is {self._max_waiting}",
            )

    def _has_messages(self) -> bool:
        return bool(self._arrivals or self._cancelled or self._calls or self.is_closed)
