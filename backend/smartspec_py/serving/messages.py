"""What the threads hand to one another: from the loop to the responder, replies to the client.

Only a `ResponseState` changes, and only the responder's thread changes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from smartspec_py.core.types import FinishReason, SequenceId, SpecMetrics
from smartspec_py.serving.request import ErrorCode, GenerateParams
from smartspec_py.serving.text import TextStream

SHUTTING_DOWN = "the server is shutting down"


class Progress(NamedTuple):
    """Counts of a request so far; see `Request`."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


NO_PROGRESS = Progress()


class Times(NamedTuple):
    """Of one request, in nanoseconds of the system's monotonic clock; 0 where it did not happen, or
    is not known yet."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0


UNKNOWN_TIMES = Times()


@dataclass(frozen=True, slots=True)
class Summary:
    """What only the last response says.

    num_cached_tokens: of the prompt, not read because they were cached. spec_metrics: JSON
    document, see `SpecRecord`; empty where not asked for. no_speculation: why the request could
    not be speculated on; empty otherwise. end_token: that the text ended with, None where it ended
    otherwise; not on the wire.
    """

    num_cached_tokens: int = 0
    spec_metrics: str = ""
    no_speculation: str = ""
    end_token: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """One response. num_output_tokens and log_probs are of this one, progress and cum_log_prob of
    the request so far; num_input_tokens is 0 on all but the last.

    num_input_tokens, num_output_tokens, log_probs, times: None where the request did not want them.
    times: all 0 before the last response.
    tokens: those whose text this response completes; not on the wire.
    finish_reason, summary: on the last response only.
    """

    text: str
    num_input_tokens: int | None
    num_output_tokens: int | None
    progress: Progress
    seed: int
    log_probs: tuple[float, ...] | None = None
    cum_log_prob: float = 0.0
    times: Times | None = None
    finish_reason: FinishReason | None = None
    summary: Summary | None = None
    tokens: tuple[int, ...] = ()


class SpecRecord:
    """What one request's speculation did, as a JSON document in the shape of vLLM's.

    AIPerf and other load generators read it from the root of a response. A verification is a step
    with at least one draft. Steps without drafts appear nowhere in it: counted as steps that
    accepted nothing, they would pull the mean length towards 1 just where not to speculate was
    right.

    With h = acceptance_histogram and n = num_spec_steps, readers may rely on: sum(h) = n;
    sum(j h[j]) = num_accepted_draft_tokens <= num_draft_tokens; len(h) = num_spec_tokens + 1;
    mean_acceptance_length = 1 + accepted / n, the target's own token included;
    draft_acceptance_rate = accepted / drafted.

    num_spec_tokens: the largest draft length that this request could have had.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Take in a step; one without drafts is left out."""
        assert 0 <= num_accepted <= num_drafted <= self._num_spec_tokens, "not a verification"
        if num_drafted > 0:
            self._drafted.append(num_drafted)
            self._accepted.append(num_accepted)

    def to_json(self, level: SpecMetrics) -> str:
        """The document; empty at level NONE. A request that never verified has no block in it."""
        if level is SpecMetrics.NONE:
            return ""
        document = {"speculative_decoding": self._fields(level)} if self._drafted else {}
        return json.dumps(document, separators=(",", ":"))

    def _fields(self, level: SpecMetrics) -> dict[str, Any]:
        num_steps = len(self._drafted)
        num_drafted, num_accepted = sum(self._drafted), sum(self._accepted)
        counts = Counter(self._accepted)
        fields: dict[str, Any] = {
            "mean_acceptance_length": 1 + num_accepted / num_steps,
            "draft_acceptance_rate": num_accepted / num_drafted,
            "acceptance_histogram": [counts[j] for j in range(self._num_spec_tokens + 1)],
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_drafted,
            "num_spec_tokens": self._num_spec_tokens,
        }
        if level is SpecMetrics.DETAILED:
            fields["per_step_accepted"] = self._accepted
            fields["per_step_drafted"] = self._drafted
        return fields


class Sink(Protocol):
    """The client's end of a request. Any call may raise when the client is gone."""

    def send(self, reply: Reply, is_final: bool) -> None: ...

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send an error as the final response."""
        ...

    def explain(self, trace: str) -> None:
        """Send a step trace as the final response."""
        ...

    def is_cancelled(self) -> bool: ...


@dataclass(slots=True)
class ResponseState:
    """What the responder knows of one request.

    max_draft_len: that its drafts can have. no_speculation: see `Summary`. unsent,
    unsent_log_probs: tokens whose text was not sent yet. num_tokens, cum_log_prob: of all so far.
    spec: its verifications so far.
    """

    sequence: SequenceId
    sink: Sink
    text: TextStream
    seed: int
    num_input_tokens: int
    params: GenerateParams
    max_draft_len: int = 0
    no_speculation: str = ""
    echo: str = ""
    unsent: list[int] = field(default_factory=list)
    unsent_log_probs: list[float] = field(default_factory=list)
    num_tokens: int = 0
    cum_log_prob: float = 0.0
    progress: Progress = NO_PROGRESS
    times_s: tuple[float | None, ...] = ()
    spec: SpecRecord = field(init=False)

    def __post_init__(self) -> None:
        self.spec = SpecRecord(self.max_draft_len)
        # As TensorRT-LLM has it: a stream is of new tokens only.
        is_wanted = not (self.params.exclude_input or self.params.stream)
        self.echo = self.params.text if is_wanted else ""

    def count(self, progress: Progress) -> None:
        """Take in where the request stands now."""
        num_drafted = progress.num_drafted - self.progress.num_drafted
        self.spec.add(num_drafted, progress.num_accepted - self.progress.num_accepted)
        self.progress = progress

    @property
    def times(self) -> Times:
        return Times(*(0 if time_s is None else int(time_s * 1e9) for time_s in self.times_s))


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


class Update(NamedTuple):
    """News of a request from the loop. finish_reason or error: the last of it.

    progress, num_cached_tokens: of the request so far. times_s: those of `Times`, in seconds.
    log_probs: of the tokens; empty where not asked for. end_token: see `Summary`.
    """

    sequence: SequenceId
    tokens: Sequence[int] = ()
    progress: Progress = NO_PROGRESS
    finish_reason: FinishReason | None = None
    error: tuple[ErrorCode, str] | None = None
    log_probs: Sequence[float] = ()
    times_s: tuple[float | None, ...] = ()
    num_cached_tokens: int = 0
    end_token: int | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
