"""A proposer whose exceptions cost only the drafts of the sequences that caused them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Grammar, SequenceStart
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.proposer import DraftTask, Proposer
from smartspec_py.faults import ENDS

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedProposer(Proposer):
    """Passes calls on. After an exception, the sequence has no drafts until it is released. Its
    text is not affected, since no draft changes a text."""

    def __init__(self, name: str, proposer: Proposer) -> None:
        """name: for the log."""
        self._name, self._proposer = name, proposer
        self.capabilities = proposer.capabilities
        self._given_up: set[SequenceId] = set()
        self._has_logged = False

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        return self._asked(0, self._proposer.num_available, sequence, tokens, grammar)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """If all together fail, each task is tried alone, to find the one that fails. So it is if a
        sequence has failed after its drafts were planned."""
        if self._given_up.isdisjoint(task.sequence for task in tasks):
            try:
                return self._proposer.propose(tasks)
            except ENDS:
                raise
            except BaseException as error:
                self._log("drafts for all together failed", error)
        return [self._asked(NO_DRAFT, self._propose_alone, task.sequence, task) for task in tasks]

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        self._asked(None, self._proposer.observe, sequence, num_accepted, hidden)

    def counterfactual(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        return self._asked((0, 0), self._proposer.counterfactual, sequence, tokens, generated)

    def acceptance_group(self, sequence: SequenceId) -> str:
        first = next(iter(self.capabilities.acceptance_groups), "")
        return self._asked(first, self._proposer.acceptance_group, sequence)

    def draft_prefill_len(self, sequence: SequenceId, context_len: int) -> int:
        return self._asked(0, self._proposer.draft_prefill_len, sequence, context_len)

    def num_reusable(self, start: SequenceStart) -> int:
        return self._asked(0, lambda _: self._proposer.num_reusable(start), start.sequence)

    def num_cached(self, sequence: SequenceId, context_len: int) -> int:
        return self._asked(0, self._proposer.num_cached, sequence, context_len)

    def learn(
        self, sequence: SequenceId, tokens: Sequence[int], num_prompt: int, scope: str
    ) -> None:
        self._asked(None, self._proposer.learn, sequence, tokens, num_prompt, scope)

    def release(self, sequence: SequenceId) -> None:
        self._asked(None, self._proposer.release, sequence)
        self._given_up.discard(sequence)

    def _propose_alone(self, sequence: SequenceId, task: DraftTask) -> Draft:
        (draft,) = self._proposer.propose([task])
        return draft

    def _asked(
        self, otherwise: T, call: Callable[..., T], sequence: SequenceId, *arguments: Any
    ) -> T:
        """The result of a call about one sequence; `otherwise` if it has failed."""
        if sequence not in self._given_up:
            try:
                return call(sequence, *arguments)
            except ENDS:
                raise
            except BaseException as error:
                self._give_up(sequence, error)
        return otherwise

    def _give_up(self, sequence: SequenceId, error: BaseException) -> None:
        self._log(f"sequence {sequence} has no drafts any more", error)
        self._given_up.add(sequence)
        try:
            self._proposer.release(sequence)
        except ENDS:
            raise
        except BaseException as another:
            self._log(f"sequence {sequence} cannot be released", another)

    def _log(self, what: str, error: BaseException) -> None:
        """With a traceback once: some faults come back at every step."""
        logger.error("%s: %s", self._name, what, exc_info=None if self._has_logged else error)
        self._has_logged = True
