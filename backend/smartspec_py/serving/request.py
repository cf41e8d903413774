"""A request: what was asked, where it stands, and which moves are allowed.

The loop thread owns every `Request`; `Scheduler` is its only writer from its arrival on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from smartspec_py.core.types import SamplingParams, SequenceId, SpecMetrics, Verification


class ErrorCode(Enum):
    """How an error reaches a gRPC client. Triton 2.51 answers 400 to all of them over HTTP."""

    INVALID_ARGUMENT = auto()
    UNAVAILABLE = auto()
    INTERNAL = auto()


class RequestError(Exception):
    """This request cannot be served; nobody else is concerned."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidField(RequestError):
    """A field is outside its range; the message names the field, the value and the range."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(
            ErrorCode.INVALID_ARGUMENT, f"{name}: got {value!r:.120}, must be {allowed}"
        )


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A request as the client wrote it, each field inside its own range.

    end_id: None is the model's own end token. seed: None is drawn. num_draft_tokens: None is the
    server's limit. policy, proposer: None is the server's. bias_words, bias_weights: one weight a
    word. deadline_ms: from arrival; None is no deadline. priority: higher is served first.
    tpot_slo_ms: for a generated token on average, from the first on; None is no target.
    workload: what the client calls requests of this sort; its acceptance is learned apart.
    explain_steps: do not generate, but tell what was planned in so many steps. health_check: do not
    generate, but answer at the next step. reuse_prefix: whether cached keys of an earlier request
    that begins alike may be taken over.
    """

    text: str
    max_tokens: int
    stream: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_words: tuple[str, ...] = ()
    bias_weights: tuple[float, ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    stop_words: tuple[str, ...] = ()
    end_id: int | None = None
    exclude_input: bool = True
    num_draft_tokens: int | None = None
    policy: str | None = None
    proposer: str | None = None
    verification: Verification = Verification.COUPLED
    deadline_ms: int | None = None
    tpot_slo_ms: float | None = None
    priority: int = 0
    workload: str | None = None
    reuse_prefix: bool = True
    return_log_probs: bool = False
    return_perf_metrics: bool = False
    spec_metrics: SpecMetrics = SpecMetrics.NONE
    return_num_input_tokens: bool = True
    return_num_output_tokens: bool = True
    explain_steps: int | None = None
    health_check: bool = False


class RequestState(Enum):
    WAITING = auto()  # holds nothing; new, or preempted
    PREFILLING = auto()  # holds a row; its tokens are being read
    DECODING = auto()  # generates
    FINISHED = auto()  # by itself: end token, stop word, length
    CANCELLED = auto()  # by the client or by shutdown
    EXPIRED = auto()  # its deadline passed
    FAILED = auto()


_ENDS = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.EXPIRED, RequestState.FAILED)
_MOVES = {
    RequestState.WAITING: {RequestState.PREFILLING, *_ENDS[1:]},
    RequestState.PREFILLING: {RequestState.DECODING, RequestState.WAITING, *_ENDS},
    RequestState.DECODING: {RequestState.WAITING, *_ENDS},
    **{end: set[RequestState]() for end in _ENDS},
}

PRIORITY_WORTH_S = 10.0
"""A level of priority counts as much as having arrived so many seconds earlier. So whoever waits
is served in the end, whatever arrives after it: that is what keeps priorities from starving."""


@dataclass(slots=True)
class Request:
    """One request inside the loop.

    tokens: prompt and generated tokens. max_draft_len: the request's own limit on drafts.
    proposer: name of the one that drafts for it; None where it may not be speculated on.
    alternatives: others that may draft in its place.
    slo_s_per_token: see `SequenceView`.
    arrival_s, deadline_s and the other times: by the loop's clock; None where not (yet) there.
    is_in_flight: work of it was submitted and its last event has not come. engine_s: when work of
        it was submitted, or an event of it came, whichever was later.
    num_prefill_tokens: tokens known when it was admitted last. num_computed_tokens: those
        handed to the target or found in its cache. num_cached: of the prompt, found there when it
        was first admitted.
    cohort: of requests that are expected to draft alike; see `core.learn.acceptance`.
    num_steps: decoding steps, those without drafts included.
    """

    sequence: SequenceId
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampling: SamplingParams
    policy: str
    max_draft_len: int
    proposer: str | None = None
    alternatives: tuple[str, ...] = ()
    slo_s_per_token: float | None = None
    cohort: str = ""
    reuses_prefix: bool = True
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    state: RequestState = RequestState.WAITING
    is_in_flight: bool = False
    engine_s: float = 0.0
    num_prefill_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def rank(self) -> tuple[float, int]:
        """Who is smaller is served first; never changes."""
        return self.arrival_s - PRIORITY_WORTH_S * self.priority, self.sequence

    @property
    def proposers(self) -> tuple[str, ...]:
        """Everybody that may draft for it, in the order of a view's options."""
        return () if self.proposer is None else (self.proposer, *self.alternatives)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.num_generated

    @property
    def is_over(self) -> bool:
        return self.state in _ENDS

    def move_to(self, state: RequestState) -> None:
        """Raises RuntimeError, and changes nothing, where the table has no such move."""
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"request {self.sequence}: {self.state.name} -> {state.name}")
        self.state = state

    def next_chunk(self, max_tokens: int) -> Sequence[int]:
        """The next known tokens to read, at most max_tokens."""
        return self.tokens[
            self.num_computed_tokens : min(
                self.num_computed_tokens + max_tokens, self.num_prefill_tokens
            )
        ]
