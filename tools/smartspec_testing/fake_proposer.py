"""Drafts the text of `fake_engine`, right as often as it is told to be.

It goes on from the last known token by the target's rule, and decides at each position, by a seeded
hash, whether to draft the target's token or the one after it (token + 1).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import NO_DRAFT, Draft, DraftTask, ProposerCapabilities
from smartspec_testing.clock import Clock, RealClock
from smartspec_testing.fake_engine import FAKE_CAPABILITIES, TOKEN_STEP, token_at

AcceptProb = Callable[[Sequence[int], int], float]
"""Acceptance by the known tokens and the position of the draft.

To be the same for every draft length it may look at the prompt only, say at the first token.
"""


@dataclass(slots=True)
class _DraftState:
    """num_computed_tokens: tokens that count as read. context_len, num_drafted: of the last
    proposal."""

    num_computed_tokens: int
    context_len: int
    num_drafted: int


class FakeProposer:
    """Drafts the fake target's text, right with probability `accept_prob` at each position.

    Whether the draft at a position is right is a hash of (seed, (s + request seed) % vocab_size,
    position): it does not depend on the draft length, the load or the sequence's number. A right
    draft behind a wrong one is still drafted, and is rejected with it.

    The lag is that of a draft model's cache. Proposing at n known tokens reads those n; when a of
    the drafts were kept, `observe` adds a + 1, since the target's own token is what the next
    proposal begins with. So with (3, 4, 21) known, `draft_lag` is 3 at first; after 4 drafts of
    which 2 are kept, 6 tokens are known and read, and the lag is 0; after 5 steps without a
    proposal it is 5.

    A proposal lasts `cost.draft_s` of each of its passes and `cost.catch_up_s` for each token of
    lag.
    """

    def __init__(
        self,
        accept_prob: float | AcceptProb,
        *,
        vocab_size: int = FAKE_CAPABILITIES.vocab_size,
        max_draft_len: int = FAKE_CAPABILITIES.max_draft_len,
        seed: int = 1,
        cost: CostModel | None = None,
        clock: Clock | None = None,
        bytes_per_token: int = 0,
    ) -> None:
        self._accept_prob = accept_prob
        self._vocab_size = vocab_size
        self._capabilities = ProposerCapabilities(max_draft_len, bytes_per_token=bytes_per_token)
        self._seed = seed
        self._cost = cost
        self._clock = clock or RealClock()
        self._states: dict[SequenceId, _DraftState] = {}

    @property
    def capabilities(self) -> ProposerCapabilities:
        return self._capabilities

    @property
    def num_sequences(self) -> int:
        """Sequences whose state is kept."""
        return len(self._states)

    def num_available(self, sequence: SequenceId, tokens: Sequence[int]) -> int:
        return self._capabilities.max_draft_len

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """`tokens` of a task must end with a generated token. A task of 0 drafts reads nothing."""
        for task in tasks:
            if not 0 <= task.draft_len <= self._capabilities.max_draft_len:
                raise ValueError(f"{task.draft_len} drafts of sequence {task.sequence}")
        self._clock.sleep(self._propose_s(tasks))
        return [self._draft(task) for task in tasks]

    def _propose_s(self, tasks: Sequence[DraftTask]) -> float:
        if self._cost is None:
            return 0.0
        lengths = [task.draft_len for task in tasks if task.draft_len > 0]
        passes = range(1, max(lengths, default=0) + 1)
        lag = sum(
            self.draft_lag(task.sequence, len(task.tokens)) for task in tasks if task.draft_len > 0
        )
        passes_s = sum(self._cost.draft_s(sum(k >= p for k in lengths)) for p in passes)
        return passes_s + self._cost.catch_up_s * lag

    def _draft(self, task: DraftTask) -> Draft:
        if task.draft_len == 0:
            return NO_DRAFT
        known = len(task.tokens)
        # The last token t - 1 is (key + 7 (t - 1)) mod vocab: it tells the key.
        key = (task.tokens[-1] - TOKEN_STEP * (known - 1)) % self._vocab_size
        self._states[task.sequence] = _DraftState(known, known, task.draft_len)
        drafted = (
            (token_at(key, position, self._vocab_size) + self._error(task.tokens, key, position))
            % self._vocab_size
            for position in range(known, known + task.draft_len)
        )
        return Draft(tuple(drafted))

    def _error(self, tokens: Sequence[int], key: int, position: int) -> int:
        """0 where the draft is right, 1 where it is wrong."""
        prob = self._accept_prob
        if callable(prob):
            prob = prob(tokens, position)
        return 0 if _uniform(self._seed, key, position) < prob else 1

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Raises KeyError where nothing was proposed, ValueError for more than was drafted."""
        state = self._states[sequence]
        if not 0 <= num_accepted <= state.num_drafted:
            raise ValueError(f"{num_accepted} of {state.num_drafted} drafts accepted")
        state.num_computed_tokens = state.context_len + num_accepted + 1

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        state = self._states.get(sequence)
        return max(context_len - state.num_computed_tokens, 0) if state else context_len

    def release(self, sequence: SequenceId) -> None:
        """Does nothing where nothing was ever proposed for the sequence."""
        self._states.pop(sequence, None)

    def close(self) -> None:
        self._states.clear()

    def time_pass(
        self, batch_size: int, tokens_per_row: int, context_len: int, num_logits: int | None = None
    ) -> float:
        """Seconds of one draft pass by the cost model; no time passes on the clock.

        Logits cost nothing here.
        """
        if self._cost is None or self._cost.draft is None:
            return 0.0
        return self._cost.draft.pass_s(batch_size, batch_size * tokens_per_row, context_len)


def _uniform(seed: int, key: int, position: int) -> float:
    """A number in [0, 1) that the three arguments decide."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, key, position), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
