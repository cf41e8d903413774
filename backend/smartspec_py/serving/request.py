"""A request: what was asked, where it stands, and which moves are allowed.

The loop thread owns every `Request`; `StepLoop.apply` and its helpers are the only writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.serving.text import TextStream


class ErrorCode(Enum):
    """How an error reaches the client: HTTP 400, 503 and 500, gRPC's codes of the same names."""

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
    server's limit. policy: None is the server's.
    """

    text: str
    max_tokens: int
    stream: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_words: tuple[str, ...] = ()
    end_id: int | None = None
    exclude_input: bool = True
    num_draft_tokens: int | None = None
    policy: str | None = None


class RequestState(Enum):
    WAITING = auto()  # in the queue, holds nothing
    PREFILLING = auto()  # holds a row; its prompt is being read
    DECODING = auto()  # generates
    FINISHED = auto()  # by itself: end token, stop word, length
    CANCELLED = auto()  # by the client or by shutdown
    FAILED = auto()


_MOVES = {
    RequestState.WAITING: {RequestState.PREFILLING, RequestState.CANCELLED, RequestState.FAILED},
    RequestState.PREFILLING: {
        RequestState.DECODING,
        RequestState.FINISHED,
        RequestState.CANCELLED,
        RequestState.FAILED,
    },
    RequestState.DECODING: {
        RequestState.FINISHED,
        RequestState.CANCELLED,
        RequestState.FAILED,
    },
    RequestState.FINISHED: set(),
    RequestState.CANCELLED: set(),
    RequestState.FAILED: set(),
}


@dataclass(slots=True)
class Request:
    """One request inside the loop.

    tokens: prompt and generated tokens. max_draft_len: the request's own limit on drafts.
    is_in_flight: work of it was submitted and its last event has not come.
    num_prefilled: prompt tokens handed to the target.
    stops: watches for stop words; None where there are none.
    num_steps: decoding steps, those without drafts included.
    """

    sequence: SequenceId
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampling: SamplingParams
    policy: str
    max_draft_len: int
    stops: TextStream | None = None
    state: RequestState = RequestState.WAITING
    is_in_flight: bool = False
    num_prefilled: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.num_generated

    @property
    def is_over(self) -> bool:
        return not _MOVES[self.state]

    def move_to(self, state: RequestState) -> None:
        """Raises RuntimeError, and changes nothing, where the table has no such move."""
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"request {self.sequence}: {self.state.name} -> {state.name}")
        self.state = state

    def next_chunk(self, max_tokens: int) -> Sequence[int]:
        """The next prompt tokens to read, at most max_tokens."""
        end = min(self.num_prefilled + max_tokens, self.num_prompt)
        return self.tokens[self.num_prefilled : end]
