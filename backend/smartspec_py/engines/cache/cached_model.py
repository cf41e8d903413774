"""The common part of target and draft model: a model, and the sequences in its cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import SequenceStart
from smartspec_py.engines.cache.blocks import BlockPool, Memory, Table
from smartspec_py.engines.cache.states import KeptStates
from smartspec_py.engines.decoding.shaping import TokenHistory
from smartspec_py.engines.runtimes.runner import RowInput, Runner


@dataclass(slots=True)
class CachedSequence:
    """table: the blocks that hold keys of the sequence's first tokens. history: all final tokens,
    for sampling; None if sampling does not depend on earlier tokens."""

    table: Table
    history: TokenHistory | None


S = TypeVar("S", bound=CachedSequence)


class CachedModel(Generic[S]):
    """The blocks of the runner's cache, and the sequences that use them."""

    def __init__(
        self,
        runner: Runner,
        num_rows: int,
        *,
        reuses_prefixes: bool = True,
        memory: Memory | None = None,
    ) -> None:
        """memory: of this cache and of others; None if it is reserved at the start."""
        self.runner = runner
        store = runner.cache
        has_blocks = store.block_len < runner.config.max_len
        self._num_spare = int(has_blocks)  # see `openvino.parts.with_copy`
        states = runner.states
        self.pool = BlockPool(
            store.num_blocks,
            store.block_len,
            num_rows,
            max_len=runner.config.max_len + self._num_spare,
            copy=store.copy_block,
            block_bytes=runner.bytes_per_token * store.block_len,
            memory=memory,
            first=runner.first_key,
            reuses_prefixes=reuses_prefixes,
            states=None
            if states is None
            else KeptStates(states.free_slots, states.step, states.load),
        )
        self._sequences: dict[SequenceId, S] = {}

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """See `Profilable`."""
        assert not self._sequences, "timing a pass overwrites blocks"
        return self.runner.time_pass(batch_size, tokens_per_row, context_len, num_logits)

    def close(self) -> None:
        self._sequences.clear()

    def _allocate(
        self, start: SequenceStart, tokens: Sequence[int], shares_all: bool = False
    ) -> Table:
        """See `BlockPool.allocate`. From now on, the caller may only append to `tokens`.

        shares_all: whether keys of generated tokens may be shared, and not only of the prompt.
        """
        num_shared = sys.maxsize if shares_all else start.num_prompt
        return self.pool.allocate(
            start.sequence, tokens, num_shared, start.reuses_prefix, start.adapter
        )

    def _row_input(
        self, table: Table, position: int, tokens: Sequence[int], num_logits: int, **more: Any
    ) -> RowInput:
        """New tokens of a sequence, which gets the blocks for them."""
        self.pool.extend(table, position + len(tokens) + self._num_spare)
        kept = self.pool.reserve_state(table, position, position + more.get("num_prompt", 0))
        return RowInput(
            table.row, position, tokens, num_logits, blocks=table.used, kept_state=kept, **more
        )

    def _free(self, sequence: SequenceId) -> None:
        """The sequence ends. Memory that no sequence has used goes back when the last one ends."""
        self.pool.release(sequence)
        self.runner.cache.drop(self.pool.take_unused())


def history_of(start: SequenceStart) -> TokenHistory | None:
    """An empty history for the sequence, if its sampling needs one."""
    if not start.sampling.shapes_logits:
        return None
    return TokenHistory(start.num_prompt, start.grammar, start.host_time)
