"""The Protocols between the step loop and what executes it.

A target takes work by `submit` and reports by `poll`; it never calls back and starts no threads.
PyTorch runs all that was submitted in the next poll; TensorRT-LLM keeps a `Decode` burst in flight
over many polls while other sequences verify. The loop treats both alike: a sequence is *in flight*
from `submit` until an event of it has `is_last`.

Rules of a target:
- A sequence begins with `begin`, which may find that leading tokens of it are cached; its first
  `Prefill` starts behind those. When its last chunk is done, the event carries the next token.
- The target keeps the sequence's tokens: what it was given in `begin`, and what it emitted.
  `Verify` and `Decode` go on from there.
- `Verify(drafts)` emits the accepted drafts and one token of the target's own: 1 to k+1 tokens.
- `Decode(max_tokens)` emits up to max_tokens, in one event or in many.
- `cancel` is asynchronous: events of the work in flight may still come, one of them `is_last`.
- `release` frees what the sequence holds; it is called when nothing of it is in flight. A sequence
  that was preempted begins again later, with the tokens that it has by then.
- A failure that concerns one sequence is an event with `error`; an exception is the engine's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from smartspec_py.core.types import FinishReason, SamplingParams, SequenceId, Verification


class Prefill(NamedTuple):
    """Read known tokens [start, start + len(tokens)); `is_last` also draws the next token."""

    sequence: SequenceId
    tokens: tuple[int, ...]
    start: int
    is_last: bool


class Verify(NamedTuple):
    """Check the drafts, which follow the last token of the sequence. Never empty.

    draft_probs: see `Draft.probs`; wanted where the sequence is verified by rejection.
    """

    sequence: SequenceId
    drafts: tuple[int, ...]
    draft_probs: Any = None


class Decode(NamedTuple):
    """Generate up to max_tokens without drafts."""

    sequence: SequenceId
    max_tokens: int


Work = Prefill | Verify | Decode


class Event(NamedTuple):
    """What one poll reports of one sequence.

    tokens: newly generated, in order. num_drafted, num_accepted: of the verification, 0 elsewhere.
    is_last: the work that was submitted is done; the sequence is ready for its next.
    finish: set where the engine itself saw the end (end token, length).
    pass_s: seconds of the pass that produced it, 0.0 where the engine cannot tell. The pass of a
        step is the longest of its events.
    error: why the sequence cannot go on; None otherwise.
    log_probs: log-probability of each of `tokens` under the target's own logits; empty where the
        sequence did not ask.
    hidden: the target's last hidden states [len(tokens), width] from which the tokens were drawn;
        None where the target was not built to give them.
    """

    sequence: SequenceId
    tokens: tuple[int, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    is_last: bool = True
    finish: FinishReason | None = None
    pass_s: float = 0.0
    error: str | None = None
    log_probs: tuple[float, ...] = ()
    hidden: Any = None


@dataclass(frozen=True, slots=True)
class TargetCapabilities:
    """What a target can do; the loop asks this, never the engine's type.

    max_sequences: sequences it holds at once.
    max_context_len: prompt and generated tokens of a sequence.
    max_draft_len: drafts it verifies at once.
    max_decode_tokens: largest `Decode` burst; 1 where every token is a step of the loop.
    max_prefill_tokens: largest `Prefill` chunk; None where it takes prompts whole.
    verifies_sampling: whether it verifies exactly whatever is not plain greedy text; if not, such
        requests run without drafts.
    verifies_rejection: whether it verifies, without verifies_sampling, text that is drawn by
        temperature, top_k and top_p alone, by rejection, of drafts that come with their
        probabilities.
    vocab_size: tokens that it can be given and can emit.
    bytes_per_token: of cache, for each token of a sequence; 0 where it cannot tell.
    max_cache_tokens: tokens of all sequences that it has room for; None: as many as
        max_sequences of max_context_len.
    unsupported: fields of a request, by their names on the wire, that it cannot serve other than at
        their defaults; such requests are refused.
    """

    max_sequences: int
    max_context_len: int
    max_draft_len: int
    max_decode_tokens: int
    max_prefill_tokens: int | None
    verifies_sampling: bool
    vocab_size: int
    bytes_per_token: int = 0
    max_cache_tokens: int | None = None
    unsupported: frozenset[str] = frozenset()
    verifies_rejection: bool = False

    def can_verify(self, sampling: SamplingParams) -> bool:
        return not self.why_unverified(sampling)

    def why_unverified(self, sampling: SamplingParams) -> str:
        """Empty where drafts of such text can be verified."""
        if self.verifies_sampling or sampling.is_plain_greedy:
            return ""
        if not self.verifies_rejection:
            return "this engine verifies drafts of plain greedy text only"
        if sampling.shapes_logits or sampling.min_p:
            return "this engine verifies drafts with temperature, top_k and top_p alone"
        if sampling.verification is not Verification.REJECTION:
            return "this engine verifies sampled text by rejection only: set verification to it"
        return ""


class Target(Protocol):
    """The model whose text is served."""

    @property
    def capabilities(self) -> TargetCapabilities: ...

    def begin(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        num_prompt: int,
        sampling: SamplingParams,
        reuses_prefix: bool = True,
    ) -> int:
        """Make room for a sequence with these known tokens, of which num_prompt are its prompt.

        Returns how many leading tokens need not be read because they are cached, fewer than all;
        0 unless reuses_prefix.
        """
        ...

    def submit(self, work: Sequence[Work]) -> None: ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Run or await what was submitted; returns at once when nothing is in flight."""
        ...

    def cancel(self, sequence: SequenceId) -> None: ...

    def release(self, sequence: SequenceId) -> None: ...

    def close(self) -> None: ...


class DraftTask(NamedTuple):
    """Ask for `draft_len` tokens that may follow `tokens` (all known tokens of the sequence, the
    first num_prompt of them its prompt). reuses_prefix: see `Target.begin`."""

    sequence: SequenceId
    tokens: Sequence[int]
    num_prompt: int
    draft_len: int
    sampling: SamplingParams
    reuses_prefix: bool = True


class Draft(NamedTuple):
    """Drafted tokens. probs: [len(tokens), vocab_size], the distribution that each was drawn from,
    in the form of the target's engine; None where they were not drawn but chosen."""

    tokens: tuple[int, ...] = ()
    probs: Any = None


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class ProposerCapabilities:
    """max_draft_len: the most tokens it drafts at once; 0 where it never drafts.
    has_passes: whether drafting takes passes of a model, one a token.
    bytes_per_token: of cache, for each token that it has read.
    reads_hidden: whether it wants the hidden states of every event.
    has_hindsight: whether it is a `HindsightProposer`.
    cohorts: acceptance that is assumed at first of each cohort that its drafts fall into; empty
        where they are told apart by their requests alone. See `HindsightProposer.cohort`.
    gives_probs: whether drafts of sampled text come with the probabilities that they were drawn by,
        where the target needs them; see `TargetCapabilities.verifies_rejection`.
    """

    max_draft_len: int
    has_passes: bool = True
    bytes_per_token: int = 0
    reads_hidden: bool = False
    gives_probs: bool = False
    has_hindsight: bool = False
    cohorts: Mapping[str, float] = field(default_factory=dict)


SHORT_LAG = 4
"""Tokens that a draft model reads on the way, in a pass that it makes anyway: so few are no lag to
the planner. More of them take a pass of their own."""


class Proposer(Protocol):
    """Whatever drafts the target's next tokens. A wrong draft costs time, never correctness."""

    @property
    def capabilities(self) -> ProposerCapabilities: ...

    def num_available(self, sequence: SequenceId, tokens: Sequence[int]) -> int:
        """The most tokens that it could draft now after these; 0 where it has none."""
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Drafts for each task, in order; each may be shorter than asked, or empty."""
        ...

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Say how many tokens of the sequence's last drafts were kept.

        Called after a verification of its own drafts; with hidden states after every event.
        """
        ...

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        """Tokens that `propose` would have to read first because it missed them."""
        ...

    def release(self, sequence: SequenceId) -> None:
        """Forget the sequence; nothing happens where it is not known."""
        ...

    def close(self) -> None: ...


class HindsightProposer(Proposer, Protocol):
    """One whose drafts cost so little that they can be held against a step that did without."""

    def hindsight(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        """Of the drafts that it had after `tokens`, at most as many as were generated then: how
        many there were, and how many would have been accepted."""
        ...

    def cohort(self, sequence: SequenceId) -> str:
        """One of its `cohorts`: that of the drafts that it has now for the sequence."""
        ...


class Profilable(Protocol):
    """An engine whose passes can be timed before it serves."""

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Seconds of one pass on made-up tokens; leaves no trace in the engine.

        num_logits: the last positions of each row whose logits are wanted; None: all of them.
        """
        ...
