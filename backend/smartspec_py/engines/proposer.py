"""The interface of proposers, which draft tokens for the target to verify."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Grammar, SequenceStart
from smartspec_py.engines.draft import Draft


class DraftTask(NamedTuple):
    """A request for up to `draft_len` draft tokens that follow the tokens of `start`.

    start: the sequence. A proposer that has a cache begins it with its first task.
    depth: of a tree of up to `draft_len` drafts, its longest path; 0 for a chain.
    """

    start: SequenceStart
    draft_len: int
    depth: int = 0

    @property
    def sequence(self) -> SequenceId:
        return self.start.sequence

    @property
    def tokens(self) -> Sequence[int]:
        """All known ones."""
        return self.start.tokens


@dataclass(frozen=True, slots=True)
class ProposerCapabilities:
    """max_draft_len: the most tokens of one draft; 0 if it never drafts.
    max_context_len: known tokens and drafts of a sequence that it supports; None if it has no limit
        of its own. It drafts nothing beyond.
    has_passes: whether drafting runs a model, with one pass for each token of a chain, or each
        depth of a tree.
    bytes_per_token: cache bytes per token that it has processed, in the memory of the target's
        cache; 0 if its cache is elsewhere.
    reads_hidden: whether it needs the hidden states of every event.
    has_position_rates: whether acceptance depends on the position of a draft, as with heads, whose
        guesses get worse with each one.
    learns_texts: whether it is shown the text of each sequence with a scope, see `Proposer.learn`.
    acceptance_groups: the initial acceptance rate of each group of drafts; empty if drafts are not
        divided into groups. See `Proposer.acceptance_group`.
    draft_s: seconds to draft for one sequence alone, and for each further one together with it, at
        any draft length. Used only without has_passes.
    tree_context_len: known tokens and drafts of a sequence with a tree; None if it drafts no trees,
        or the target does not verify them.
    tree_s: seconds that each depth of a tree takes longer than a draft of a chain, for one sequence
        alone, and for each further one together with it.
    """

    max_draft_len: int
    has_passes: bool = True
    bytes_per_token: int = 0
    reads_hidden: bool = False
    has_position_rates: bool = False
    learns_texts: bool = False
    acceptance_groups: Mapping[str, float] = field(default_factory=dict)
    draft_s: tuple[float, float] = (0.0, 0.0)
    max_context_len: int | None = None
    tree_context_len: int | None = None
    tree_s: tuple[float, float] = (0.0, 0.0)


SHORT_PREFILL = 4
"""A draft model reads so many missed tokens in a pass that it makes anyway, so the planner does not
charge for them. A longer draft prefill needs passes of its own."""


class Proposer(ABC):
    """Drafts the next tokens of the target. A wrong draft costs time but never changes the text.

    Subclasses inherit what a proposer without a model does in most methods: nothing.
    """

    capabilities: ProposerCapabilities
    max_prefill_len: int = sys.maxsize
    """Most missed tokens that `propose` processes in a call, for all sequences together. Sequences
    that still lack some have no drafts in this call. The loop sets it, so that other requests do
    not wait for long."""

    @abstractmethod
    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        """The most tokens that it can draft now after these tokens; 0 if none. grammar: of the
        sequence."""

    @abstractmethod
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """One draft per task, in order; each may be shorter than requested, or empty. A proposer
        with a cache may first process tokens that it has missed, see `max_prefill_len`."""

    def observe(  # noqa: B027
        self, sequence: SequenceId, num_accepted: int, hidden: Any = None
    ) -> None:
        """Report how many tokens of the last drafts of the sequence were accepted.

        Called after each verification of its own drafts. A proposer with `reads_hidden` is called
        after every event with hidden states.
        """

    def counterfactual(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        """Compare the drafts that it had after `tokens` with the tokens that were then generated,
        in a step that did not use them.

        Returns the number of drafts, at most len(generated), and how many of them would have been
        accepted; (0, 0) if it does not know its drafts.
        """
        return 0, 0

    def acceptance_group(self, sequence: SequenceId) -> str:
        """The name, in `acceptance_groups`, of the group of its current drafts for the sequence.
        Called only if there are groups."""
        return ""

    def draft_prefill_len(self, sequence: SequenceId, context_len: int) -> int:
        """The number of known tokens that `propose` must process before it can draft. If
        it has not begun the sequence, `num_reusable` of them need no processing."""
        return 0

    def num_reusable(self, start: SequenceStart) -> int:
        """The number of leading tokens that `propose` will find in its cache, of a sequence that it
        has not begun; 0 if it has."""
        return 0

    def num_cached(self, sequence: SequenceId, context_len: int) -> int:
        """Tokens of the sequence in its cache."""
        return max(0, context_len - 1 - self.draft_prefill_len(sequence, context_len))

    def learn(  # noqa: B027
        self, sequence: SequenceId, tokens: Sequence[int], num_prompt: int, scope: str
    ) -> None:
        """See what the sequence has generated so far; its drafts and those of other sequences of
        the same scope may come from it. Called before `num_available`, in steps without drafts too,
        and before `release`."""

    def release(self, sequence: SequenceId) -> None:  # noqa: B027
        """Forget the sequence; do nothing if it is unknown."""

    def time_drafts(self, max_sequences: int) -> None:  # noqa: B027
        """Measure the seconds of its capabilities that are not those of passes. Called before it
        knows sequences, once passes are measured."""

    def close(self) -> None:  # noqa: B027
        """Free everything."""
