"""`smartspec bench merge`: combines several runs of the same kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from smartspec_bench.document import DocumentError, read, write
from smartspec_cli.commands import USAGE_ERROR, fail
from smartspec_cli.commands.bench_load import TABLE_WIDTH

if TYPE_CHECKING:
    from smartspec_bench.document import Document


def merge(
    results: Annotated[list[Path], typer.Argument(help="JSON documents of `bench load`.")],
    json_file: Annotated[Path, typer.Option("--json", help="File for the merged result.")],
) -> None:
    """Combine several runs into one document, with verdicts for all repeats together.

    The runs must have the same form, pair, machine, commit and limits, and different seeds. Each
    run's rates are shares of the saturation that it measured itself.
    """
    from smartspec_bench.merged import MergeError, merged
    from smartspec_bench.tables import print_results

    try:
        documents = [read(path) for path in results]
        whole: Document = merged(documents)
    except (DocumentError, MergeError) as error:
        fail(str(error), USAGE_ERROR)
    try:
        write(json_file, whole)
    except OSError as error:
        fail(f"--json: {error}", USAGE_ERROR)
    console = Console(stderr=True)
    console.width = max(console.width, TABLE_WIDTH)
    print_results(console, whole)
    console.print(f"document: {json_file}", soft_wrap=True)
