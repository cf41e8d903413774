"""Which recurrent states are kept, and behind which prefix.

A model with recurrent states can continue a cached prefix only where the state behind it is kept.
When a chunk of a prompt has been read, a state near its end is copied to a slot. When all slots are
in use, the one whose prefix was used longest ago is taken.

This file only does the bookkeeping. The caller writes and reads states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

Load = Callable[[int, int, int], None]
"""Makes the state in a slot that of a row: slot, row, number of tokens before it."""


class Prefix(Protocol):
    """A text up to a block. state: the slot of a state that is kept. num_before: tokens of the
    block before that state."""

    state: int | None
    num_before: int


class KeptStates:
    """Slots for states."""

    def __init__(self, slots: Iterable[int], step: int, load: Load) -> None:
        """step: a multiple of so many tokens is before each state."""
        self.step, self.load = step, load
        self._free = list(slots)
        self._prefixes: dict[Prefix, None] = {}
        """Those with a state; the one that was used longest ago comes first."""

    def take(self) -> int | None:
        """A slot to write to; None if there is none."""
        if not self._free:
            prefix = next(iter(self._prefixes), None)
            if prefix is None:
                return None
            self.drop(prefix)
        return self._free.pop()

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def keep(self, prefix: Prefix, slot: int, num_before: int) -> None:
        """The slot has the state behind so many tokens of the prefix's last block."""
        self.drop(prefix)
        prefix.state, prefix.num_before = slot, num_before
        self._prefixes[prefix] = None

    def use(self, prefix: Prefix) -> None:
        """The prefix is used once more."""
        self._prefixes[prefix] = self._prefixes.pop(prefix)

    def take_from(self, prefix: Prefix) -> int | None:
        """The slot of this prefix, which loses it."""
        slot, prefix.state = prefix.state, None
        self._prefixes.pop(prefix, None)
        return slot

    def drop(self, prefix: Prefix) -> None:
        """Free the slot of this prefix, if it has one."""
        if (slot := self.take_from(prefix)) is not None:
            self._free.append(slot)
