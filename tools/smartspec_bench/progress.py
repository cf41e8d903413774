"""Shows what a long command is doing, on stderr, so that stdout holds only results."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

LINE_EVERY_S = 10.0


class Progress:
    """Use as a context manager; `update` may be called from any thread.

    On a terminal one line is kept up to date. Elsewhere, as in a log file, the first label is
    printed, and then at most one label every 10 seconds.
    """

    def __init__(
        self,
        label: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """console: stderr by default."""
        self._console = console or Console(stderr=True)
        self._label, self._clock = label, clock
        self._status = self._console.status("") if self._console.is_terminal else None
        self._printed_s = -LINE_EVERY_S

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        self.update(self._label)
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, label: str) -> None:
        """Show what is done now."""
        if self._status is not None:
            self._status.update(Text(label, overflow="ellipsis", no_wrap=True))
        elif self._clock() - self._printed_s >= LINE_EVERY_S:
            self._printed_s = self._clock()
            self._console.print(label, soft_wrap=True, markup=False, highlight=False)
