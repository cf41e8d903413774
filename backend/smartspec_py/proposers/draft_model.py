"""Proposes with a smaller model that shares the target's tokenizer.

The draft model keeps its own cache of rows. A sequence enters it when it is first asked for
drafts, not before: a request that never speculates costs it nothing. What the cache missed in the
meantime (`draft_lag`) is read first, in chunks; the planner charges for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import DraftTask, ProposerCapabilities
from smartspec_py.engines.packed import RowInput
from smartspec_py.engines.runner import CausalRunner, RowTable
from smartspec_py.engines.sampling import Draw, draw_tokens

SHORT_LAG = 4
"""Missed tokens up to this many are read in the first drafting pass itself."""

CATCH_UP_CHUNK = 512
"""Missed tokens, of all sequences together, that are read in a pass."""


@dataclass(slots=True)
class _Sequence:
    """num_read: leading tokens of the sequence whose keys in the row are valid."""

    num_read: int = 0
    num_known: int = 0


class DraftModelProposer:
    """A causal language model as a `Proposer`."""

    def __init__(self, runner: CausalRunner, max_sequences: int, max_draft_len: int) -> None:
        self._runner = runner
        self._rows = RowTable(max_sequences)
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._capabilities = ProposerCapabilities(max_draft_len=max_draft_len)

    @property
    def capabilities(self) -> ProposerCapabilities:
        return self._capabilities

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        drafts: list[list[int]] = [[] for _ in tasks]
        active = [i for i, task in enumerate(tasks) if task.draft_len > 0]
        for i in active:
            self._enter(tasks[i])
        self._catch_up([tasks[i] for i in active])
        for depth in range(max((task.draft_len for task in tasks), default=0)):
            active = [i for i in active if self._goes_on(tasks[i], drafts[i], depth)]
            if not active:
                break
            self._pass([tasks[i] for i in active], [drafts[i] for i in active])
        return [tuple(tokens) for tokens in drafts]

    def observe(self, sequence: SequenceId, num_accepted: int) -> None:
        state = self._sequences[sequence]
        state.num_read = min(state.num_read, state.num_known + num_accepted)

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        state = self._sequences.get(sequence)
        num_read = state.num_read if state else 0
        return max(0, context_len - 1 - num_read)

    def release(self, sequence: SequenceId) -> None:
        if self._sequences.pop(sequence, None) is None:
            return
        move = self._rows.release(sequence)
        if move is not None:
            source, destination = move
            num_read = self._sequences[self._rows.owner(destination)].num_read
            self._runner.cache.move_row(source, destination, num_read)

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

    def _enter(self, task: DraftTask) -> None:
        if task.sequence not in self._sequences:
            self._rows.allocate(task.sequence)
            self._sequences[task.sequence] = _Sequence()
        self._sequences[task.sequence].num_known = len(task.tokens)

    def _catch_up(self, tasks: Sequence[DraftTask]) -> None:
        """Bring every row to within SHORT_LAG of its last known token, many rows a pass."""
        behind = [task for task in tasks if self._lag(task) > SHORT_LAG]
        while behind:
            inputs, left = [], CATCH_UP_CHUNK
            for task in behind:
                state = self._sequences[task.sequence]
                last = min(state.num_read + left, state.num_known - 1)
                chunk = task.tokens[state.num_read : last]
                if chunk:
                    row = self._rows.row(task.sequence)
                    inputs.append(RowInput(row, state.num_read, chunk, 0))
                    state.num_read = last
                    left -= len(chunk)
            self._runner.forward(inputs)
            behind = [task for task in behind if self._lag(task) > SHORT_LAG]

    def _lag(self, task: DraftTask) -> int:
        return self.draft_lag(task.sequence, len(task.tokens))

    def _goes_on(self, task: DraftTask, drafts: Sequence[int], depth: int) -> bool:
        has_ended = bool(drafts) and drafts[-1] == task.sampling.end_token
        return task.draft_len > depth and not has_ended

    def _pass(self, tasks: Sequence[DraftTask], drafts: Sequence[list[int]]) -> None:
        """One pass: each sequence reads what it has not read, and gets one more draft."""
        inputs, draws = [], []
        for task, known in zip(tasks, drafts, strict=True):
            state = self._sequences[task.sequence]
            unread = known[-1:] or task.tokens[state.num_read :]
            inputs.append(RowInput(self._rows.row(task.sequence), state.num_read, unread, 1))
            draws.append(Draw(task.sampling, state.num_read + len(unread)))
            state.num_read += len(unread)
        logits = self._runner.forward(inputs)
        for known, token in zip(drafts, draw_tokens(logits, draws), strict=True):
            known.append(token)
