"""The rule by which a part of the server is dead or hangs.

- A process is dead when it has ended, and only then.
- What makes no progress for a limit far above a pass on a busy machine hangs. Progress is a count:
  steps of the loop, messages or answers of a process. All of them count without requests, too.

Anything else is busy: a thread that waits for Python's lock may be silent for seconds.
"""

from __future__ import annotations

from pathlib import Path

MAX_GAP_S = 2.0
"""Most seconds that count between two looks. The watcher may have been suspended itself."""


class ProgressWatch:
    """Whether a count has stayed the same for limit_s seconds. Not for several threads."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._count: int | None = None
        self._looked_s = 0.0
        self._still_s = 0.0

    def look(self, count: int, now: float) -> None:
        """Note the count at the time now, in seconds of any origin. Call it at least every
        MAX_GAP_S."""
        is_same = count == self._count
        gap_s = min(now - self._looked_s, MAX_GAP_S)
        self._still_s = self._still_s + gap_s if is_same else 0.0
        self._count, self._looked_s = count, now

    @property
    def is_hung(self) -> bool:
        return self._still_s >= self.limit_s


def has_ended(pid: int) -> bool:
    """Whether the process has ended. A zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    # The name before it is in parentheses, and may contain any character.
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")
