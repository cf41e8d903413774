"""One module a command. Heavy imports stand inside the functions, so that `--help` is fast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import typer

USAGE_ERROR = 2


def fail(message: str, exit_code: int = 1) -> NoReturn:
    """End the command with one line on stderr; `exit_code` 2 is for what the caller typed."""
    typer.echo(f"smartspec: {message}", err=True)
    raise typer.Exit(exit_code)


def check_outputs(**options: Path | None) -> None:
    """End the command where a file that an option names could not be written, before work is done
    for it. options: by name, None where it was not given."""
    for option, path in options.items():
        if path is None:
            continue
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            rule = "must be a file that can be written, in a directory that exists"
            fail(f"--{option}: {path} {rule}", USAGE_ERROR)


def write_output(option: str, path: Path | None, text: str) -> None:
    """Write what an option asks for; nothing where it was not given."""
    try:
        if path is not None:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--{option}: {error}")
