"""`smartspec report`: the page of a benchmark run, from its result document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smartspec_cli.commands import USAGE_ERROR, fail


def report(
    result: Annotated[Path, typer.Argument(help="JSON document of `bench load`.")],
    html: Annotated[
        Path | None, typer.Option(help="The page; else beside RESULT, ending in .html.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Directory for the pictures as PNG files too.")
    ] = None,
) -> None:
    """Write one HTML page of a run of `bench load`, with its pictures inside; it needs no network
    and no script. Documents of `bench arms` and `bench overhead` have no page: they print a table.

    The last line of stdout is the page's path.
    """
    from smartspec_bench.document import DocumentError, read

    try:
        document = read(result)
    except DocumentError as error:
        fail(str(error), USAGE_ERROR)
    try:
        from smartspec_bench.page import page
        from smartspec_bench.pictures import pictures as pictures_of
        from smartspec_bench.pictures import write_pictures
    except ModuleNotFoundError as error:
        fail(f"the page needs {error.name}: pip install 'smartspec-py[plot]'")
    drawn = pictures_of(document)
    path = html or result.with_suffix(".html")
    try:
        path.write_text(page(document, drawn), encoding="utf-8")
        if pictures is not None:
            for file in write_pictures(drawn, pictures):
                typer.echo(file)
    except OSError as error:
        fail(str(error))
    typer.echo(path)
