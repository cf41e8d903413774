"""Drafts with an EAGLE-3 head: a draft model that also reads hidden states of the target.

The head shares everything with the draft model: its cache, how it prefills tokens that it
missed, and how it drafts. In addition, each token that it reads needs the target's states at the
token before it. They come with the target's events and are kept until the head reads their tokens.

States are missing for tokens that the target took from its prefix cache. The head then takes its
own keys of these tokens from its cache, and reads the first token behind them with a state of
zeros. If it never read them, it begins at the first token with a state and never sees the tokens
before it. It also does so after its cache was dropped, and if more than KEPT_STATES tokens wait.
This lowers acceptance but changes no text.

For a tree, each pass after the first reads again all nodes of earlier depths that guesses follow:
a token sees all keys before its input, so other branches must be in the same input. These nodes are
few, and the head has one layer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from smartspec_py.core.plan.trees import MAX_NODES
from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.base import Grammar, SequenceStart
from smartspec_py.engines.cache.blocks import Memory
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.drafts.draft_model import DraftModelProposer, DraftSequence
from smartspec_py.engines.drafts.growing import (
    DraftGroup,
    GrowingTree,
    TreeGroup,
    fastest_s,
    tree_s,
)
from smartspec_py.engines.proposer import DraftTask
from smartspec_py.engines.runtimes.runner import RowInput, Runner

TIMED_DEPTH = 3
"""Of chains and trees that are timed at the start."""

KEPT_STATES = 2048
"""States of a sequence that wait for the head: 48 MiB for a target of width 4,096 in bfloat16."""

MAX_PARTS = 32
"""Passes whose states of a sequence are kept apart. More are copied together."""


@dataclass(slots=True)
class _States:
    """The target's states that the head has not read, [n, width] each. The last one is that of the
    token before the last known one. first: the first token that the head sees. It is at least 1,
    because token 0 has no state before it."""

    parts: deque[torch.Tensor] = field(default_factory=deque)
    num: int = 0
    first: int = 1

    def add(self, states: torch.Tensor) -> None:
        self.parts.append(states)
        self.num += len(states)
        while self.num - len(self.parts[0]) >= KEPT_STATES:
            self.num -= len(self.parts.popleft())
        if len(self.parts) > MAX_PARTS:  # each part keeps the states of all rows of its pass
            merged = torch.cat([*self.parts])[-KEPT_STATES:]
            self.parts, self.num = deque([merged.clone()]), len(merged)

    def add_zeros(self) -> None:
        """Before all others, for a token whose state is unknown."""
        self.parts.appendleft(torch.zeros_like(self.parts[0][:1]))
        self.num += 1

    def take(self, num: int) -> torch.Tensor:
        """The first num states. They are not kept any more."""
        states = self.parts[0] if len(self.parts) == 1 else torch.cat([*self.parts])
        self.num -= num
        self.parts = deque([states[num:]] if self.num else [])
        return states[:num]


class EagleProposer(DraftModelProposer):
    """An EAGLE-3 head as a `Proposer`. It knows only sequences whose states were reported."""

    def __init__(
        self,
        runner: Runner,
        max_sequences: int,
        max_draft_len: int,
        *,
        reuses_prefixes: bool = True,
        states_width: int,
        tree_context_len: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        """states_width: see `EagleConfig`. tree_context_len: see `ProposerCapabilities`."""
        super().__init__(
            runner,
            max_sequences,
            max_draft_len,
            reuses_prefixes=reuses_prefixes,
            memory=memory,
        )
        self.capabilities = replace(
            self.capabilities,
            reads_hidden=True,
            has_position_rates=True,
            tree_context_len=tree_context_len,
        )
        self._states: dict[SequenceId, _States] = {}
        self._states_width = states_width

    def time_drafts(self, max_sequences: int) -> None:
        """Measure `tree_s`. Rows are overwritten."""
        if self.capabilities.tree_context_len is None:
            return
        longest = min(TIMED_DEPTH, self.capabilities.max_draft_len)

        def seconds(num: int, depth: int) -> float:
            nodes = MAX_NODES if depth else longest
            tasks = [
                DraftTask(SequenceStart(sequence, [0, 0], 1, SamplingParams()), nodes, depth=depth)
                for sequence in range(num)
            ]

            def prepare() -> None:
                for sequence in range(num):
                    self.observe(sequence, 0, torch.zeros(1, self._states_width))

            def draft() -> None:
                if (tokens := self.propose(tasks)[0].on_device) is not None:
                    tokens.tolist()  # waits until the device has drafted

            fastest = fastest_s(draft, prepare)
            for sequence in range(num):
                self.release(sequence)
            return fastest

        times = tree_s(seconds, longest, max_sequences)
        self.capabilities = replace(self.capabilities, tree_s=times)

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        return self.capabilities.max_draft_len if self._num_states(sequence) else 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        able = [task.draft_len if self._num_states(task.sequence) else 0 for task in tasks]
        pairs = zip(tasks, able, strict=True)
        return super().propose([task._replace(draft_len=num) for task, num in pairs])

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Keep the states. The keys of drafts came from the head's own states, so accepted drafts
        are read again with those of the target."""
        state = self._sequences.get(sequence)
        if state is not None:
            state.num_valid = state.num_known
            state.table.num_cached = min(state.table.num_cached, state.num_valid)
        if hidden is not None:
            self._states.setdefault(sequence, _States()).add(hidden)

    def draft_prefill_len(self, sequence: SequenceId, context_len: int) -> int:
        """The pass that drafts reads the last token with a state."""
        num_states = self._num_states(sequence)
        return num_states - 1 if num_states else super().draft_prefill_len(sequence, context_len)

    def num_reusable(self, start: SequenceStart) -> int:
        """It reads all tokens with a state, also those whose keys it finds."""
        return 0

    def num_cached(self, sequence: SequenceId, context_len: int) -> int:
        """Tokens without a state are never read, so the length of its prefill does not tell."""
        state = self._sequences.get(sequence)
        return state.table.num_cached if state else 0

    def release(self, sequence: SequenceId) -> None:
        super().release(sequence)
        self._states.pop(sequence, None)

    def close(self) -> None:
        super().close()
        self._states.clear()

    def _num_states(self, sequence: SequenceId) -> int:
        states = self._states.get(sequence)
        return states.num if states else 0

    def _groups(self, tasks: Sequence[DraftTask]) -> list[DraftGroup]:
        groups = super()._groups([task for task in tasks if not task.depth])
        trees = defaultdict[int, list[GrowingTree]](list)
        for task in tasks:
            if task.depth:
                history = self._sequences[task.sequence].history
                trees[task.depth].append(GrowingTree(task, history))
        return [*groups, *map(TreeGroup, trees.values())]

    def _enter(self, task: DraftTask) -> DraftSequence:
        """The table continues at the first token with a state, or the one before it. If it lacks
        tokens before that one, it begins there, and other sequences must not reuse it."""
        state, states = super()._enter(task), self._states[task.sequence]
        table = state.table
        if table.num_cached and len(task.tokens) - states.num == table.num_cached + 1:
            states.add_zeros()
        start = len(task.tokens) - states.num
        if start > max(1, table.num_cached):
            states.first, table.tokens = start, ()
            self.pool.cut(table, 0)
        self.pool.cut(table, start)
        table.num_cached = state.num_valid = start
        return state

    def _input(
        self, task: DraftTask, tokens: Sequence[int], num_logits: int, **more: Any
    ) -> RowInput:
        """Known tokens are read with states of the target, and drafted ones with the head's own."""
        states, state = self._states[task.sequence], self._sequences[task.sequence]
        is_known = state.table.num_cached < state.num_known
        given = states.take(len(tokens)) if is_known else None
        return super()._input(task, tokens, num_logits, first=states.first, states=given, **more)
