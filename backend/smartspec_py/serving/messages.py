"""Messages between threads: updates from the loop to the responder, and replies to the client.

All are immutable except `ResponseState`, and only the responder's thread changes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from smartspec_py.core.types import (
    FinishReason,
    PromptLogProbs,
    SequenceId,
    SpecMetrics,
    TokenLogProb,
)
from smartspec_py.serving.request import ErrorCode, GenerateParams
from smartspec_py.serving.text import TextStream

SHUTTING_DOWN = "the server is shutting down"


class Progress(NamedTuple):
    """Counts of a request so far; see `Request`. proposer: the proposer of its latest drafts."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    proposer: str = ""


NO_PROGRESS = Progress()


class Times(NamedTuple):
    """Times of one request, in nanoseconds of the system's monotonic clock.

    0 if the event did not happen or is not known yet.
    """

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0


UNKNOWN_TIMES = Times()


@dataclass(frozen=True, slots=True)
class Summary:
    """Fields that only the last response has.

    num_cached_tokens: prompt tokens served from the prefix cache.
    spec_metrics: JSON document, see `SpecRecord`. Empty if the client did not request it.
    no_speculation: why the request could not use speculation. Empty if it could.
    end_token: the end token that ended the text. None if the text ended for another reason. It is
        not sent to the client.
    """

    num_cached_tokens: int = 0
    spec_metrics: str = ""
    no_speculation: str = ""
    end_token: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """One response.

    num_output_tokens and log_probs describe this response only. progress and cum_log_prob cover the
    request so far. num_input_tokens is 0 except on the last response.

    num_input_tokens, num_output_tokens, log_probs, times: None if the client did not request them.
    times: all 0 before the last response.
    tokens: tokens that end in the text of this response. output_ids: the same; None if the client
        did not request them.
    token_log_probs: JSON document, see `log_prob_document`; None if not requested.
    proposer: the proposer of the latest drafts; empty unless detailed metrics were requested.
    finish_reason, summary: only on the last response.
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
    output_ids: tuple[int, ...] | None = None
    token_log_probs: str | None = None
    proposer: str = ""


def log_prob_document(prompt: Sequence[TokenLogProb], output: Sequence[TokenLogProb]) -> str:
    """The tokens of one response as JSON: `output`, and `prompt` in the first response if it was
    requested. Each is a list of [token, log-probability, [[token, log-probability], ..]]."""
    document = {"prompt": prompt, "output": output}
    return json.dumps({name: of for name, of in document.items() if of}, separators=(",", ":"))


class SpecRecord:
    """Speculation statistics of one request, as a JSON document in vLLM's format.

    AIPerf and other load generators read it from the root of a response. A verification is a step
    with at least one draft. Steps without drafts are excluded. Otherwise they would lower the mean
    acceptance length when the planner correctly decides not to speculate.

    With h = acceptance_histogram and n = num_spec_steps, readers may rely on: sum(h) = n;
    sum(j h[j]) = num_accepted_draft_tokens <= num_draft_tokens; len(h) = num_spec_tokens + 1;
    mean_acceptance_length = 1 + accepted / n, the target's own token included;
    draft_acceptance_rate = accepted / drafted.

    num_spec_tokens: the request's largest allowed draft length.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Add a step. A step without drafts is ignored."""
        assert 0 <= num_accepted <= num_drafted <= self._num_spec_tokens, "not a verification"
        if num_drafted > 0:
            self._drafted.append(num_drafted)
            self._accepted.append(num_accepted)

    def to_json(self, level: SpecMetrics) -> str:
        """The document; an empty string at level NONE, and `{}` if there was no verification."""
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
    """Sends responses of one request to its client. Any call may raise after a disconnect."""

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
    """The responder's state of one request.

    max_draft_len: largest draft length of the request.
    no_speculation: see `Summary`.
    unsent, unsent_log_probs: tokens whose text was not sent yet, and their log-probabilities.
    prompt_log_probs: of the prompt from its second token on. has_sent: whether the client has
        received a response.
    num_tokens, cum_log_prob: totals of all tokens so far.
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
    unsent_log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    has_sent: bool = False
    num_tokens: int = 0
    cum_log_prob: float = 0.0
    progress: Progress = NO_PROGRESS
    times_s: tuple[float | None, ...] = ()
    spec: SpecRecord = field(init=False)

    def __post_init__(self) -> None:
        self.spec = SpecRecord(self.max_draft_len)
        # Same as TensorRT-LLM: a stream contains new tokens only.
        is_wanted = not (self.params.exclude_input or self.params.stream)
        self.echo = self.params.text if is_wanted else ""

    def add_prompt(self, log_probs: PromptLogProbs) -> None:
        """Add log-probabilities of the prompt. A request that was preempted reads it again."""
        num_known = len(self.prompt_log_probs)
        values = log_probs.values[1 + num_known - log_probs.first :]
        self.prompt_log_probs.extend(values[: self.num_input_tokens - 1 - num_known])

    def log_prob_document(self) -> str | None:
        """Of the tokens that were not sent yet. None if the client did not request it."""
        if self.params.num_token_log_probs is None:
            return None
        prompt = [] if self.has_sent else self.prompt_log_probs
        return log_prob_document(prompt, self.unsent_log_probs)

    @property
    def proposer(self) -> str:
        is_wanted = self.params.spec_metrics is SpecMetrics.DETAILED
        return self.progress.proposer if is_wanted else ""

    def count(self, progress: Progress) -> None:
        """Set the current counts of the request."""
        num_drafted = progress.num_drafted - self.progress.num_drafted
        self.spec.add(num_drafted, progress.num_accepted - self.progress.num_accepted)
        self.progress = progress

    @property
    def times(self) -> Times:
        return Times(*(0 if time_s is None else int(time_s * 1e9) for time_s in self.times_s))


@dataclass(frozen=True, slots=True)
class LoopState:
    """The state of the loop.

    cache_utilization: used share of the cache budget, 0 to 1.
    num_preemptions: preemptions since the start.
    num_switches: times since the start that the guard disabled or enabled speculation.
    time_errors: mean relative error of predicted step times, by the profile and as corrected.
    """

    num_running: int = 0
    num_waiting: int = 0
    cache_utilization: float = 0.0
    num_preemptions: int = 0
    num_switches: int = 0
    time_errors: tuple[float, float] = (0.0, 0.0)


class Update(NamedTuple):
    """New results of a request, sent by the loop. One with finish_reason or error is the last.

    progress, num_cached_tokens: totals of the request so far.
    times_s: the fields of `Times`, in seconds.
    log_probs: one for each token; empty if not requested. prompt_log_probs: see `Event`.
    end_token: see `Summary`.
    """

    sequence: SequenceId
    tokens: Sequence[int] = ()
    progress: Progress = NO_PROGRESS
    finish_reason: FinishReason | None = None
    error: tuple[ErrorCode, str] | None = None
    log_probs: Sequence[TokenLogProb] = ()
    prompt_log_probs: PromptLogProbs | None = None
    times_s: tuple[float | None, ...] = ()
    num_cached_tokens: int = 0
    end_token: int | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
