"""Drafts with a smaller model that shares the target's tokenizer.

The draft model has its own cache. A sequence enters the cache when it first asks for
drafts. So a request that never speculates costs the draft model nothing. Tokens that the cache
missed (`draft_prefill_len`) are prefilled first, over several steps if they are many; the planner
charges for this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smartspec_py.core.types import NO_TOKEN, SequenceId
from smartspec_py.engines.base import Grammar, SequenceStart
from smartspec_py.engines.cache.blocks import Memory
from smartspec_py.engines.cache.cached_model import CachedModel, CachedSequence, history_of
from smartspec_py.engines.decoding.sampling import draft_tokens
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.drafts.growing import ChainGroup, DraftGroup, GrowingChain, GrowingDraft
from smartspec_py.engines.proposer import SHORT_PREFILL, DraftTask, Proposer, ProposerCapabilities
from smartspec_py.engines.runtimes.runner import PassOutput, RowInput, Runner

DRAFT_PREFILL_CHUNK = 512
"""Missed tokens that one pass prefills, for all sequences together."""


@dataclass(slots=True)
class DraftSequence(CachedSequence):
    """table.num_cached counts provisional drafts until `num_valid` is known.

    num_known: tokens of the sequence at its last proposal. num_valid: leading tokens of the table
    that are known to belong to the sequence.
    """

    num_known: int = 0
    num_valid: int = 0


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
        memory: Memory | None = None,
    ) -> None:
        """max_context_len: see `ProposerCapabilities`."""
        super().__init__(runner, max_sequences, reuses_prefixes=reuses_prefixes, memory=memory)
        self.capabilities = ProposerCapabilities(
            max_draft_len=max_draft_len,
            max_context_len=max_context_len,
            bytes_per_token=runner.bytes_per_token,
        )
        self._reusable: dict[SequenceId, int] = {}
        """`num_reusable` of sequences that were asked for since another one has entered or left."""

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        return self.capabilities.max_draft_len

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self._forget_unreported()
        asked = [task for task in tasks if task.draft_len > 0]
        for task in asked:
            self._enter(task)
        self._prefill(asked)
        groups = self._groups([t for t in asked if self._prefill_len(t) <= SHORT_PREFILL])
        started = {each.task.sequence: each for group in groups for each in group.active}
        needs_host = any(task.start.sampling.shapes_logits or task.depth for task in tasks)
        if self.runner.is_asynchronous and not needs_host:
            for group in groups:
                assert isinstance(group, ChainGroup), "trees need the host"
                self._draft_on_device(group.chains)
        while growing := [(group, active) for group in groups if (active := group.active)]:
            logits = self._read([each for _, active in growing for each in active]).logits
            counts = [sum(each.num_logits for each in active) for _, active in growing]
            for (group, _), rows in zip(growing, torch.split(logits, counts), strict=True):
                group.take(rows)
        return [
            started[task.sequence].draft if task.sequence in started else NO_DRAFT for task in tasks
        ]

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        state = self._sequences[sequence]
        state.num_valid = state.num_known + num_accepted
        state.table.num_cached = min(state.table.num_cached, state.num_valid)

    def draft_prefill_len(self, sequence: SequenceId, context_len: int) -> int:
        state = self._sequences.get(sequence)
        num_read = min(state.table.num_cached, state.num_valid) if state else 0
        return max(0, context_len - 1 - num_read)

    def num_reusable(self, start: SequenceStart) -> int:
        if start.sequence in self._sequences:
            return 0
        if start.sequence not in self._reusable:
            self._forget_unreported()  # drafts must not be found
            self._reusable[start.sequence] = self.pool.num_found(
                start.tokens, sys.maxsize, start.reuses_prefix, start.adapter
            )
        return self._reusable[start.sequence]

    def release(self, sequence: SequenceId) -> None:
        self._reusable.pop(sequence, None)
        state = self._sequences.pop(sequence, None)
        if state is None:
            return
        self._reusable.clear()
        table = state.table
        table.num_cached = min(table.num_cached, state.num_valid, len(table.tokens))
        self._free(sequence)

    def _groups(self, tasks: Sequence[DraftTask]) -> list[DraftGroup]:
        """The drafts to grow, of sequences that have entered the cache."""
        chains = [GrowingChain(task, self._sequences[task.sequence].history) for task in tasks]
        return [ChainGroup(chains)] if chains else []

    def _enter(self, task: DraftTask) -> DraftSequence:
        """Begin the sequence, or update its state with the task's tokens."""
        state = self._sequences.get(task.sequence)
        if state is None:
            # Keys of generated tokens may differ in the last bits. This changes no text.
            self._reusable.clear()
            table = self._allocate(task.start, task.tokens, shares_all=True)
            history = history_of(task.start)
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

    def _prefill(self, tasks: Sequence[DraftTask]) -> None:
        """Prefill up to `max_prefill_len` tokens of those that lack more than SHORT_PREFILL. Those
        that lack the fewest come first, so that they can draft soon."""
        left = self.max_prefill_len
        while left and (late := [t for t in tasks if self._prefill_len(t) > SHORT_PREFILL]):
            inputs, room = dict[SequenceId, RowInput](), min(left, DRAFT_PREFILL_CHUNK)
            for task in sorted(late, key=self._prefill_len):
                num_read = self._sequences[task.sequence].table.num_cached
                if chunk := task.tokens[num_read : min(num_read + room, len(task.tokens) - 1)]:
                    inputs[task.sequence] = self._input(task, chunk, 0, num_prompt=len(chunk))
                    room -= len(chunk)
                    left -= len(chunk)
            self._forward(inputs)

    def _prefill_len(self, task: DraftTask) -> int:
        return len(task.tokens) - 1 - self._sequences[task.sequence].table.num_cached

    def _draft_on_device(self, chains: Sequence[GrowingChain]) -> None:
        """Draft all tokens, each pass with the tokens of the one before, without waiting for any.
        Drafts after an end token are computed in vain."""
        longest_first = sorted(chains, key=lambda chain: -chain.task.draft_len)
        lengths = [chain.task.draft_len for chain in longest_first]
        device = self.runner.config.device
        drafts = torch.zeros(len(lengths), lengths[0], dtype=torch.long, device=device)
        last = None
        for place in range(lengths[0]):
            active = longest_first[: sum(length > place for length in lengths)]
            output = self._read(active, None if last is None else last[: len(active)])
            last, probs = draft_tokens(output.logits, [chain.request for chain in active])
            drafts[: len(active), place] = last
            for chain, prob in zip(active, probs, strict=True):
                chain.take(NO_TOKEN, prob)
        for chain, tokens, length in zip(longest_first, drafts, lengths, strict=True):
            chain.on_device = tokens[:length]

    def _read(
        self, growing: Sequence[GrowingDraft], last: torch.Tensor | None = None
    ) -> PassOutput:
        """Process what is not read yet: known tokens, and then drafted ones. last: the last draft
        of each, if it is only on the device."""
        inputs = {}
        for each in growing:
            sequence = each.task.sequence
            num_cached = self._sequences[sequence].table.num_cached
            tokens = each.next_tokens or each.task.tokens[num_cached:]
            inputs[sequence] = self._input(each.task, tokens, each.num_logits, tree=each.tree)
        return self._forward(inputs, last)

    def _forward(
        self, inputs: Mapping[SequenceId, RowInput], last: torch.Tensor | None = None
    ) -> PassOutput:
        """Run a pass. Its keys count as cached when it has not failed, and only those of a chain:
        each pass of a tree reads again what it needs of the tree."""
        output = self.runner.forward([*inputs.values()], last)
        for sequence, read in inputs.items():
            state, num_read = self._sequences[sequence], read.position + len(read.tokens)
            state.num_valid = min(num_read, state.num_known)
            state.table.num_cached = state.num_valid if read.tree else num_read
        return output

    def _input(
        self, task: DraftTask, tokens: Sequence[int], num_logits: int, **more: Any
    ) -> RowInput:
        """These tokens, after those that the table holds."""
        table = self._sequences[task.sequence].table
        return self._row_input(table, table.num_cached, tokens, num_logits, **more)
