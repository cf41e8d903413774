"""Shows the phases of a start: a line for each, and in a terminal a bar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from smartspec_py.engines.phases import Phase

LINE_EVERY_S = 4.0

SHORT_S = 1.0
"""What takes less may be left out, see `shown`."""


class PhaseDisplay:
    """Use as a context manager.

    A terminal keeps a line for each phase, with its bar and its time. Elsewhere each phase is one
    line when it begins, and another one after each LINE_EVERY_S.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._name = ""
        self._begin_s = self._printed_s = 0.0
        self._bar: TaskID | None = None
        self._bars = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[amount]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> PhaseDisplay:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._bars.stop()

    def show(self, phase: Phase) -> None:
        """Show what the start does now."""
        if phase.name != self._name:
            self._end()
            self._name = phase.name
            text = phase.name[0].upper() + phase.name[1:]
            self._bar = self._bars.add_task(text, total=None, amount="")
            self._begin_s = self._clock()
            self._line(text, phase.size)
        elif self._clock() - self._printed_s >= LINE_EVERY_S:
            self._line(f"  {self._clock() - self._begin_s:.0f} s", phase.amount)
        if self._bar is not None and phase.amount:
            done = min(phase.share, 0.999)  # 1.0 would stop its clock
            self._bars.update(self._bar, total=1.0, completed=done, amount=phase.amount)

    def _line(self, *parts: str) -> None:
        self._printed_s = self._clock()
        if not self._console.is_terminal:
            text = ", ".join(filter(None, parts))
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _end(self) -> None:
        """The current phase is over."""
        if self._bar is not None:
            self._bars.update(self._bar, total=1.0, completed=1.0, amount="")


@contextmanager
def shown(text: str, console: Console | None = None, after_s: float = 0.0) -> Iterator[None]:
    """Show the block as one phase as long as it runs. console: default is stderr. after_s: a block
    that takes less is not shown."""
    phase, is_over = Phase(text), threading.Event()

    def show() -> None:
        if not (after_s and is_over.wait(after_s)):
            with PhaseDisplay(console or Console(stderr=True)) as display:
                display.show(phase)
                while not is_over.wait(SHORT_S):
                    display.show(phase)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
