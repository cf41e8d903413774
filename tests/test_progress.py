"""What long commands show of their progress: lines in a log file, one line on a terminal."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from smartspec_bench.progress import Progress, duration


class Lines(io.StringIO):
    """Tells when a text was written."""

    def __init__(self, awaited: str = "") -> None:
        super().__init__()
        self._awaited = awaited
        self.has_come = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._awaited in self.getvalue():
            self.has_come.set()
        return written


def at(seconds: float, done: float, total: float | None) -> str:
    """The line when so much is done after so many seconds."""
    times = iter([0.0, seconds])
    progress = Progress("round 1", total, "requests", clock=lambda: next(times))
    progress.update(done=done)
    return progress.line()


@pytest.mark.parametrize(
    ("seconds", "done", "total", "line"),
    [
        (0.0, 0, None, "round 1"),
        (30.0, 0, None, "round 1, 30 s"),
        (30.0, 0, 40, "round 1: 0 of 40 requests"),
        (30.0, 10, 40, "round 1: 10 of 40 requests, about 90 s left"),
        (30.0, 1, 21, "round 1: 1 of 21 requests, about 10 min left"),
        (30.0, 40, 40, "round 1: 40 of 40 requests, about 0 s left"),
        (30.0, 41, 40, "round 1: 41 of 40 requests, about 0 s left"),
        (1.0, 1000, 2000, "round 1: 1,000 of 2,000 requests, about 1 s left"),
    ],
)
def test_line(seconds: float, done: float, total: float | None, line: str) -> None:
    assert at(seconds, done, total) == line


def test_without_a_terminal_lines_are_printed_at_once_and_again() -> None:
    lines = Lines("\nb: 1 of 4")
    console = Console(file=lines, width=20)
    with Progress("a label that is longer than a line", 4, console=console, every_s=0.01) as shown:
        assert lines.getvalue() == "a label that is longer than a line: 0 of 4\n"
        shown.advance("b")
        assert lines.has_come.wait(60)
    num_lines = lines.getvalue().count("\n")
    assert lines.getvalue().count("\n") == num_lines, "nothing is printed after the end"


def test_on_a_terminal_one_line_is_kept() -> None:
    shown = Lines()
    with Progress("[bold]warm-up", console=Console(file=shown, force_terminal=True, width=40)):
        pass
    assert "[bold]warm-up" in shown.getvalue(), "labels are no markup"
    assert shown.getvalue().count("\n") <= 1


def test_duration() -> None:
    assert [duration(s) for s in (0, 119, 121, 3600)] == ["0 s", "119 s", "2 min", "60 min"]
