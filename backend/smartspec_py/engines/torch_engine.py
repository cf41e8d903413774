"""The PyTorch target: one packed pass a poll, whatever was submitted.

The page to read is `poll`: one target pass over all work, one draw for every position asked, and
for each sequence the longest prefix of its drafts that equals what the target drew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.base import (
    Decode,
    Event,
    Prefill,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_py.engines.packed import RowInput
from smartspec_py.engines.runner import CausalRunner, RowTable
from smartspec_py.engines.sampling import Draw, draw_tokens


@dataclass(slots=True)
class _Sequence:
    """num_cached: tokens whose keys are in the row. last_token: known, but not yet in it."""

    sampling: SamplingParams
    num_cached: int = 0
    last_token: int = -1


@dataclass(frozen=True, slots=True)
class _Item:
    """One work item as a row of the pass. drafts: what is to be compared with the draws."""

    sequence: SequenceId
    row_input: RowInput
    drafts: tuple[int, ...] = ()
    draws: tuple[Draw, ...] = field(default=())


class TorchTarget:
    """A Hugging Face causal language model as a `Target`."""

    def __init__(self, runner: CausalRunner, capabilities: TargetCapabilities) -> None:
        self._runner = runner
        self._capabilities = capabilities
        self._rows = RowTable(capabilities.max_sequences)
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._pending: list[Work] = []

    @property
    def capabilities(self) -> TargetCapabilities:
        return self._capabilities

    def submit(self, work: Sequence[Work]) -> None:
        for item in work:
            if isinstance(item, Prefill) and item.start == 0:
                self._rows.allocate(item.sequence)
                self._sequences[item.sequence] = _Sequence(item.sampling)
        self._pending.extend(work)

    def poll(self, timeout_s: float) -> list[Event]:
        work, self._pending = self._pending, []
        if not work:
            return []
        start = time.perf_counter()
        items = [self._item(one) for one in work]
        logits = self._runner.forward([item.row_input for item in items])
        drawn = draw_tokens(logits, [draw for item in items for draw in item.draws])
        pass_s = time.perf_counter() - start
        events, first = [], 0
        for item in items:
            tokens = drawn[first : first + len(item.draws)]
            first += len(item.draws)
            events.append(self._settle(item, tokens, pass_s))
        return events

    def cancel(self, sequence: SequenceId) -> None:
        """Nothing to do: work in flight ends with the next poll."""

    def release(self, sequence: SequenceId) -> None:
        del self._sequences[sequence]
        move = self._rows.release(sequence)
        if move is not None:
            source, destination = move
            num_cached = self._sequences[self._rows.owner(destination)].num_cached
            self._runner.cache.move_row(source, destination, num_cached)

    def close(self) -> None:
        self._sequences.clear()

    @property
    def passes_s(self) -> float:
        """Seconds spent in model passes so far."""
        return self._runner.passes_s

    def time_pass(self, num_rows: int, tokens_per_row: int, context_len: int) -> float:
        assert not self._sequences, "timing a pass overwrites rows"
        return self._runner.time_pass(num_rows, tokens_per_row, context_len)

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows and sequences agree."""
        assert len(self._rows) == len(self._sequences), "a row without a sequence"
        assert all(sequence in self._rows for sequence in self._sequences)

    def _item(self, work: Work) -> _Item:
        state = self._sequences[work.sequence]
        row = self._rows.row(work.sequence)
        if isinstance(work, Prefill):
            draws = (Draw(state.sampling, work.start + len(work.tokens)),) if work.is_last else ()
            return _Item(
                work.sequence,
                RowInput(row, work.start, work.tokens, len(draws)),
                draws=draws,
            )
        drafts = work.drafts if isinstance(work, Verify) else ()
        assert not isinstance(work, Decode) or work.max_tokens >= 1
        position = state.num_cached
        return _Item(
            work.sequence,
            RowInput(row, position, (state.last_token, *drafts), len(drafts) + 1),
            drafts,
            tuple(Draw(state.sampling, position + 1 + j) for j in range(len(drafts) + 1)),
        )

    def _settle(self, item: _Item, drawn: Sequence[int], pass_s: float) -> Event:
        """Keep the drafts that the target drew itself, and one token more."""
        state = self._sequences[item.sequence]
        num_accepted = 0
        while num_accepted < len(item.drafts) and item.drafts[num_accepted] == drawn[num_accepted]:
            num_accepted += 1
        # Of a verification, the row now holds the token known before this pass and the accepted
        # drafts; of a prompt's chunk, all of it.
        num_read = len(item.row_input.tokens) - len(item.drafts) + num_accepted
        state.num_cached += num_read
        tokens = tuple(drawn[: num_accepted + 1])
        if tokens:
            state.last_token = tokens[-1]
        return Event(
            sequence=item.sequence,
            tokens=tokens,
            num_drafted=len(item.drafts),
            num_accepted=num_accepted,
            pass_s=pass_s,
        )
