"""`smartspec bench`: measures the speed-up of speculation on this machine with a live Triton."""

from __future__ import annotations

import typer

from smartspec_cli.commands.bench_arms import arms
from smartspec_cli.commands.bench_compare import compare
from smartspec_cli.commands.bench_load import load
from smartspec_cli.commands.bench_merge import merge
from smartspec_cli.commands.bench_overhead import overhead

bench = typer.Typer(
    help="Compare policies on one live server: per request, under load, and with the bare engine.",
    no_args_is_help=True,
    add_completion=False,
)
for _command in (arms, load, overhead, compare, merge):
    bench.command()(_command)
