"""Drafts with a smaller model that shares the target's tokenizer.

The draft model has its own cache. A sequence enters the cache when it first asks for
drafts. So a request that never speculates costs the draft model nothing. Tokens that the cache
missed (`draft_lag`) are prefilled first, in chunks; the planner charges for this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smartspec_py.core.types import NO_TOKEN, SequenceId
from smartspec_py.engines.base import (
    NO_DRAFT,
    SHORT_LAG,
    Draft,
    DraftTask,
    Grammar,
    Proposer,
    ProposerCapabilities,
)
from smartspec_py.engines.cache.blocks import Memory
from smartspec_py.engines.cache.cached_model import CachedModel, CachedSequence, history_of
from smartspec_py.engines.decoding.sampling import DraftRequest, draft_tokens
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput, Runner

CATCH_UP_CHUNK = 512
"""Missed tokens that one pass prefills, for all sequences together."""


@dataclass(slots=True)
class DraftSequence(CachedSequence):
    """table.num_cached counts provisional drafts until `num_valid` is known.

    num_known: tokens of the sequence at its last proposal. num_valid: leading tokens of the table
    that are known to belong to the sequence.
    """

    num_known: int = 0
    num_valid: int = 0


@dataclass(slots=True)
class Drafting:
    """A task in progress: the drafts so far, and the distributions they were drawn from. on_device:
    see `Draft`."""

    task: DraftTask
    state: DraftSequence
    tokens: list[int]
    probs: list[torch.Tensor]
    on_device: torch.Tensor | None = None

    @property
    def wants_more(self) -> bool:
        has_ended = bool(self.tokens) and self.tokens[-1] in self.task.sampling.end_tokens
        return len(self.tokens) < self.task.draft_len and not has_ended

    @property
    def num_logits(self) -> int:
        """Of the next pass."""
        return 1

    @property
    def request(self) -> DraftRequest:
        """Of the next pass."""
        position = len(self.task.tokens) + len(self.tokens)
        return DraftRequest(self.task.sampling, position, self.state.history, tuple(self.tokens))

    def take(self, token: int, prob: torch.Tensor | None) -> None:
        self.tokens.append(token)
        if prob is not None:
            self.probs.append(prob)

    def read(self, num_tokens: int) -> None:
        """Record that the table now holds num_tokens tokens."""
        self.state.table.num_cached = num_tokens
        self.state.num_valid = min(num_tokens, self.state.num_known)

    @property
    def draft(self) -> Draft:
        probs = torch.stack(self.probs) if self.probs else None
        return Draft(tuple(self.tokens), probs, on_device=self.on_device)


class DraftModelProposer(CachedModel[DraftSequence], Proposer):
    """A causal language model that drafts."""

    def __init__(
        self,
        runner: Runner,
        max_sequences: int,
        max_draft_len: int,
        *,
        reuses_prefixes: bool = True,
        max_context_len: int | None = None,
        has_own_memory: bool = False,
        memory: Memory | None = None,
    ) -> None:
        """max_context_len: see `ProposerCapabilities`. has_own_memory: whether the runner's device
        is not that of the target."""
        super().__init__(runner, max_sequences, reuses_prefixes=reuses_prefixes, memory=memory)
        self._capabilities = ProposerCapabilities(
            max_draft_len=max_draft_len,
            max_context_len=max_context_len,
            bytes_per_token=0 if has_own_memory else runner.bytes_per_token,
        )

    @property
    def capabilities(self) -> ProposerCapabilities:
        return self._capabilities

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        return self._capabilities.max_draft_len

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self._forget_unreported()
        started = {task.sequence: self._start(task) for task in tasks if task.draft_len > 0}
        active = list(started.values())
        self._catch_up(active)
        needs_host = any(task.sampling.shapes_logits or task.depth for task in tasks)
        if self.runner.is_asynchronous and not needs_host:
            self._draft_on_device(active)
        while active := [drafting for drafting in active if drafting.wants_more]:
            self._draw(active, self._read(active).logits)
        return [
            started[task.sequence].draft if task.sequence in started else NO_DRAFT for task in tasks
        ]

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        state = self._sequences[sequence]
        state.num_valid = state.num_known + num_accepted
        state.table.num_cached = min(state.table.num_cached, state.num_valid)

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        state = self._sequences.get(sequence)
        num_read = min(state.table.num_cached, state.num_valid) if state else 0
        return max(0, context_len - 1 - num_read)

    def release(self, sequence: SequenceId) -> None:
        state = self._sequences.pop(sequence, None)
        if state is None:
            return
        table = state.table
        table.num_cached = min(table.num_cached, state.num_valid, len(table.tokens))
        self._free(sequence)

    def _start(self, task: DraftTask) -> Drafting:
        return Drafting(task, self._enter(task), [], [])

    def _enter(self, task: DraftTask) -> DraftSequence:
        """The state of the sequence, updated with the task's tokens."""
        state = self._sequences.get(task.sequence)
        if state is None:
            # Keys of generated tokens may differ in the last bits. This changes no text.
            table = self._allocate(task, task.tokens, shares_all=True)
            history = history_of(task)
            state = DraftSequence(table, history, num_valid=table.num_cached)
            self._sequences[task.sequence] = state
        if state.history is not None:
            state.history.extend(task.tokens[len(state.history) :])
        state.num_known = len(task.tokens)
        return state

    def _forget_unreported(self) -> None:
        """Discard drafts without a report, as after a cancel. They are not part of the text."""
        for state in self._sequences.values():
            state.table.num_cached = min(state.table.num_cached, state.num_valid)

    def _catch_up(self, draftings: Sequence[Drafting]) -> None:
        """Prefill all until they lack at most SHORT_LAG known tokens; many sequences per pass."""
        while behind := [d for d in draftings if _lag(d) > SHORT_LAG]:
            inputs, left = [], CATCH_UP_CHUNK
            for drafting in behind:
                table, tokens = drafting.state.table, drafting.task.tokens
                last = min(table.num_cached + left, len(tokens) - 1)
                chunk = tokens[table.num_cached : last]
                if chunk:
                    inputs.append(self._input(drafting, chunk, 0))
                    table.num_cached = drafting.state.num_valid = last
                    left -= len(chunk)
            self.runner.forward(inputs)

    def _draft_on_device(self, draftings: Sequence[Drafting]) -> None:
        """Draft all tokens, each pass with the tokens of the one before, without waiting for any.
        Drafts after an end token are computed in vain."""
        longest_first = sorted(draftings, key=lambda drafting: -drafting.task.draft_len)
        lengths = [drafting.task.draft_len for drafting in longest_first]
        if not lengths:
            return
        device = self.runner.config.device
        drafts = torch.zeros(len(lengths), lengths[0], dtype=torch.long, device=device)
        last = None
        for place in range(lengths[0]):
            active = longest_first[: sum(length > place for length in lengths)]
            output = self._read(active, None if last is None else last[: len(active)])
            last, probs = draft_tokens(output.logits, [drafting.request for drafting in active])
            drafts[: len(active), place] = last
            for drafting, prob in zip(active, probs, strict=True):
                drafting.take(NO_TOKEN, prob)
        for drafting, tokens, length in zip(longest_first, drafts, lengths, strict=True):
            drafting.on_device = tokens[:length]

    def _read(self, draftings: Sequence[Drafting], last: torch.Tensor | None = None) -> PassOutput:
        """Process the unread tokens of each sequence. last: the last draft of each, if it is only
        on the device."""
        inputs = []
        for drafting in draftings:
            unread = self._unread(drafting)
            inputs.append(unread)
            drafting.read(unread.position + len(unread.tokens))
        return self.runner.forward(inputs, last)

    def _draw(self, draftings: Sequence[Drafting], logits: torch.Tensor) -> None:
        """Draft from the logits of a pass."""
        tokens, probs = draft_tokens(logits, [drafting.request for drafting in draftings])
        for drafting, token, prob in zip(draftings, tokens.tolist(), probs, strict=True):
            drafting.take(token, prob)

    def _unread(self, drafting: Drafting) -> RowInput:
        """The tokens that the table does not hold yet: known tokens, or the last draft."""
        known = drafting.task.tokens[drafting.state.table.num_cached :]
        return self._input(drafting, drafting.tokens[-1:] or known, 1)

    def _input(self, drafting: Drafting, tokens: Sequence[int], num_logits: int) -> RowInput:
        """These tokens, after those that the table holds."""
        table, num_prompt = drafting.state.table, 0 if num_logits else len(tokens)
        return self._row_input(table, table.num_cached, tokens, num_logits, num_prompt=num_prompt)


def _lag(drafting: Drafting) -> int:
    return len(drafting.task.tokens) - 1 - drafting.state.table.num_cached
