"""`smartspec report`: shows the result of a benchmark as an HTML page or as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smartspec_cli.commands import USAGE_ERROR, fail


def report(
    result: Annotated[Path, typer.Argument(help="JSON document of `smartspec bench`.")],
    html: Annotated[
        Path | None, typer.Option(help="File for the page; default: RESULT with .html.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as Markdown instead.")
    ] = False,
) -> None:
    """Write one HTML page for a result of `smartspec bench`.

    The page needs no network. The last line of stdout is the page's path.
    """
    from smartspec_bench.report import markdown as markdown_of
    from smartspec_bench.report import page
    from smartspec_bench.results import DocumentError, read

    try:
        document = read(result)
        if markdown:
            typer.echo(markdown_of(document))
            return
        path = html or result.with_suffix(".html")
        path.write_text(page(document), encoding="utf-8")
    except DocumentError as error:
        fail(str(error), USAGE_ERROR)
    except OSError as error:
        fail(f"--html: {error}")
    typer.echo(path)
