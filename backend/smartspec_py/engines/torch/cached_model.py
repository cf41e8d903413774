"""What the target and the draft model have in common: a model, and the sequences in its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.torch.processors import TokenHistory
from smartspec_py.engines.torch.rows import Row, RowTable
from smartspec_py.engines.torch.runner import Runner


@dataclass(slots=True)
class CachedSequence:
    """row: holds keys of the sequence's first tokens. history: all tokens that are known for good,
    as the sampling needs them; None where it does not look at earlier tokens."""

    row: Row
    history: TokenHistory | None


S = TypeVar("S", bound=CachedSequence)


class CachedModel(Generic[S]):
    """Rows 0..num_rows-1 of the runner's cache, and who holds them."""

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

    def _allocate(self, sequence: SequenceId, tokens: Sequence[int], reuses_prefix: bool) -> Row:
        """A row that holds as many of the tokens, but for the last, as any other has. `tokens` may
        only grow from now on."""
        row, source = self.rows.allocate(sequence, tokens, len(tokens) - 1 if reuses_prefix else 0)
        if source is not None:
            self.runner.cache.copy_row(source, row.index, row.num_cached)
        return row

    def _free(self, sequence: SequenceId) -> None:
        """The row is for others; those in use are brought together where they have spread."""
        self.rows.release(sequence)
        for move in self.rows.moves():
            self.runner.cache.copy_row(*move)


def history_of(sampling: SamplingParams, num_prompt: int) -> TokenHistory | None:
    return TokenHistory(num_prompt) if sampling.shapes_logits else None
