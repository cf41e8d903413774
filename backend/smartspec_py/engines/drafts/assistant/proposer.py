"""Drafts with an assistant of Gemma 4: see `model`. It has no cache, and reads no prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.cache.blocks import Table
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.drafts.assistant.runner import AssistantRunner
from smartspec_py.engines.drafts.growing import ChainGroup, GrowingChain
from smartspec_py.engines.drafts.last_state import LastStateProposer
from smartspec_py.engines.proposer import DraftTask, ProposerCapabilities
from smartspec_py.engines.runtimes.runner import RowInput


class AssistantProposer(LastStateProposer):
    """An assistant. A state has a token's keys and values, too, see `RunnerConfig.gives_keys`."""

    def __init__(
        self, runner: AssistantRunner, table_of: Callable[[SequenceId], Table], longest: int
    ) -> None:
        """table_of: the target's blocks of a sequence. longest: the most tokens of a draft."""
        super().__init__()
        self.runner, self._table_of = runner, table_of
        self.capabilities = ProposerCapabilities(
            longest, reads_hidden=True, has_position_rates=True
        )

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """See `Profilable`."""
        return self.runner.time_pass(batch_size, tokens_per_row, context_len, num_logits)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        able = self._able(tasks)
        chains = {task.sequence: GrowingChain(task, self._history(task)) for task in able}
        states = {task.sequence: self._sequences[task.sequence].state[None] for task in able}
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

    def _input(self, chain: GrowingChain, state: torch.Tensor) -> RowInput:
        """All drafts are at the position of the last known token."""
        known, table = chain.task.tokens, self._table_of(chain.task.sequence)
        token = chain.next_tokens[-1] if chain.tokens else known[-1]
        return RowInput(table.row, len(known) - 1, (token,), 1, states=state, blocks=table.used)
