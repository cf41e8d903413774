"""Estimates how many tokens a request will still generate.

One-time costs of drafting, such as reading a prompt with the draft model, are spread over them. The
limit of a request says little about them: many clients leave it out or send the model's.
"""

from __future__ import annotations

INITIAL_MEAN = 128.0
"""Assumed before any answer. It has the weight of one."""

FORGETTING = 0.95
"""Decay factor of an answer's weight, per answer."""


class AnswerLength:
    """Tokens of the answers so far, of all requests alike."""

    def __init__(self) -> None:
        self.mean = INITIAL_MEAN
        self._weight = 1.0

    def observe(self, num_generated: int) -> None:
        """Learn from a request that has ended."""
        self._weight = FORGETTING * self._weight + 1.0
        self.mean += (num_generated - self.mean) / self._weight

    def rest(self, num_generated: int) -> int:
        """Tokens that a request will still generate. As many as it has, if it is longer than usual:
        lengths of answers spread over powers of ten."""
        return round(max(self.mean, num_generated))
