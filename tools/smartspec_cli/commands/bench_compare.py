"""`smartspec bench compare`: compares two runs of `bench load`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smartspec_bench.document import DocumentError, read
from smartspec_cli.commands import USAGE_ERROR, fail
from smartspec_cli.commands.bench_load import TABLE_WIDTH


def compare(
    before: Annotated[Path, typer.Argument(help="JSON document of `bench load`.")],
    after: Annotated[Path, typer.Argument(help="JSON document of a second run.")],
) -> None:
    """Print every point and policy that both runs have, with the ratio of the second to the first.

    Ratios are geometric means over the repeats with a 95 % interval. The interval does not cover
    changes of the machine between the two runs.
    """
    from smartspec_bench.tables import compare_table

    try:
        documents = read(before), read(after)
    except DocumentError as error:
        fail(str(error), USAGE_ERROR)
    table = compare_table(*documents)
    if not table.row_count:
        fail("the runs have no point and policy in common")
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
