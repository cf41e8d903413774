"""Waits until the backend has answered every request, before Triton is told to end.

The launcher sends a drain request over the link. The backend then refuses new requests and ends
those in flight after `limits.drain_s`. A SIGTERM to Triton alone would not reach the backend.

Known limit: after the SIGTERM, Triton 2.51's stub often ends by a segmentation fault while it is
unloaded. All requests are answered by then, and the exit status is 0. The cause is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from smartspec_launch.link import LauncherEnd

LOOK_S = 0.1


class Drained(StrEnum):
    """How a drain ended."""

    ANSWERED = "answered"
    """Every request has its last response."""

    LATE = "late"
    """The deadline passed, and requests may still be unanswered."""

    DEAD = "dead"
    """The backend has died, does not respond or has failed. It can answer no request."""


def drain(
    link: LauncherEnd, deadline_s: float, clock: Callable[[], float] = time.monotonic
) -> Drained:
    """Request the drain, and wait until it is done or the clock reaches deadline_s."""
    link.request_drain()
    while clock() < deadline_s:
        link.look(LOOK_S)
        beat = link.beat
        if link.trouble or beat is None or beat.failure:
            return Drained.DEAD
        if beat.is_draining and beat.num_open == 0:
            return Drained.ANSWERED
    return Drained.LATE
