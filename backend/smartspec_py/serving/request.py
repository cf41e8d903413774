"""A request: its state, and the allowed state transitions.

The loop thread owns every `Request`. `Lifecycle` changes it; `Speculation` notes its `proposer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from smartspec_py.api.errors import field_text
from smartspec_py.constants import PRIORITY_WORTH_S
from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.base import Grammar, SequenceStart
from smartspec_py.engines.host_time import HostTime
from smartspec_py.faults import shown


class ErrorCode(Enum):
    """The gRPC status of an error, with Triton's name for it. Over HTTP, Triton 2.51 answers 400
    for all of them."""

    INVALID_ARGUMENT = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """This request cannot be served. Other requests are not affected."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def late_message(deadline_ms: float) -> str:
    """Why a request failed whose deadline passed."""
    return f"deadline_ms: {deadline_ms:.0f} ms passed before the first token"


class FieldError(RequestError):
    """A field is wrong."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(ErrorCode.INVALID_ARGUMENT, field_text(name, reason))


class InvalidField(FieldError):
    """A field is outside its range; the message names the field, the value and the range."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, f"got {shown(value)}, must be {allowed}")


class RequestState(Enum):
    WAITING = auto()  # new or preempted; holds no row and no cache
    PREFILLING = auto()  # holds a row; its prefill is not complete
    DECODING = auto()  # generates tokens
    ENDED = auto()  # its last update was posted; holds a row until its work in flight has ended


_MOVES = {
    RequestState.WAITING: {RequestState.PREFILLING, RequestState.ENDED},
    RequestState.PREFILLING: {RequestState.DECODING, RequestState.WAITING, RequestState.ENDED},
    RequestState.DECODING: {RequestState.WAITING, RequestState.ENDED},
    RequestState.ENDED: set[RequestState](),
}


@dataclass(slots=True)
class Request:
    """One request inside the loop.

    tokens: prompt and generated tokens.
    max_draft_len: the request's largest draft length.
    grammar: that its text follows; None if it is free.
    host_time: of its work beside passes, since the last step.
    num_dear_steps: steps in a row in which that was too much; see `Lifecycle`.
    adapter: name of its LoRA adapter; empty if it has none.
    tenant: see `GenerateParams`; empty if it has none.
    proposers: names of all proposers that may draft for it, in the order of a view's options.
        Empty if the request cannot use speculation.
    slo_s_per_token: see `SequenceView`.
    arrival_s, deadline_s and the other times: by the loop's clock. None if not set or unknown.
    is_in_flight: work was submitted and its last event has not arrived.
    engine_s: time of the last submitted work or received event.
    num_prefill_tokens: tokens that the request had when it was last admitted.
    has_begun: whether its prefill has, since it was last admitted.
    num_computed_tokens: tokens given to the target or found in its cache.
    num_cached: prompt tokens found in the cache when its first prefill began.
    acceptance_group: of requests with similar acceptance; see `core.learn.acceptance`.
    num_steps: decoding steps, including those without drafts.
    proposer: name of the proposer of its latest drafts. Empty before the first.
    """

    sequence: SequenceId
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampling: SamplingParams
    policy: str
    max_draft_len: int
    grammar: Grammar | None = None
    host_time: HostTime = field(default_factory=HostTime)
    adapter: str = ""
    tenant: str = ""
    proposers: tuple[str, ...] = ()
    slo_s_per_token: float | None = None
    acceptance_group: str = ""
    reuses_prefix: bool = True
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    state: RequestState = RequestState.WAITING
    is_in_flight: bool = False
    engine_s: float = 0.0
    num_prefill_tokens: int = 0
    has_begun: bool = False
    num_computed_tokens: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_dear_steps: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    proposer: str = ""
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def rank(self) -> tuple[float, int]:
        """Requests with a lower rank are served first. A request's rank never changes."""
        return self.arrival_s - PRIORITY_WORTH_S * self.priority, self.sequence

    @property
    def scope(self) -> str | None:
        """Requests with the same scope may get drafts from what the others have generated. None: it
        neither gets such drafts nor gives any."""
        return f"{self.adapter}/{self.tenant}" if self.reuses_prefix else None

    @property
    def start(self) -> SequenceStart:
        """Its sequence with all tokens so far, for the target and the proposers."""
        return SequenceStart(
            self.sequence,
            self.tokens,
            self.num_prompt,
            self.sampling,
            reuses_prefix=self.reuses_prefix,
            grammar=self.grammar,
            adapter=self.adapter,
            host_time=self.host_time,
        )

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.num_generated

    @property
    def is_over(self) -> bool:
        return self.state is RequestState.ENDED

    def move_to(self, state: RequestState) -> None:
        """Raises RuntimeError and changes nothing if the transition is not allowed."""
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"request {self.sequence}: {self.state.name} -> {state.name}")
        self.state = state
