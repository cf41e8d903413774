"""What proposers have in common that draft from the target's last state alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Grammar
from smartspec_py.engines.cache.cached_model import history_of
from smartspec_py.engines.decoding.shaping import TokenHistory
from smartspec_py.engines.proposer import DraftTask, Proposer


@dataclass(slots=True)
class LastState:
    """state: [width], from which the last token of a sequence was drawn. history: for sampling;
    None if it does not depend on earlier tokens, or if nothing was drafted yet."""

    state: torch.Tensor
    history: TokenHistory | None = None


class LastStateProposer(Proposer):
    """It knows only sequences whose hidden states were reported."""

    def __init__(self) -> None:
        self._sequences: dict[SequenceId, LastState] = {}

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        return self.capabilities.max_draft_len if sequence in self._sequences else 0

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Keep the last state. The copy frees the states of the whole pass."""
        if hidden is None or not len(hidden):
            return
        state = hidden[-1].float().clone()
        self._sequences.setdefault(sequence, LastState(state)).state = state

    def release(self, sequence: SequenceId) -> None:
        self._sequences.pop(sequence, None)

    def close(self) -> None:
        self._sequences.clear()

    def _able(self, tasks: Sequence[DraftTask]) -> list[DraftTask]:
        """The tasks that get a draft."""
        return [task for task in tasks if task.draft_len and task.sequence in self._sequences]

    def _history(self, task: DraftTask) -> TokenHistory | None:
        known = self._sequences[task.sequence]
        if known.history is None:
            known.history = history_of(task.start)
        if known.history is not None:
            known.history.extend(task.tokens[len(known.history) :])
        return known.history
