"""The common part of target and draft model: a model, and the sequences in its cache rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import DraftTask, SequenceStart
from smartspec_py.engines.decoding.shaping import TokenHistory
from smartspec_py.engines.local.rows import Row, RowTable
from smartspec_py.engines.runtimes.runner import Runner


@dataclass(slots=True)
class CachedSequence:
    """row: the cache row, which holds keys of the sequence's first tokens. history: all final
    tokens, for sampling; None if sampling does not depend on earlier tokens."""

    row: Row
    history: TokenHistory | None


S = TypeVar("S", bound=CachedSequence)


class CachedModel(Generic[S]):
    """Rows 0..num_rows-1 of the runner's cache, and the sequences that use them."""

    def __init__(self, runner: Runner, num_rows: int, *, reuses_prefixes: bool = True) -> None:
        self.runner = runner
        self.rows = RowTable(num_rows, reuses_prefixes=reuses_prefixes)
        self._sequences: dict[SequenceId, S] = {}

    @property
    def passes_s(self) -> float:
        """Seconds spent in model passes so far."""
        return self.runner.passes_s

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """See `Profilable`."""
        assert not self._sequences, "timing a pass overwrites rows"
        return self.runner.time_pass(batch_size, tokens_per_row, context_len, num_logits)

    def close(self) -> None:
        self._sequences.clear()

    def _allocate(self, start: SequenceStart | DraftTask, tokens: Sequence[int]) -> Row:
        """See `RowTable.allocate`. From now on, the caller may only append to `tokens`."""
        row, source = self.rows.allocate(
            start.sequence, tokens, start.num_prompt, start.reuses_prefix, start.adapter
        )
        self.runner.cache.drop_row(row.index, row.num_cached if source is None else 0)
        if source is not None:
            self.runner.cache.copy_row(source, row.index, row.num_cached)
        return row

    def _free(self, sequence: SequenceId) -> None:
        """Free the row. If the rows in use are no longer adjacent, move them together. Free rows
        keep some of their tokens for reuse, see `RowStore.free_bytes`."""
        self.rows.release(sequence)
        for move in self.rows.moves():
            self.runner.cache.copy_row(*move)
        for index in self.rows.forget(self.runner.cache.free_bytes / self.runner.bytes_per_token):
            self.runner.cache.drop_row(index)


def history_of(start: SequenceStart | DraftTask) -> TokenHistory | None:
    """An empty history for the sequence, if its sampling needs one."""
    if not start.sampling.shapes_logits:
        return None
    return TokenHistory(start.num_prompt, start.grammar, start.host_time)
