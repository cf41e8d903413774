"""The interface between the step loop and the engine that runs the model.

A target takes work with `submit` and reports results with `poll`. It never calls back, and it
starts no threads. A sequence is *in flight* from `submit` until one of its events has `is_last`.
The loop treats all engines alike:
- PyTorch runs all submitted work in the next poll.
- TensorRT-LLM keeps a `Decode` burst in flight over many polls while other sequences verify.

Rules of a target:
- A sequence starts with `begin`, which returns the number of its leading tokens that are cached.
  The first `Prefill` starts after these tokens. The event of the last chunk has the next token.
- The target keeps the tokens of the sequence: those given to `begin` and those it generated.
  `Verify` and `Decode` continue after these tokens.
- `Verify(draft)` generates the accepted tokens and one more: 1 to k+1 tokens. Of a tree, tokens of
  one path are accepted.
- `Decode(max_tokens)` generates up to max_tokens, in one event or in several.
- `cancel` is asynchronous. Work in flight may still cause events, and one of them has `is_last`.
- `release` frees all resources of a sequence. Call it only when the sequence is not in flight.
- A preempted sequence starts again later with `begin`, with all tokens that it has by then.
- A failure of one sequence, such as logits that are not finite, is an event with `failure`,
  without tokens and with `is_last`. That request fails, and the others continue. An exception
  means that the engine failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.types import (
    FinishReason,
    PromptLogProbs,
    SamplingParams,
    SequenceId,
    TokenLogProb,
)
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.host_time import HostTime


class Prefill(NamedTuple):
    """Process known tokens [start, start + len(tokens)). `is_last` also generates the next one."""

    sequence: SequenceId
    tokens: tuple[int, ...]
    start: int
    is_last: bool


class Verify(NamedTuple):
    """Check a draft, which follows the last token of the sequence. It has at least one token."""

    sequence: SequenceId
    draft: Draft


class Decode(NamedTuple):
    """Generate up to max_tokens without drafts."""

    sequence: SequenceId
    max_tokens: int


Work = Prefill | Verify | Decode


class Failure(NamedTuple):
    """Why a sequence cannot continue, for the client. field: of the request, if the request is the
    cause."""

    reason: str
    field: str = ""


class Event(NamedTuple):
    """The result that one poll reports for one sequence.

    tokens: the new tokens, in order.
    num_drafted, num_accepted: drafts of the verification; 0 for other work. A tree counts as a
        draft of its longest path.
    is_last: the submitted work is done, and the sequence can take the next work.
    finish: set if the engine itself found the end (end token or length).
    pass_s: seconds of the model pass; 0.0 if the engine cannot measure it. The pass time of a step
        is the maximum over its events.
    failure: None if the sequence can continue.
    log_probs: of each of `tokens`; empty if the sequence did not ask for them.
    prompt_log_probs: of the part of the prompt that was read; None if not asked for.
    hidden: states of the target for the proposers; None if it was not built to return them. Either
        its last hidden states [len(tokens), width], from which the tokens were drawn. Or states of
        its layers [n, width], one for each token that this pass added to the sequence: the chunk of
        a prompt, or the last known token and the accepted drafts.
    """

    sequence: SequenceId
    tokens: tuple[int, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    is_last: bool = True
    finish: FinishReason | None = None
    pass_s: float = 0.0
    failure: Failure | None = None
    log_probs: tuple[TokenLogProb, ...] = ()
    hidden: Any = None
    prompt_log_probs: PromptLogProbs | None = None

    @property
    def without_tensors(self) -> Event:
        """The event without hidden states and log-probabilities, which need memory."""
        if self.hidden is None and not self.log_probs and self.prompt_log_probs is None:
            return self
        return self._replace(hidden=None, log_probs=(), prompt_log_probs=None)


@dataclass(frozen=True, slots=True)
class TargetCapabilities:
    """What a target can do. The loop reads this and never checks the type of the engine.

    max_sequences: sequences that it holds at the same time.
    max_context_len: prompt and generated tokens of one sequence.
    max_draft_len: drafts of one sequence that it verifies in one pass; the longest path of a tree.
    max_decode_tokens: the largest `Decode`. Its tokens come in later polls, while the loop runs
        other steps. 1 if every token is a step of the loop.
    max_prefill_tokens: the largest `Prefill` chunk; None if it takes only whole prompts.
    verifies_sampling: whether it verifies all kinds of sampling exactly. If not, only plain greedy
        text has drafts.
    vocab_size: token ids that it accepts and generates are below this number.
    bytes_per_token: cache bytes per token of a sequence; 0 if unknown.
    block_len: a sequence takes memory for so many tokens at a time.
    cache_bytes: memory for the caches of target and proposers together; None means room for
        max_sequences of max_context_len.
    max_cache_tokens: the same for the target's cache alone, in tokens.
    unsupported: request fields (names in the API) that must keep their default values. Other
        values are rejected.
    adapters: names of the LoRA adapters that a sequence may have.
    """

    max_sequences: int
    max_context_len: int
    max_draft_len: int
    max_decode_tokens: int
    max_prefill_tokens: int | None
    verifies_sampling: bool
    vocab_size: int
    bytes_per_token: int = 0
    block_len: int = 1
    cache_bytes: int | None = None
    max_cache_tokens: int | None = None
    unsupported: frozenset[str] = frozenset()
    adapters: tuple[str, ...] = ()

    def can_verify(self, sampling: SamplingParams) -> bool:
        return not self.why_unverified(sampling)

    def why_unverified(self, sampling: SamplingParams) -> str:
        """Why drafts of such text cannot be verified; empty if they can."""
        if self.verifies_sampling:
            return ""
        if sampling.log_probs:
            return "this engine returns log-probabilities of text without drafts only"
        if sampling.is_plain_greedy:
            return ""
        return "this engine verifies drafts of plain greedy text only"


class Grammar(Protocol):
    """Follows the text of one sequence; see `engines.structured.grammar.GrammarState`."""

    @property
    def error(self) -> str: ...

    def forbidden(
        self, tokens: Sequence[int], drafts: tuple[int, ...], end_tokens: Sequence[int]
    ) -> NDArray[np.bool_] | None: ...

    def num_allowed(self, tokens: Sequence[int], drafts: Sequence[int]) -> int: ...

    def forced(self, tokens: Sequence[int]) -> tuple[int, ...]: ...


class SequenceStart(NamedTuple):
    """What a target or a proposer must know of a sequence to begin it.

    tokens: all known ones; the first num_prompt are its prompt. reuses_prefix: whether it and
    other sequences of the same adapter may use each other's cached tokens. grammar: of its text,
    with `SamplingParams.is_guided`. adapter: one of `TargetCapabilities.adapters`, or empty.
    host_time: where its work beside passes is measured; None if nobody reads it.
    """

    sequence: SequenceId
    tokens: Sequence[int]
    num_prompt: int
    sampling: SamplingParams
    reuses_prefix: bool = True
    grammar: Grammar | None = None
    adapter: str = ""
    host_time: HostTime | None = None


class Target(ABC):
    """The model that generates the served text.

    Subclasses inherit that passes need no preparation, and that sequences share no memory.
    """

    capabilities: TargetCapabilities

    @property
    def warm_shapes(self) -> Collection[int]:
        """Numbers of tokens that a pass can have without `CostModel.shape_change_s`. Empty if the
        engine prepares for none."""
        return ()

    @abstractmethod
    def begin(self, start: SequenceStart) -> int:
        """Make room for a sequence.

        Returns the number of leading tokens that are cached and need no prefill. It is less than
        the number of tokens, and 0 without reuses_prefix.
        """

    def find_more(self, sequence: SequenceId) -> int | None:
        """Look again for cached tokens, for a sequence whose prefill has not begun. Returns the
        number that are cached now, as `begin`; None if it is the same."""
        return None

    def num_common(
        self,
        tokens: Sequence[int],
        num_prompt: int,
        adapter: str,
        gone: Collection[SequenceId] = (),
    ) -> int:
        """Tokens in the cache that a new sequence would use together with those that run, without
        those of `gone`."""
        return 0

    def num_shared_tokens(self, gone: Collection[SequenceId] = ()) -> int:
        """Tokens by which the cache would be fuller if no two sequences shared any, of all
        sequences but those of `gone`."""
        return 0

    @abstractmethod
    def submit(self, work: Sequence[Work]) -> None: ...

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Event]:
        """Run or await the submitted work; return at once if nothing is in flight."""

    @abstractmethod
    def cancel(self, sequence: SequenceId) -> None: ...

    @abstractmethod
    def release(self, sequence: SequenceId) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


@runtime_checkable
class Profilable(Protocol):
    """An engine whose passes can be timed before it serves requests."""

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Seconds of one pass on arbitrary tokens. The state of the engine does not change.

        num_logits: compute logits for this many last positions of each row; None means all.
        """
        ...
