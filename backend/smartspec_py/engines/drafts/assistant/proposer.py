"""Drafts with an assistant of Gemma 4: see `model`. It has no cache, and reads no prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Grammar
from smartspec_py.engines.cache.blocks import Table
from smartspec_py.engines.cache.cached_model import history_of
from smartspec_py.engines.decoding.shaping import TokenHistory
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.drafts.assistant.runner import AssistantRunner
from smartspec_py.engines.drafts.growing import ChainGroup, GrowingChain
from smartspec_py.engines.proposer import DraftTask, Proposer, ProposerCapabilities
from smartspec_py.engines.runtimes.runner import RowInput


@dataclass(slots=True)
class _Known:
    """state: [1, states_width], of the token before the last known one. history: for sampling; None
    if it does not depend on earlier tokens, or if nothing was drafted yet."""

    state: torch.Tensor
    history: TokenHistory | None = None


class AssistantProposer(Proposer):
    """An assistant. It knows only sequences whose states were reported."""

    def __init__(
        self, runner: AssistantRunner, table_of: Callable[[SequenceId], Table], longest: int
    ) -> None:
        """table_of: the target's blocks of a sequence. longest: the most tokens of a draft."""
        self.runner, self._table_of = runner, table_of
        self._sequences: dict[SequenceId, _Known] = {}
        self.capabilities = ProposerCapabilities(
            longest, reads_hidden=True, has_position_rates=True
        )

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """See `Profilable`."""
        return self.runner.time_pass(batch_size, tokens_per_row, context_len, num_logits)

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        return self.capabilities.max_draft_len if sequence in self._sequences else 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        able = [task for task in tasks if task.draft_len and task.sequence in self._sequences]
        chains = {task.sequence: GrowingChain(task, self._history(task)) for task in able}
        states = {task.sequence: self._sequences[task.sequence].state for task in able}
        group = ChainGroup(list(chains.values()))
        while active := group.active:
            inputs = [self._input(chain, states[chain.task.sequence]) for chain in active]
            out = self.runner.forward(inputs)
            group.take(out.logits)
            for chain, state in zip(active, out.states, strict=True):
                before = states[chain.task.sequence]
                states[chain.task.sequence] = torch.cat([state, before[:, state.shape[1] :]], 1)
        return [
            chains[task.sequence].draft if task.sequence in chains else NO_DRAFT for task in tasks
        ]

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Keep the last state. The copy frees the states of the whole pass."""
        if hidden is None or not len(hidden):
            return
        state = hidden[-1:].float().clone()
        self._sequences.setdefault(sequence, _Known(state)).state = state

    def release(self, sequence: SequenceId) -> None:
        self._sequences.pop(sequence, None)

    def close(self) -> None:
        self._sequences.clear()

    def _input(self, chain: GrowingChain, state: torch.Tensor) -> RowInput:
        """All drafts are at the position of the last known token."""
        known, table = chain.task.tokens, self._table_of(chain.task.sequence)
        token = chain.next_tokens[-1] if chain.tokens else known[-1]
        return RowInput(table.row, len(known) - 1, (token,), 1, states=state, blocks=table.used)

    def _history(self, task: DraftTask) -> TokenHistory | None:
        known = self._sequences[task.sequence]
        if known.history is None:
            known.history = history_of(task.start)
        if known.history is not None:
            known.history.extend(task.tokens[len(known.history) :])
        return known.history
