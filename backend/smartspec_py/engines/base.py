"""The Protocols between the step loop and what executes it.

A target takes work by `submit` and reports by `poll`; it never calls back and starts no threads.
PyTorch runs all that was submitted in the next poll; TensorRT-LLM keeps a `Decode` burst in flight
over many polls while other sequences verify. The loop treats both alike: a sequence is *in flight*
from `submit` until an event of it has `is_last`.

Rules of a target:
- A sequence begins with `Prefill(start=0)`. When its last chunk is done, the event carries the
  first generated token.
- The target keeps the sequence's tokens: what it was given in `Prefill`, and what it emitted.
  `Verify` and `Decode` go on from there.
- `Verify(drafts)` emits the accepted drafts and one token of the target's own: 1 to k+1 tokens.
- `Decode(max_tokens)` emits up to max_tokens, in one event or in many.
- `cancel` is asynchronous: events of the work in flight may still come, one of them `is_last`.
- `release` frees what the sequence holds; it is called once, when nothing of it is in flight.
- A failure that concerns one sequence is an event with `error`; an exception is the engine's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from smartspec_py.core.types import FinishReason, SamplingParams, SequenceId


@dataclass(frozen=True, slots=True)
class Prefill:
    """Read prompt tokens [start, start + len(tokens)); `is_last` also draws the first token."""

    sequence: SequenceId
    tokens: tuple[int, ...]
    start: int
    is_last: bool
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Verify:
    """Check the drafts, which follow the last token of the sequence. Never empty."""

    sequence: SequenceId
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Generate up to max_tokens without drafts."""

    sequence: SequenceId
    max_tokens: int


Work = Prefill | Verify | Decode


@dataclass(frozen=True, slots=True)
class Event:
    """What one poll reports of one sequence.

    tokens: newly generated, in order. num_drafted, num_accepted: of the verification, 0 elsewhere.
    is_last: the work that was submitted is done; the sequence is ready for its next.
    finish: set where the engine itself saw the end (end token, length).
    pass_s: seconds of the pass that produced it, 0.0 where the engine cannot tell.
    error: why the sequence cannot go on; None otherwise.
    """

    sequence: SequenceId
    tokens: tuple[int, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    is_last: bool = True
    finish: FinishReason | None = None
    pass_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TargetCapabilities:
    """What a target can do; the loop asks this, never the engine's type.

    max_sequences: sequences it holds at once.
    max_context_len: prompt and generated tokens of a sequence.
    max_draft_len: drafts it verifies at once.
    max_decode_tokens: largest `Decode` burst; 1 where every token is a step of the loop.
    max_prefill_tokens: largest `Prefill` chunk; None where it takes prompts whole.
    verifies_sampling: whether it verifies temperature > 0 exactly; if not, such requests run
        without drafts.
    vocab_size: tokens that it can be given and can emit.
    """

    max_sequences: int
    max_context_len: int
    max_draft_len: int
    max_decode_tokens: int
    max_prefill_tokens: int | None
    verifies_sampling: bool
    vocab_size: int


class Target(Protocol):
    """The model whose text is served."""

    @property
    def capabilities(self) -> TargetCapabilities: ...

    def submit(self, work: Sequence[Work]) -> None: ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Run or await what was submitted; returns at once when nothing is in flight."""
        ...

    def cancel(self, sequence: SequenceId) -> None: ...

    def release(self, sequence: SequenceId) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Ask for `draft_len` tokens that may follow `tokens` (all known tokens of the sequence)."""

    sequence: SequenceId
    tokens: Sequence[int]
    draft_len: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ProposerCapabilities:
    """max_draft_len: the most tokens it drafts at once; 0 where it never drafts."""

    max_draft_len: int


class Proposer(Protocol):
    """Whatever guesses the target's next tokens. A wrong guess costs time, never correctness."""

    @property
    def capabilities(self) -> ProposerCapabilities: ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        """Drafts for each task, in order; each may be shorter than asked, or empty."""
        ...

    def observe(self, sequence: SequenceId, num_accepted: int) -> None:
        """Say how many tokens of the sequence's last drafts were kept."""
        ...

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        """Tokens that `propose` would have to read first because it missed them."""
        ...

    def release(self, sequence: SequenceId) -> None: ...

    def close(self) -> None: ...


class Profilable(Protocol):
    """An engine whose passes can be timed before it serves."""

    def time_pass(self, num_rows: int, tokens_per_row: int, context_len: int) -> float:
        """Seconds of one pass on made-up tokens; leaves no trace in the engine."""
        ...
