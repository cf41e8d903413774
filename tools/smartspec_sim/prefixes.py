"""The shared prefixes of prompts that a simulated server has in its cache.

A prefix is a name with a number of tokens, such as a system prompt. A prompt that begins with a
cached prefix is computed from its end on. Least recently used prefixes are removed first.
"""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """capacity: in tokens. 0 means no reuse."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_tokens = 0
        self._lengths: OrderedDict[str, int] = OrderedDict()

    def use(self, prefix: str | None) -> int:
        """Number of cached tokens of this prefix. None is never cached."""
        if prefix is None or prefix not in self._lengths:
            return 0
        self._lengths.move_to_end(prefix)
        return self._lengths[prefix]

    def add(self, prefix: str | None, length: int) -> None:
        """Cache a prefix whose tokens have been computed. A longer one than the cache is not
        kept."""
        if prefix is None or length > self._capacity or self.use(prefix):
            return
        self._lengths[prefix] = length
        self._num_tokens += length
        while self._num_tokens > self._capacity:
            self._num_tokens -= self._lengths.popitem(last=False)[1]
