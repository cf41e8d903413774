"""One module per command. Heavy imports are inside the functions, so that `--help` is fast."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

USAGE_ERROR = 2

STDOUT = Path("-")

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout."),
]
"""The option of every command that can write its result as JSON."""


def fail(message: str, exit_code: int = 1) -> NoReturn:
    """End the command with one line on stderr. `exit_code` 2 means a wrong option."""
    typer.echo(f"smartspec: {message}", err=True)
    raise typer.Exit(exit_code)


def note(text: str) -> None:
    """Print one line on stderr."""
    typer.echo(text, err=True)


def check_outputs(**options: Path | None) -> None:
    """End the command early if an output file cannot be written.

    options: paths by option name; None if the option was not given.
    """
    for option, path in options.items():
        if path is None or (option == "json" and path == STDOUT):
            continue
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            rule = "must be a writable file in an existing directory"
            fail(f"--{option}: {path} {rule}", USAGE_ERROR)


def result_console(json_file: Path | None) -> Console:
    """The console for tables: stdout, or stderr if the JSON document goes to stdout."""
    from rich.console import Console

    return Console(stderr=json_file == STDOUT)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str | None = None,
    num_texts: int = 1,
) -> Table:
    """A table with narrow columns. The first num_texts columns are texts, the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number < num_texts else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def write_json(json_file: Path | None, document: object) -> None:
    """Write the result to the file of `--json`. Does nothing if the option was not given."""
    if json_file == STDOUT:
        print(json.dumps(document, allow_nan=False), flush=True)
    else:
        write_output("json", json_file, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_output(option: str, path: Path | None, text: str) -> None:
    """Write the text to the file of an option. Does nothing if the option was not given."""
    try:
        if path is not None:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--{option}: {error}")
