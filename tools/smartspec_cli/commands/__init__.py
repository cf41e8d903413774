"""One module a command. Heavy imports stand inside the functions, so that `--help` is fast."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

USAGE_ERROR = 2

STDOUT = Path("-")

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout."),
]
"""The option of every command that has a result for programs."""


def fail(message: str, exit_code: int = 1) -> NoReturn:
    """End the command with one line on stderr; `exit_code` 2 is for what the caller typed."""
    typer.echo(f"smartspec: {message}", err=True)
    raise typer.Exit(exit_code)


def check_outputs(**options: Path | None) -> None:
    """End the command where a file that an option names could not be written, before work is done
    for it. options: by name, None where it was not given."""
    for option, path in options.items():
        if path is None or (option == "json" and path == STDOUT):
            continue
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            rule = "must be a file that can be written, in a directory that exists"
            fail(f"--{option}: {path} {rule}", USAGE_ERROR)


def result_console(json_file: Path | None) -> Console:
    """Where tables go: stdout, or stderr where stdout is for the JSON document."""
    from rich.console import Console

    return Console(stderr=json_file == STDOUT)


def write_json(json_file: Path | None, document: object) -> None:
    """Write the result where `--json` says; nothing where it was not given."""
    if json_file == STDOUT:
        print(json.dumps(document, allow_nan=False), flush=True)
    else:
        write_output("json", json_file, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_output(option: str, path: Path | None, text: str) -> None:
    """Write what an option asks for; nothing where it was not given."""
    try:
        if path is not None:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--{option}: {error}")
