"""One module a command. Heavy imports stand inside the functions, so that `--help` is fast."""

from __future__ import annotations

from typing import NoReturn

import typer

USAGE_ERROR = 2


def fail(message: str, exit_code: int = 1) -> NoReturn:
    """End the command with one line on stderr; `exit_code` 2 is for what the caller typed."""
    typer.echo(f"smartspec: {message}", err=True)
    raise typer.Exit(exit_code)
