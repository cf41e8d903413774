"""Messages between threads: updates from the loop to the responder, and replies to the client.

All are immutable except `ResponseState`, and only the responder's thread changes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from smartspec_py.api.inputs import GenerateParams
from smartspec_py.core.types import (
    FinishReason,
    PromptLogProbs,
    SequenceId,
    SpecMetrics,
    TokenLogProb,
)
from smartspec_py.serving.request import ErrorCode
from smartspec_py.serving.text import TextStream

SHUTTING_DOWN = "the server is shutting down"


class Progress(NamedTuple):
    """A request so far; see `Request`.

    proposer: of its latest drafts. num_cached: prompt tokens served from the prefix cache.
    Times are in seconds of the system's monotonic clock; None if the event has not happened.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    proposer: str = ""
    num_cached: int = 0
    arrival_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True)
class Reply:
    """One response. It has all values; `codec` sends those that the client requested in `params`.

    text, tokens, log_probs: of this response. tokens: those that end in its text.
    log_probs, prompt_log_probs: empty if no log-probabilities were requested. prompt_log_probs: of
        the prompt from its second token on, on the first response.
    progress, cum_log_prob: of the request so far.
    spec_metrics: JSON document, see `spec_metrics`. Empty if the client did not request it.
    no_speculation: why the request could not use speculation. Empty if it could.
    finish_reason: None before the last response.
    end_token: the end token that ended the text. None if the text ended for another reason. It is
        not sent to the client.
    explanation: a step trace, instead of everything else.
    """

    params: GenerateParams
    text: str = ""
    tokens: tuple[int, ...] = ()
    log_probs: tuple[TokenLogProb, ...] = ()
    prompt_log_probs: tuple[TokenLogProb, ...] = ()
    progress: Progress = NO_PROGRESS
    cum_log_prob: float = 0.0
    seed: int = 0
    num_input_tokens: int = 0
    spec_metrics: str = ""
    no_speculation: str = ""
    finish_reason: FinishReason | None = None
    end_token: int | None = None
    explanation: str = ""


def spec_metrics(steps: Sequence[tuple[int, int]], num_spec_tokens: int, level: SpecMetrics) -> str:
    """Speculation statistics of one request, as a JSON document in vLLM's format.

    Answers of OpenAI's API have it as `metrics`, as in vLLM, where AIPerf reads it. With
    h = acceptance_histogram and n = num_spec_steps, readers may rely on: sum(h) = n;
    sum(j h[j]) = num_accepted_draft_tokens <= num_draft_tokens; len(h) = num_spec_tokens + 1;
    mean_acceptance_length = 1 + accepted / n, the target's own token included;
    draft_acceptance_rate = accepted / drafted.

    steps: drafted (at least 1) and accepted tokens of each step with drafts. Steps without drafts
        would lower the mean acceptance length when the planner correctly decides not to speculate.
    num_spec_tokens: the request's largest allowed draft length.
    Returns an empty string at level NONE, and `{}` without steps.
    """
    if level is SpecMetrics.NONE:
        return ""
    if not steps:
        return "{}"
    drafted, accepted = zip(*steps, strict=True)
    fields: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / len(steps),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": [accepted.count(j) for j in range(num_spec_tokens + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": num_spec_tokens,
    }
    if level is SpecMetrics.DETAILED:
        fields |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return json.dumps({"speculative_decoding": fields}, separators=(",", ":"))


class Sink(Protocol):
    """Sends responses of one request to its client. Any call may raise after a disconnect."""

    def accept(self) -> None:
        """Tell that the request has passed all checks and is in the queue. Called once, before the
        first response; not for a request that is refused."""
        ...

    def send(self, reply: Reply) -> None: ...

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send an error as the final response."""
        ...

    def is_cancelled(self) -> bool: ...


@dataclass(slots=True)
class ResponseState:
    """The responder's state of one request.

    common: what is equal in all its replies. max_draft_len: its largest draft length.
    unsent, unsent_log_probs: tokens whose text was not sent yet, and their log-probabilities.
    prompt_log_probs: of the prompt from its second token on. has_sent: whether the client has
    received a response.
    num_tokens, cum_log_prob: totals of all tokens so far.
    steps: drafted and accepted tokens of its steps with drafts so far.
    """

    sequence: SequenceId
    sink: Sink
    text: TextStream
    common: Reply
    max_draft_len: int = 0
    unsent: list[int] = field(default_factory=list)
    unsent_log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    has_sent: bool = False
    num_tokens: int = 0
    cum_log_prob: float = 0.0
    progress: Progress = NO_PROGRESS
    steps: list[tuple[int, int]] = field(default_factory=list)

    def count(self, update: Update, num_kept: int) -> None:
        """Add the update to the progress and the steps. num_kept: its tokens that belong to the
        text; accepted drafts after them do not count."""
        num_lost = max(0, update.num_accepted - num_kept)
        progress = update.progress
        self.progress = progress._replace(num_accepted=progress.num_accepted - num_lost)
        if update.num_drafted:
            self.steps.append((update.num_drafted, update.num_accepted - num_lost))

    def add(self, update: Update) -> bool:
        """Add an update, up to the end of a stop word; True if there is one.

        Raises the tokenizer's error if the tokens cannot be decoded.
        """
        num_kept = 0
        while num_kept < len(update.tokens) and not self.text.is_stopped:
            self.text.push(update.tokens[num_kept])
            num_kept += 1
        self.count(update, num_kept)
        log_probs = update.log_probs[:num_kept]
        self.unsent.extend(update.tokens[:num_kept])
        self.num_tokens += num_kept
        self.unsent_log_probs.extend(log_probs)
        self.cum_log_prob += sum(entry.log_prob for entry in log_probs)
        if update.prompt_log_probs is not None:
            self._add_prompt(update.prompt_log_probs)
        return self.text.is_stopped

    def _add_prompt(self, log_probs: PromptLogProbs) -> None:
        """Add log-probabilities of the prompt. A request that was preempted reads it again."""
        num_known = len(self.prompt_log_probs)
        values = log_probs.values[1 + num_known - log_probs.first :]
        self.prompt_log_probs.extend(values[: self.common.num_input_tokens - 1 - num_known])

    def take_reply(
        self, text: str, reason: FinishReason | None = None, end_token: int | None = None
    ) -> Reply:
        """The next response, with this text and all unsent tokens. reason: of the last one."""
        params = self.common.params
        # Same as TensorRT-LLM: a stream contains new tokens only.
        has_prompt = not (self.has_sent or params.exclude_input or params.stream)
        level = params.spec_metrics if reason else SpecMetrics.NONE
        reply = replace(
            self.common,
            text=params.text + text if has_prompt else text,
            tokens=tuple(self.unsent),
            log_probs=tuple(self.unsent_log_probs),
            prompt_log_probs=() if self.has_sent else tuple(self.prompt_log_probs),
            progress=self.progress,
            cum_log_prob=self.cum_log_prob,
            spec_metrics=spec_metrics(self.steps, self.max_draft_len, level),
            finish_reason=reason,
            end_token=end_token,
        )
        self.has_sent = True
        self.unsent.clear()
        self.unsent_log_probs.clear()
        return reply


@dataclass(frozen=True, slots=True)
class LoopState:
    """The state of the loop.

    cache_utilization: used share of the cache budget, 0 to 1.
    num_preemptions: preemptions since the start.
    num_switches: times since the start that the guard disabled or enabled speculation.
    time_errors: mean relative error of predicted step times, by the profile and as corrected.
    host_s: seconds since the start of the work for single requests beside passes, by `Cause`.
    """

    num_running: int = 0
    num_waiting: int = 0
    cache_utilization: float = 0.0
    num_preemptions: int = 0
    num_switches: int = 0
    time_errors: tuple[float, float] = (0.0, 0.0)
    host_s: Mapping[str, float] = field(default_factory=dict)


class Update(NamedTuple):
    """New results of a request, sent by the loop. One with finish_reason or error is the last.

    num_drafted, num_accepted, prompt_log_probs: see `Event`. Accepted drafts after the end of the
        text are not counted.
    log_probs: one for each token; empty if not requested.
    end_token: see `Reply`.
    """

    sequence: SequenceId
    tokens: Sequence[int] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    progress: Progress = NO_PROGRESS
    finish_reason: FinishReason | None = None
    error: tuple[ErrorCode, str] | None = None
    log_probs: Sequence[TokenLogProb] = ()
    prompt_log_probs: PromptLogProbs | None = None
    end_token: int | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
