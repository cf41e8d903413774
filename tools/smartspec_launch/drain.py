"""Unloads the model of a running Triton and reports the outcome.

The launcher sends a drain request over the link, and the backend unloads its model. Triton then
refuses new requests and waits for those in flight. A SIGTERM to Triton would not reach the backend.

Triton does not always release a model. A client may cancel its gRPC stream while the last response
is sent. Triton 2.51 then keeps that request, and the model stays UNLOADING. The backend never gets
a finalize call (measured, docs/research/log). The beats of the backend therefore show whether every
request was answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from smartspec_launch.link import LauncherEnd

KEPT_S = 5.0
"""If no request is open for this time, Triton will not release the model any more."""

POLL_S = 0.1


class Drained(StrEnum):
    """How a drain ended."""

    UNLOADED = "unloaded"
    """The model is unloaded, or was never loaded."""

    KEPT = "kept"
    """Every request is answered, but Triton does not release the model."""

    LATE = "late"
    """The deadline passed, and requests may still be unanswered."""

    DEAD = "dead"
    """The backend has died, does not respond or has failed. It can answer no request."""


def drain(
    link: LauncherEnd, deadline_s: float, clock: Callable[[], float] = time.monotonic
) -> Drained:
    """Request the unload, and wait until it is done or the clock reaches deadline_s."""
    link.look(0.0)
    if link.beat is None:
        return Drained.UNLOADED
    link.request_drain()
    busy_s = clock()
    while clock() < deadline_s:
        link.look(POLL_S)
        if link.beat.is_ended:
            link.wait_gone(max(0.0, deadline_s - clock()))
            # Triton registers the unload a moment later. If SIGTERM comes before that, Triton
            # needs one more second to exit.
            time.sleep(POLL_S)
            return Drained.UNLOADED
        if link.trouble or link.beat.failure:
            return Drained.DEAD
        if link.beat.num_open:
            busy_s = clock()
        elif clock() - busy_s > KEPT_S:
            return Drained.KEPT
    return Drained.LATE
