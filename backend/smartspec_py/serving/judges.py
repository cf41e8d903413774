"""Judges drafts by how sure their proposer is of them, where a request asks for it.

The plan has said that a sequence drafts; `core.confidence` says, pass by pass, how deep, and in the
end which drafts are worth verifying. Each proposer has a calibrator of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from smartspec_py.core.confidence import (
    ConfidenceCalibrator,
    DraftJudge,
    StepPrices,
    may_be_left_out,
)
from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import NO_DRAFT, ConfidentProposer, Draft, DraftTask, Proposer


class Asked(NamedTuple):
    """A draft that is wanted. kind: of its request. is_judged: whether draft_len is only the most,
    and confidence decides."""

    task: DraftTask
    kind: str
    is_judged: bool


@dataclass(frozen=True, slots=True)
class _Case:
    """What a judge decided and is still to be told the outcome of. num_verified: by sequence, in
    the judge's order."""

    judge: DraftJudge
    num_verified: dict[SequenceId, int]


class Judges:
    """Owned by the loop thread. `propose`, then `observe` once the step's events are there."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = {
            name: cast(ConfidentProposer, proposer)
            for name, proposer in proposers.items()
            if proposer.capabilities.says_confidence
        }
        self._calibrators = {name: ConfidenceCalibrator() for name in self._proposers}
        self._open: list[_Case] = []

    @property
    def awaits_outcome(self) -> bool:
        """Whether there was a `propose` since the last `observe`."""
        return bool(self._open)

    def state(self) -> dict[str, Any]:
        return {name: one.state() for name, one in self._calibrators.items()}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        for name, of_one in state.items():
            if name in self._calibrators:
                self._calibrators[name].restore(of_one, kept)

    def can_judge(self, proposer: str) -> bool:
        return proposer in self._proposers

    def propose(
        self, proposer: str, asked: Sequence[Asked], prices: StepPrices, num_others: int
    ) -> tuple[list[Draft], list[int]]:
        """The drafts that are worth verifying, in order, and how many were made for each.

        prices: of the whole step, in which num_others drafts come from elsewhere.
        """
        tasks = [one.task for one in asked]
        judge = DraftJudge(
            self._calibrators[proposer],
            [one.kind for one in asked],
            [one.is_judged for one in asked],
            [may_be_left_out(task.sampling) for task in tasks],
            max(task.draft_len for task in tasks),
            replace(prices, verify_s=prices.verify_s[num_others:]),
        )
        drafts = self._proposers[proposer].propose(tasks, judge)
        num_drafted = [len(draft.tokens) for draft in drafts]
        num_verified: list[int] = judge.num_to_verify(num_drafted).tolist()
        sequences = [task.sequence for task in tasks]
        self._open.append(_Case(judge, dict(zip(sequences, num_verified, strict=True))))
        return [_first(d, n) for d, n in zip(drafts, num_verified, strict=True)], num_drafted

    def observe(self, num_accepted: Mapping[SequenceId, int]) -> None:
        """Learn from a step. num_accepted: by sequence; who is missing had no outcome."""
        for case in self._open:
            verified = [n if s in num_accepted else 0 for s, n in case.num_verified.items()]
            accepted = [num_accepted.get(sequence, 0) for sequence in case.num_verified]
            case.judge.observe(verified, accepted)
        self._open.clear()


def _first(draft: Draft, count: int) -> Draft:
    if count == len(draft.tokens):
        return draft
    if count == 0:
        return NO_DRAFT
    probs = None if draft.probs is None else draft.probs[:count]
    return Draft(draft.tokens[:count], probs, draft.confidences[:count])
