"""What long commands show of their progress: lines in a log file, one line on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from smartspec_bench.progress import Progress


def test_without_a_terminal_a_line_is_printed_every_ten_seconds() -> None:
    """Labels come at 0, 4, 12 and 13 s."""
    lines, times = io.StringIO(), iter([0.0, 0.0, 4.0, 12.0, 12.0, 13.0])
    with Progress("a", Console(file=lines), clock=lambda: next(times)) as shown:
        for label in ("b", "[bold]c", "d"):
            shown.update(label)
    assert lines.getvalue() == "a\n[bold]c\n"


def test_on_a_terminal_one_line_is_kept() -> None:
    lines = io.StringIO()
    with Progress("[bold]warm-up", Console(file=lines, force_terminal=True, width=40)):
        pass
    assert "[bold]warm-up" in lines.getvalue(), "labels are no markup"
    assert lines.getvalue().count("\n") <= 1
