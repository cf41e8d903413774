"""Which requests are expected to draft alike, where the client does not say.

What an application sends begins with its system prompt, and the requests of one application draft
alike more than those of two do. So requests whose prompts begin with the same tokens are a kind, if
they are many: of the prefixes of 4, 6, 8, 12, .. tokens of a prompt, the longest that a sixteenth
of the recent requests share. A header that all applications have is a prefix as well, but the ones
behind it are longer; what differs from request to request is shared by too few. So there are never
more than sixteen beginnings that do not hold one another, and a rare request has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

LENGTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of the prefixes that are told apart. What applications differ by must fill a prefix up to
the next of these: behind a header of 20 tokens, four of an application's own are enough."""

LEAST_SHARE = 1 / 16
"""Of the recent requests, for a prefix to be a kind."""

ENOUGH_REQUESTS = 32
"""Before these were seen, a share says little."""

LEAST_REQUESTS = 8
"""That share a prefix: two with the same prompt are no application."""

WINDOW = 1024
"""Requests after which all counts are halved: what nobody sends any more is forgotten."""

NO_KIND = ""


class PromptKinds:
    """Counts prefixes. Any thread may ask."""

    def __init__(self) -> None:
        self._num_seen = 0.0
        self._counts: dict[int, float] = {}
        self._lock = Lock()

    @property
    def num_counted(self) -> int:
        """Prefixes that are counted now: at most those of WINDOW requests, at each length."""
        return len(self._counts)

    def of(self, prompt: Sequence[int]) -> str:
        """The kind of this prompt, which is counted from now on, or NO_KIND."""
        with self._lock:
            if self._num_seen >= WINDOW:
                self._age()
            self._num_seen += 1
            return self._longest(prompt)

    def _longest(self, prompt: Sequence[int]) -> str:
        found = NO_KIND
        is_known = self._num_seen >= ENOUGH_REQUESTS
        for length in LENGTHS:
            if length > len(prompt):
                break
            # Its tokens may be many, and nobody asks for them again. Hashes of integers are the
            # same in every process.
            key = hash(tuple(prompt[:length]))
            count = self._counts[key] = self._counts.get(key, 0.0) + 1
            if is_known:
                if count < max(LEAST_REQUESTS, LEAST_SHARE * self._num_seen):
                    break  # what is behind a rare prefix is no less rare
                found = f"{length} tokens {key & 0xFFFFFFFF:08x}"
        return found

    def _age(self) -> None:
        """A prefix that was seen once since the last time is forgotten."""
        self._counts = {key: count / 2 for key, count in self._counts.items() if count >= 2}
        self._num_seen /= 2
