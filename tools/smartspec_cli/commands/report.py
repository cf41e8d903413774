"""`smartspec report`: prints the result of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smartspec_cli.commands import USAGE_ERROR, fail


def report(
    result: Annotated[Path, typer.Argument(help="JSON document of `smartspec bench`.")],
) -> None:
    """Print the tables of a result of `smartspec bench`, in Markdown."""
    from smartspec_bench.report import markdown
    from smartspec_bench.results import DocumentError, read

    try:
        typer.echo(markdown(read(result)))
    except DocumentError as error:
        fail(str(error), USAGE_ERROR)
