"""What the meter is told: frozen values, made by the loop and the responder."""

from __future__ import annotations

from collections.abc import Sequence
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
class Load:
    """cache_utilization: used share of the target's cache, 0 to 1."""

    num_running: int
    num_waiting: int
    cache_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class Control:
    """Where the controller stands after a step. decider: of this step, see `serving.step.Reason`.

    num_switches: of the guard since the last step. cost_factors: on the target's pass of one token
    a row, on what drafts add to it, and on draft passes; 1.0 in a profile. time_errors: mean
    relative error of predicted step times, by the profile and as corrected.
    """

    decider: str
    num_switches: int
    cost_factors: tuple[float, float, float]
    time_errors: tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of the loop; times are seconds.

    num_generated: tokens that requests kept, not those behind their end.
    verifications: (num_drafted, num_accepted) of each sequence that verified drafts.
    num_undrafted: steps of sequences without drafts; each token of a burst is one.
    target_s: the pass of its decoding work. total_s: from the plan to the events' end.
    expected_tokens, expected_s: of the plan; 0 where nothing was ready.
    load: after the step. control: None where nothing decoded.
    """

    num_prefill_tokens: int
    num_generated: int
    verifications: Sequence[tuple[int, int]]
    num_undrafted: int
    draft_s: float
    target_s: float
    total_s: float
    expected_tokens: float
    expected_s: float
    load: Load
    num_preempted: int = 0
    control: Control | None = None


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
