"""What the meter is told beside step records: frozen values, made by the loop and the responder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smartspec_py.core.types import FinishReason

if TYPE_CHECKING:
    from smartspec_py.serving.messages import Times


@dataclass(frozen=True, slots=True)
class ConfigInfo:
    """method: what drafts. k_max: the largest draft length. policy: the server's default."""

    method: str
    k_max: int
    policy: str


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where the loop stands. cache_utilization: used share of the target's cache, 0 to 1.

    num_preemptions, num_switches: since the start; the latter of the guard. time_errors: mean
    relative error of predicted step times, by the profile and as corrected.
    """

    num_running: int = 0
    num_waiting: int = 0
    cache_utilization: float = 0.0
    num_preemptions: int = 0
    num_switches: int = 0
    time_errors: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RequestSample:
    """A request that was taken and is over. finish_reason: None where it ended in an error.

    Times are None where it did not come to that; tpot_s takes two tokens.
    """

    finish_reason: FinishReason | None
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


def request_sample(
    times: Times, end_ns: int, num_generated: int, finish_reason: FinishReason | None
) -> RequestSample:
    """The sample of a request that ended at end_ns of the clock of `times`."""
    decode_s = _span_s(times.first_token_ns, times.last_token_ns)
    num_gaps = num_generated - 1
    return RequestSample(
        finish_reason,
        queue_s=_span_s(times.arrival_ns, times.first_scheduled_ns),
        ttft_s=_span_s(times.arrival_ns, times.first_token_ns),
        tpot_s=None if decode_s is None or num_gaps < 1 else decode_s / num_gaps,
        e2e_s=_span_s(times.arrival_ns, end_ns),
    )


def _span_s(start_ns: int, stop_ns: int) -> float | None:
    """None where the second did not happen."""
    return (stop_ns - start_ns) / 1e9 if stop_ns else None
