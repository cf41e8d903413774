"""Takes the model of a running Triton out of service, and says what became of it.

The backend is asked by its link, and unloads its model: Triton refuses new requests and waits for
those in flight; of a SIGTERM the backend would learn nothing.

Triton does not always let go of a model. Where a client cancels its gRPC stream while the last
response leaves, Triton 2.51 keeps that request, and with it the model: it stays UNLOADING, and the
backend is never told to finalize (measured, docs/research/log). Whether every request was answered
is therefore read from the backend's own beats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from smartspec_launch.link import LauncherEnd

KEPT_S = 5.0
"""So long nothing is open, and Triton has not let go of the model: it is not going to."""

POLL_S = 0.1


class Drained(StrEnum):
    """How a drain ended."""

    UNLOADED = "unloaded"
    """The model is gone, or was never there."""

    KEPT = "kept"
    """Every request is answered; Triton keeps the model all the same."""

    LATE = "late"
    """It is not known that every request is answered."""

    DEAD = "dead"
    """The backend has died, stands still or has failed: nobody is left to answer."""


def drain(
    link: LauncherEnd, deadline_s: float, clock: Callable[[], float] = time.monotonic
) -> Drained:
    """Have the model unloaded, and wait until the clock shows deadline_s at most."""
    link.look(0.0)
    if link.beat is None:
        return Drained.UNLOADED
    link.request_drain()
    busy_s = clock()
    while clock() < deadline_s:
        link.look(POLL_S)
        if link.beat.is_ended:
            link.wait_gone(max(0.0, deadline_s - clock()))
            # Triton notes it a moment later. A SIGTERM before that is looked at after a second.
            time.sleep(POLL_S)
            return Drained.UNLOADED
        if link.trouble or link.beat.failure:
            return Drained.DEAD
        if link.beat.num_open:
            busy_s = clock()
        elif clock() - busy_s > KEPT_S:
            return Drained.KEPT
    return Drained.LATE
