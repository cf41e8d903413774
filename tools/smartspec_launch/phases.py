"""Shows the phases of a start: a line for each, and in a terminal a bar."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from smartspec_py.engines.phases import Phase


class PhaseDisplay:
    """Use as a context manager.

    A terminal keeps a line for each phase, with its bar and its time. Elsewhere each phase is one
    line when it begins.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
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
            if not self._console.is_terminal:
                self._console.print(", ".join(filter(None, (text, phase.size))), highlight=False)
        if self._bar is not None and phase.amount:
            done = min(phase.share, 0.999)  # 1.0 would stop its clock
            self._bars.update(self._bar, total=1.0, completed=done, amount=phase.amount)

    def _end(self) -> None:
        """The current phase is over."""
        if self._bar is not None:
            self._bars.update(self._bar, total=1.0, completed=1.0, amount="")
