"""Drafts the tokens that a grammar forces. They are verified like other drafts, because a model may
write a forced text with other tokens."""

from __future__ import annotations

from collections.abc import Sequence

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Grammar
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.proposer import DraftTask, Proposer, ProposerCapabilities

FORCED = "forced"
"""The only acceptance group of forced tokens."""

INITIAL_RATE = 0.98
"""Acceptance rate of forced tokens before any were seen. A model may write the same text with other
tokens, but SmolLM2 never did in 1,500."""


class GrammarProposer(Proposer):
    """Reads the grammars of sequences, and keeps no state."""

    def __init__(self, max_draft_len: int) -> None:
        self.capabilities = ProposerCapabilities(
            max_draft_len, has_passes=False, acceptance_groups={FORCED: INITIAL_RATE}
        )

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        forced = () if grammar is None else grammar.forced(tokens)
        return min(len(forced), self.capabilities.max_draft_len)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [
            Draft(task.start.grammar.forced(task.tokens)[: task.draft_len])
            if task.start.grammar
            else NO_DRAFT
            for task in tasks
        ]

    def acceptance_group(self, sequence: SequenceId) -> str:
        return FORCED
