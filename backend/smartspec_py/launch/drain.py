"""Takes the model of a running Triton out of service, and says what became of it.

Unloading is how a backend is told to drain: Triton refuses new requests and waits for those in
flight; of a SIGTERM the backend would learn nothing.

Triton does not always let go of a model. Where a client cancels its gRPC stream while the last
response leaves, Triton 2.51 keeps that request, and with it the model: it stays UNLOADING, and
the backend is never told to finalize (measured, docs/log.md). Whether every request was answered
is therefore read from the backend's own gauges.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from enum import StrEnum

from smartspec_py.launch.address import DIRECT, Address
from smartspec_py.serving.contract import MODEL_NAME
from smartspec_py.serving.metric_families import RUNNING, WAITING, value_in

CONTROL_HEADER = "smartspec-key"
CONTROL_TIMEOUT_S = 5.0
"""Time for one answer of Triton's model control."""

KEPT_S = 5.0
"""So long nothing is in flight, and Triton has not let go of the model: it is not going to. That a
request has come is shown before its first step, within 0.25 s."""

POLL_S = 0.1


class Drained(StrEnum):
    """How a drain ended."""

    UNLOADED = "unloaded"
    """The model is gone, or the server is."""

    KEPT = "kept"
    """Every request is answered; Triton keeps the model all the same."""

    LATE = "late"
    """It is not known that every request is answered."""


def drain(
    address: Address,
    control_key: str,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Drained:
    """Unload the model and wait until the clock shows deadline_s at most. A server that is slow to
    answer is asked again. control_key: opens the APIs that are closed to the network."""
    is_asked, busy_s = False, clock()
    while clock() < deadline_s:
        try:
            if not is_asked:
                _control(address, control_key, f"models/{MODEL_NAME}/unload")
                is_asked = True
            if b"UNLOADING" not in _control(address, control_key, "index"):
                return Drained.UNLOADED
            if num_in_flight(address) != 0:
                busy_s = clock()
            elif clock() - busy_s > KEPT_S:
                return Drained.KEPT
        except TimeoutError:
            busy_s = clock()
        except OSError:
            return Drained.UNLOADED  # it is not up yet, or not any more
        else:
            time.sleep(POLL_S)
    return Drained.LATE


def num_in_flight(address: Address) -> float | None:
    """Requests that the backend runs or lets wait; None where nobody shows them."""
    try:
        with DIRECT.open(address.metrics_url, timeout=CONTROL_TIMEOUT_S) as response:
            text = response.read().decode()
    except OSError:  # a port that is closed, or an answer that does not come
        return None
    counts = [value_in(text, family) for family in (RUNNING, WAITING)]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _control(address: Address, control_key: str, path: str) -> bytes:
    """POST to Triton's model control; the key keeps others from it."""
    url = f"{address.http_url}/v2/repository/{path}"
    request = urllib.request.Request(url, b"{}", {CONTROL_HEADER: control_key})
    with DIRECT.open(request, timeout=CONTROL_TIMEOUT_S) as response:
        body: bytes = response.read()
    return body
