"""`smartspec report`: makes an HTML page from the result document of a benchmark run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smartspec_cli.commands import USAGE_ERROR, fail

if TYPE_CHECKING:
    from smartspec_bench.report.blocks import Report


def report(
    result: Annotated[Path, typer.Argument(help="JSON document of `bench load`, or gpu.json.")],
    html: Annotated[
        Path | None, typer.Option(help="File for the page; default: RESULT with .html.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Directory for the charts as PNG files.")
    ] = None,
) -> None:
    """Write one HTML page for a run of `bench load`, or for gpu.json of `scripts/bench --gpu`.

    The page contains its charts and needs no network. Documents of `bench arms` and `bench
    overhead` have no page, because these commands print a table. The last line of stdout is the
    page's path.
    """
    from smartspec_bench.document import DocumentError

    try:
        made = _report_of(result)
        from smartspec_bench.report.html import page, write_pictures
    except DocumentError as error:
        fail(str(error), USAGE_ERROR)
    except ModuleNotFoundError as error:
        fail(f"the page needs {error.name}: run `pip install 'smartspec-py[plot]'`")
    path = html or result.with_suffix(".html")
    try:
        path.write_text(page(made), encoding="utf-8")
        if pictures is not None:
            for file in write_pictures(made, pictures):
                typer.echo(file)
    except OSError as error:
        fail(str(error))
    typer.echo(path)


def _report_of(path: Path) -> Report:
    """The report of a document of either kind. Raises DocumentError."""
    from smartspec_bench.document import kind_of, raw_of, read
    from smartspec_bench.gpu import document as gpu

    if kind_of(raw := raw_of(path))[0] != gpu.FORMAT:
        document = read(path)
        from smartspec_bench.report.load import report as report_of_load

        return report_of_load(document)
    measured = gpu.parsed(path, raw)
    from smartspec_bench.gpu.charts import charts_of
    from smartspec_bench.gpu.page import report as report_of_gpu

    return report_of_gpu(measured, charts_of(measured))
