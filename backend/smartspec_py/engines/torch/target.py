"""The PyTorch target: one packed pass a poll, whatever was submitted.

The page to read is `poll`: one target pass over all work, one judgement of every position asked,
and for each sequence the drafts that were accepted and one token more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.base import (
    Event,
    Prefill,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.processors import TokenHistory
from smartspec_py.engines.torch.rows import Row, RowTable
from smartspec_py.engines.torch.runner import Runner
from smartspec_py.engines.torch.sampling import Check, Verdict, judge


@dataclass(slots=True)
class _Sequence:
    """tokens: all that are known; the row holds all but the last, once the prompt has been read.

    history: the same, as the sampling needs it; None where it does not look at earlier tokens.
    """

    row: Row
    tokens: list[int]
    sampling: SamplingParams
    history: TokenHistory | None


@dataclass(frozen=True, slots=True)
class _Item:
    """One work item as a row of the pass. check: what is drawn there; None inside a prompt."""

    sequence: SequenceId
    row_input: RowInput
    check: Check | None


class TorchTarget:
    """A Hugging Face causal language model as a `Target`."""

    def __init__(
        self,
        runner: Runner,
        capabilities: TargetCapabilities,
        *,
        reuses_prefixes: bool = True,
    ) -> None:
        self._runner = runner
        self._capabilities = capabilities
        self._rows = RowTable(capabilities.max_sequences, reuses_prefixes=reuses_prefixes)
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._pending: list[Work] = []

    @property
    def capabilities(self) -> TargetCapabilities:
        return self._capabilities

    def begin(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        num_prompt: int,
        sampling: SamplingParams,
        reuses_prefix: bool = True,
    ) -> int:
        known = list(tokens)
        placement = self._rows.allocate(sequence, known, len(known) - 1 if reuses_prefix else 0)
        row = placement.row
        if placement.source is not None:
            self._runner.cache.copy_row(placement.source, row.index, row.num_cached)
        history = None
        if sampling.shapes_logits:
            history = TokenHistory(num_prompt)
            history.extend(known)
        self._sequences[sequence] = _Sequence(row, known, sampling, history)
        return row.num_cached

    def submit(self, work: Sequence[Work]) -> None:
        self._pending.extend(work)

    def poll(self, timeout_s: float) -> list[Event]:
        work, self._pending = self._pending, []
        if not work:
            return []
        start = time.perf_counter()
        items = [self._item(one) for one in work]
        out = self._runner.forward([item.row_input for item in items])
        verdicts = iter(judge(out.logits, [item.check for item in items if item.check]))
        pass_s = time.perf_counter() - start
        events, first = [], 0
        for item in items:
            hidden = None if out.hidden is None else out.hidden[first:]
            first += item.row_input.num_logits
            events.append(
                self._settle(item, next(verdicts) if item.check else None, hidden, pass_s)
            )
        return events

    def cancel(self, sequence: SequenceId) -> None:
        """Nothing to do: work in flight ends with the next poll."""

    def release(self, sequence: SequenceId) -> None:
        del self._sequences[sequence]
        self._rows.release(sequence)
        for move in self._rows.moves():
            self._runner.cache.copy_row(move.source, move.destination, move.num_tokens)
        for held in self._sequences:
            self._sequences[held].row = self._rows.row(held)

    def close(self) -> None:
        self._sequences.clear()

    @property
    def passes_s(self) -> float:
        """Seconds spent in model passes so far."""
        return self._runner.passes_s

    def time_pass(
        self, num_rows: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        assert not self._sequences, "timing a pass overwrites rows"
        return self._runner.time_pass(num_rows, tokens_per_row, context_len, num_logits)

    def logits_after(self, tokens: Sequence[int], last_pass: int) -> torch.Tensor:
        """See `nearties.Scorer`. Overwrites rows, and so forgets what they remembered."""
        assert not self._sequences, "scoring overwrites rows"
        self._rows.forget()
        cut = len(tokens) - last_pass if last_pass else 0
        if cut:
            self._runner.forward([RowInput(0, 0, tokens[:cut], 0)])
        return self._runner.forward([RowInput(0, cut, tokens[cut:], 1)]).logits[0]

    def logit_eps(self) -> float:
        return self._runner.eps

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows and sequences agree."""
        self._rows.check_integrity()
        assert len(self._rows) == len(self._sequences), "a row without a sequence"
        for sequence, state in self._sequences.items():
            assert self._rows.row(sequence) is state.row, f"sequence {sequence} has another row"

    def _item(self, work: Work) -> _Item:
        state = self._sequences[work.sequence]
        row = state.row
        if isinstance(work, Prefill):
            assert work.start == row.num_cached, f"a chunk at {work.start} of {row.num_cached}"
            end = work.start + len(work.tokens)
            check = Check(state.sampling, end, state.history) if work.is_last else None
            num_logits = 1 if work.is_last else 0
            return _Item(
                work.sequence, RowInput(row.index, work.start, work.tokens, num_logits), check
            )
        drafts = work.drafts if isinstance(work, Verify) else ()
        probs: torch.Tensor | None = work.draft_probs if isinstance(work, Verify) else None
        tokens = (state.tokens[-1], *drafts)
        return _Item(
            work.sequence,
            RowInput(row.index, row.num_cached, tokens, len(tokens)),
            Check(state.sampling, row.num_cached + 1, state.history, drafts, probs),
        )

    def _settle(
        self, item: _Item, verdict: Verdict | None, hidden: torch.Tensor | None, pass_s: float
    ) -> Event:
        """Keep what was accepted: of a verification, the row then holds the token known before
        this pass and the accepted drafts; of a prompt's chunk, all of it."""
        state = self._sequences[item.sequence]
        if verdict is None or item.check is None:
            state.row.num_cached += len(item.row_input.tokens)
            return Event(item.sequence, pass_s=pass_s)
        num_drafts = len(item.check.drafts)
        state.row.num_cached += len(item.row_input.tokens) - num_drafts + verdict.num_accepted
        state.tokens.extend(verdict.tokens)
        if state.history is not None:
            state.history.extend(verdict.tokens)
        return Event(
            sequence=item.sequence,
            tokens=verdict.tokens,
            num_drafted=num_drafts,
            num_accepted=verdict.num_accepted,
            pass_s=pass_s,
            log_probs=verdict.log_probs,
            hidden=None if hidden is None else hidden[: len(verdict.tokens)],
        )
