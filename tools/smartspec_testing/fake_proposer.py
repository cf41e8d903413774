"""Drafts the text of `fake_engine`. Each draft is right with a given probability.

It continues from the last known token by the target's rule. At each position, a hash decides
whether the draft is the target's token or the one after it (token + 1).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Grammar
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.proposer import DraftTask, Proposer, ProposerCapabilities
from smartspec_testing.clock import Clock, RealClock
from smartspec_testing.fake_engine import FAKE_CAPABILITIES, TOKEN_STEP, token_at

AcceptProb = Callable[[Sequence[int], int], float]
"""Probability that a draft is right, by the known tokens and the position of the draft."""


class FakeProposer(Proposer):
    """Drafts the fake target's text, right with probability `accept_prob` at each position.

    Whether the draft at a position is right is a hash of text and position. It does not
    depend on the draft length, the load or the sequence's number.

    What it must read first is as with a draft model's cache. To propose after n known tokens reads
    those n; when a of the drafts were accepted, `observe` adds a + 1, because the next proposal
    begins with the target's own token. So with (3, 4, 21) known, `draft_prefill_len` is 3 at first.
    After 4 drafts of which 2 are accepted, 6 tokens are known and read, and it is 0. After 5 steps
    without a proposal it is 5.

    A proposal takes `cost.draft_s` for each of its passes and `cost.draft_prefill_s` for each
    token of draft prefill.
    """

    def __init__(
        self,
        accept_prob: float | AcceptProb,
        *,
        vocab_size: int = FAKE_CAPABILITIES.vocab_size,
        max_draft_len: int = FAKE_CAPABILITIES.max_draft_len,
        cost: CostModel | None = None,
        clock: Clock | None = None,
        bytes_per_token: int = 0,
    ) -> None:
        self._accept_prob = accept_prob
        self._vocab_size = vocab_size
        self.capabilities = ProposerCapabilities(max_draft_len, bytes_per_token=bytes_per_token)
        self._cost = cost
        self._clock = clock or RealClock()
        self._num_read: dict[SequenceId, int] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences whose state is kept."""
        return len(self._num_read)

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], grammar: Grammar | None = None
    ) -> int:
        return self.capabilities.max_draft_len

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """`tokens` of a task must end with a generated token. A task of 0 drafts reads nothing."""
        assert all(0 <= task.draft_len <= self.capabilities.max_draft_len for task in tasks)
        self._clock.sleep(self._propose_s([task for task in tasks if task.draft_len > 0]))
        return [self._draft(task) for task in tasks]

    def _propose_s(self, tasks: Sequence[DraftTask]) -> float:
        if self._cost is None:
            return 0.0
        lengths = [task.draft_len for task in tasks]
        passes = range(1, max(lengths, default=0) + 1)
        num_prefill = sum(self.draft_prefill_len(task.sequence, len(task.tokens)) for task in tasks)
        passes_s = sum(self._cost.draft_s(sum(k >= p for k in lengths)) for p in passes)
        return passes_s + self._cost.draft_prefill_s * num_prefill

    def _draft(self, task: DraftTask) -> Draft:
        if task.draft_len == 0:
            return NO_DRAFT
        known = len(task.tokens)
        # The last token t - 1 is (key + 7 (t - 1)) mod vocab, which gives the key.
        key = (task.tokens[-1] - TOKEN_STEP * (known - 1)) % self._vocab_size
        self._num_read[task.sequence] = known
        drafted = (
            token_at(key, position, self._vocab_size) + self._error(task.tokens, key, position)
            for position in range(known, known + task.draft_len)
        )
        return Draft(tuple(token % self._vocab_size for token in drafted))

    def _error(self, tokens: Sequence[int], key: int, position: int) -> int:
        """0 if the draft is right, 1 if it is wrong."""
        prob = self._accept_prob
        if callable(prob):
            prob = prob(tokens, position)
        return 0 if _uniform(key, position) < prob else 1

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Raises KeyError if nothing was proposed."""
        self._num_read[sequence] += num_accepted + 1

    def draft_prefill_len(self, sequence: SequenceId, context_len: int) -> int:
        return max(context_len - self._num_read.get(sequence, 0), 0)

    def release(self, sequence: SequenceId) -> None:
        self._num_read.pop(sequence, None)

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Seconds of one draft pass by the cost model; no time passes on the clock."""
        if self._cost is None or self._cost.draft is None:
            return 0.0
        return self._cost.draft.pass_s(batch_size, batch_size * tokens_per_row, context_len)


def _uniform(key: int, position: int) -> float:
    """A number in [0, 1) that depends on both arguments only."""
    digest = hashlib.blake2b(struct.pack("<qqq", 1, key, position), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
