"""Seconds of passes while a profile is measured: the best of several rounds of each.

They are also kept in a file, so that a start that is cut off does not measure them again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NEVER = (0, math.inf)
"""Rounds, and the best of them in seconds."""

KEEP_S = 1.0
"""The file is written at most so often: writing takes time between passes."""


class PassTimes:
    """budget_s: after so many seconds no more is measured than each pass once. path: of the file;
    None keeps nothing. clock: seconds, any origin."""

    def __init__(
        self,
        budget_s: float = math.inf,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._until_s = clock() + budget_s
        self._path = path
        self._next_keep_s = -math.inf
        self._times = {} if path is None else _load(path)

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self._clock() >= self._until_s

    def num_rounds(self, key: str) -> int:
        return self._times.get(key, NEVER)[0]

    def best_s(self, key: str) -> float:
        """Infinite where it was never timed."""
        return self._times.get(key, NEVER)[1]

    def add(self, key: str, seconds: float) -> None:
        self._times[key] = (self.num_rounds(key) + 1, min(seconds, self.best_s(key)))
        if self._path is not None and self._clock() >= self._next_keep_s:
            self._next_keep_s = self._clock() + KEEP_S
            try:
                write_json(self._path, self._times)
            except OSError:  # said once, of the profile itself
                self._path = None

    def remove(self) -> None:
        """The file, when the profile is made."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _load(path: Path) -> dict[str, tuple[int, float]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        times = {key: (int(rounds), float(best_s)) for key, (rounds, best_s) in rows.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read (%s): measuring again", path, error)
        return {}
    logger.info("%d passes were timed by a start before this one: %s", len(times), path)
    return times


def write_json(path: Path, document: Any) -> None:
    """Written beside and then renamed, so that a reader never sees half a file. Raises OSError, and
    then leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
        partial.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
