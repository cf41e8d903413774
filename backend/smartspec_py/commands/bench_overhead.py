"""`smartspec bench overhead`: tokens/s through Triton and HTTP against the bare engine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_py.commands import USAGE_ERROR, fail
from smartspec_py.commands.settings import checked_config, pair_settings
from smartspec_py.core.planner import parse_policy
from smartspec_py.launch import paths
from smartspec_py.launch.files import InstallationError
from smartspec_py.launch.foreground import signals_interrupt, wait_with_progress
from smartspec_py.launch.interpreter import InterpreterError
from smartspec_py.serving.config import ConfigError, ServerConfig
from smartspec_py.serving.profile import machine_name
from smartspec_py.triton_server import TritonServer, TritonServerError, free_address

if TYPE_CHECKING:
    from smartspec_py.bench.overhead import Overhead

TIMEOUT_S = 600.0


def overhead(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target.")],
    draft: Annotated[Path, typer.Option(help="That of the draft.")],
    rows: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,8,32",
    policies: Annotated[str, typer.Option(help="Separated by commas.")] = "none,goodput",
    rounds: Annotated[int, typer.Option(help="Pairs; 2 or more for intervals.", min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(help="Tokens a request at most.", min=2)] = 64,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    num_threads: Annotated[int, typer.Option(help="0: one less than cores.", min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write it there.")] = None,
) -> None:
    """Send the same requests to Triton by HTTP streams and to the same server in this process.

    Rounds alternate which comes first. The ratio is Triton's tokens/s over the other's: geometric
    mean over the rounds, 95 % interval by Student's t. The last line is one JSON document.
    """
    sizes = _sizes(rows)
    names = policies.split(",")
    for name in names:
        try:
            parse_policy(name)
        except ValueError as error:
            fail(f"--policies: {name!r} must be {error}", USAGE_ERROR)
    engine = pair_settings(model, draft, dtype, num_threads)
    config = checked_config({"engine": engine, "limits": {"max_sequences": max(sizes)}})
    console = Console(stderr=True)
    found = _measure(config, names, sizes, rounds, max_tokens, console)
    console.print(_table(found))
    document = {
        "format": "smartspec-overhead",
        "version": 1,
        "machine": machine_name(),
        "pair": f"target {model.name}, draft {draft.name}",
        "rounds": rounds,
        "max_tokens": max_tokens,
        "sizes": [_document(one) for one in found],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        fail(f"--rows: got {text!r}, must be numbers from 1 separated by commas", USAGE_ERROR)
    return sizes


def _measure(
    config: ServerConfig,
    policies: list[str],
    sizes: list[int],
    rounds: int,
    max_tokens: int,
    console: Console,
) -> list[Overhead]:
    from smartspec_py.bench.client import BenchError, Client
    from smartspec_py.bench.overhead import Sides, measure
    from smartspec_py.serving.build import build_engine
    from smartspec_py.serving.server import Server

    address = free_address()
    folder = paths.run_dir(address.http_port).resolve()
    triton = TritonServer(config, folder, address, keeps_files=False)
    fields = {"max_tokens": max_tokens, "stream": True, "reuse_prefix": False}

    async def both(local: Server) -> list[Overhead]:
        async with Client(address, fields, TIMEOUT_S) as client:
            sides = Sides(client, local, max_tokens)
            return await measure(sides, policies, sizes, rounds, status.update)

    try:
        with signals_interrupt(), triton:
            wait_with_progress(triton, console)
            local = Server(build_engine(config, Path.cwd()), config)
            local.start()
            try:
                with console.status("warming up") as status:
                    return asyncio.run(both(local))
            finally:
                local.stop()
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except (BenchError, ConfigError, InterpreterError, InstallationError, TritonServerError) as e:
        fail(str(e))


def _document(one: Overhead) -> dict[str, Any]:
    ratio = one.ratio
    return {**asdict(one), "ratio": None if ratio is None else asdict(ratio)}


def _table(found: list[Overhead]) -> Table:
    table = Table(title="Through Triton and HTTP, and in one process; tokens/s")
    table.add_column("policy")
    for column in ("at once", "Triton", "in process", "ratio", "low", "high"):
        table.add_column(column, justify="right")
    for one in found:
        ratio = one.ratio
        values = () if ratio is None else (ratio.value, ratio.low, ratio.high)
        table.add_row(
            one.policy,
            str(one.num_rows),
            *(f"{median:.1f}" for median in one.medians),
            *(f"{value:.3f}" for value in values),
        )
    return table
