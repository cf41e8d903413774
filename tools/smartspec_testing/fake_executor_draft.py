"""The fake of a draft engine's executor: one that is wrong now and then.

Its tokens are those that the target's fake draws, so every draft would be accepted; here some are
replaced by their successor, by a draw of the seed.
"""

from __future__ import annotations

import random
from typing import Any

from smartspec_testing.fake_executor import Executor


class DraftExecutor(Executor):
    """accept_prob: probability that a token is left as it is."""

    def __init__(self, *args: Any, accept_prob: float, **options: Any) -> None:
        if not 0.0 <= accept_prob <= 1.0:
            raise ValueError(f"accept_prob must be in [0, 1], got {accept_prob}")
        super().__init__(*args, **options)
        self._accept_prob = accept_prob
        self._mistakes = random.Random(options.get("seed", 1))

    def _await(self, *args: Any) -> list[Any]:
        responses = super()._await(*args)
        for response in responses:
            if not response.has_error():
                beams = response.result.output_token_ids
                response.result.output_token_ids = [[self._drafted(t) for t in b] for b in beams]
        return responses

    def _drafted(self, token: int) -> int:
        is_right = self._mistakes.random() < self._accept_prob
        return token if is_right else (token + 1) % self._limits.vocab_size
