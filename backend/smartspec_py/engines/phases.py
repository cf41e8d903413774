"""What a start does and how far it is, for people.

Each phase is a line of the log. How far it is, is not: such records are below the level INFO, and
only the launcher gets them. A model that is loaded beside another one is `unreported`.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

LIBRARIES, READING = "loading libraries", "reading weights"
PREPARING, MEASURING = "preparing passes", "measuring costs"

unreported = ContextVar("unreported", default=False)
"""Whether this thread reports no phases."""

logger = logging.getLogger(__name__)
logger.setLevel(logging.DEBUG)


@dataclass(frozen=True, slots=True)
class Phase:
    """share: of it that is done, 0 to 1. num_bytes: of all it reads; 0 for other phases. Records of
    this logger have it as their attribute `phase`."""

    name: str
    share: float = 0.0
    num_bytes: int = 0

    @property
    def size(self) -> str:
        """Of all it reads, such as `3.1 GB`; empty for other phases."""
        return size_text(self.num_bytes) if self.num_bytes else ""

    @property
    def amount(self) -> str:
        """How far it is, such as `1.2 GB of 3.1 GB`; empty if that is not known."""
        if self.num_bytes:
            return f"{size_text(int(self.share * self.num_bytes))} of {self.size}"
        return f"{self.share:.0%}" if self.share else ""


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def begin(name: str, num_bytes: int = 0) -> None:
    if not unreported.get():
        logger.info("%s", name, extra={"phase": Phase(name, 0.0, num_bytes)})


class Steps:
    """A phase that tells how far it is, at most once a percent."""

    def __init__(self, name: str, num_steps: int, num_bytes: int = 0) -> None:
        self._name, self._num_steps, self._num_bytes = name, max(1, num_steps), num_bytes
        self._num_done = 0
        self._is_reported = not unreported.get()  # other threads may add steps
        begin(name, num_bytes)

    def add(self, num_steps: int = 1) -> None:
        before = 100 * self._num_done // self._num_steps
        self._num_done += num_steps
        if self._is_reported and 100 * self._num_done // self._num_steps > before:
            share = min(1.0, self._num_done / self._num_steps)
            phase = Phase(self._name, share, self._num_bytes)
            logger.debug("%s", phase.amount, extra={"phase": phase})
