"""Shows how far a long command is, on stderr, so that stdout holds only results.

On a terminal one line is kept up to date. Elsewhere, as in a log file, a line is printed at the
start and then every ten seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.text import Text

TERMINAL_EVERY_S = 0.25
LINE_EVERY_S = 10.0

_Item = TypeVar("_Item")


class Progress:
    """Use as a context manager; `update` may be called from any thread."""

    def __init__(
        self,
        label: str,
        total: float | None = None,
        unit: str = "",
        *,
        console: Console | None = None,
        every_s: float = LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """label: the current work. total: None if it is not known. unit: what is counted, plural.
        console: stderr by default. every_s: seconds between two lines without a terminal."""
        self._console = console or Console(stderr=True)
        self._label, self._done, self._total, self._unit = label, 0.0, total, unit
        self._every_s = TERMINAL_EVERY_S if self._console.is_terminal else every_s
        self._clock = clock
        self._start_s = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show_until_ended, daemon=True)
        self._stack = ExitStack()
        self._show: Callable[[Text], None] = partial(self._console.print, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._start_s = self._clock()
        if self._console.is_terminal:
            self._show = self._stack.enter_context(self._console.status(self._text())).update
        else:
            self._show(self._text())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._stack.close()

    def update(
        self, label: str | None = None, *, done: float | None = None, total: float | None = None
    ) -> None:
        """Change the given values; they are shown with the next update."""
        self._label = self._label if label is None else label
        self._done = self._done if done is None else done
        self._total = self._total if total is None else total

    def advance(self, label: str | None = None) -> None:
        """One more is done."""
        self.update(label, done=self._done + 1)

    def line(self) -> str:
        """Such as `round 2: 30 of 240 requests, about 45 s left`."""
        elapsed_s = self._clock() - self._start_s
        if self._total is None:
            return f"{self._label}, {duration(elapsed_s)}" if elapsed_s >= 1 else self._label
        text = f"{self._label}: {int(self._done):,} of {int(self._total):,} {self._unit}".rstrip()
        if not self._done:
            return text
        left_s = max(0.0, elapsed_s * (self._total - self._done) / self._done)
        return f"{text}, about {duration(left_s)} left"

    def _text(self) -> Text:
        return Text(self.line(), overflow="ellipsis", no_wrap=self._console.is_terminal)

    def _show_until_ended(self) -> None:
        while not self._ended.wait(self._every_s):
            self._show(self._text())


def tracked(
    label: str, items: Iterable[_Item], unit: str, total: int | None = None
) -> Iterator[_Item]:
    """The items, with a `Progress` that counts finished items. total: for items without len."""
    with Progress(label, len(items) if isinstance(items, Sized) else total, unit) as progress:
        for item in items:
            yield item
            progress.advance()


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
