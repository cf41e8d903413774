"""`smartspec bench overhead`: tokens/s through the front and Triton, and of the engine alone."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench.progress import Progress
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    write_json,
)
from smartspec_cli.commands.settings import checked_config, pair_settings, policies_of, sizes_of
from smartspec_launch import paths
from smartspec_launch.address import behind_front
from smartspec_launch.files import InstallationError
from smartspec_launch.foreground import signals_interrupt, wait_with_progress
from smartspec_launch.interpreter import InterpreterError
from smartspec_launch.paths import with_absolute_paths
from smartspec_launch.triton_server import TritonServer, TritonServerError, free_address
from smartspec_py.serving.config import (
    DEFAULT_CONTEXT_LEN,
    ConfigError,
    ServerConfig,
    read_config,
)
from smartspec_py.serving.profile import machine_name

if TYPE_CHECKING:
    from smartspec_bench.overhead import Overhead
    from smartspec_bench.ratios import Ratio

TIMEOUT_S = 600.0


def overhead(
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory of the target model.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Hugging Face directory of the draft model.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="An engine.json instead of a pair, for example of the fake engine."),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Numbers of requests at the same time, separated by commas.")
    ] = "1,8,32",
    policies: Annotated[str, typer.Option(help="Policies, separated by commas.")] = "none,goodput",
    rounds: Annotated[
        int, typer.Option(help="Number of repeats; 2 or more for intervals.", min=1)
    ] = 6,
    max_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens to generate for a request.", min=2)
    ] = 64,
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32 or bfloat16.")] = "auto",
    num_threads: Annotated[
        int, typer.Option(help="Compute threads; 0 uses one less than the number of cores.", min=0)
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Send the same requests through the front, to Triton, and to a server in this process.

    The order differs in each round. Averages are geometric means over the rounds. Ratios compare
    tokens/s, with 95 % intervals: Triton to the process, and the front to Triton.
    """
    check_outputs(json=json_file)
    sizes, names = sizes_of(rows), policies_of(policies)
    if config is not None:
        checked, pair = _read(config), str(config)
    elif model is not None and draft is not None:
        engine = pair_settings(model, draft, dtype, num_threads)
        limits = {"max_sequences": max(sizes), "max_context_len": DEFAULT_CONTEXT_LEN}
        checked = checked_config({"engine": engine, "limits": limits})
        pair = f"target {model.name}, draft {draft.name}"
    else:
        fail("--model and --draft, or --config, must be given", USAGE_ERROR)
    console = Console(stderr=True)
    found = _measure(checked, names, sizes, rounds, max_tokens, console)
    result_console(json_file).print(_table(found))
    document = {
        "format": "smartspec-overhead",
        "version": 2,
        "machine": machine_name(),
        "pair": pair,
        "rounds": rounds,
        "max_tokens": max_tokens,
        "sizes": [_document(one) for one in found],
    }
    write_json(json_file, document)


def _read(path: Path) -> ServerConfig:
    try:
        return with_absolute_paths(read_config(path), path.resolve().parent)
    except ConfigError as error:
        fail(str(error), USAGE_ERROR)


def _measure(
    config: ServerConfig,
    policies: list[str],
    sizes: list[int],
    rounds: int,
    max_tokens: int,
    console: Console,
) -> list[Overhead]:
    from smartspec_bench.client import BenchError, Client
    from smartspec_bench.overhead import Sides, measure
    from smartspec_py.serving.build import build_engine
    from smartspec_py.serving.server import Server

    address = behind_front(free_address())
    folder = paths.run_dir(address.http_port).resolve()
    triton = TritonServer(config, folder, address, keeps_files=False)
    fields = {"max_tokens": max_tokens, "stream": True, "reuse_prefix": False}

    async def both(local: Server) -> list[Overhead]:
        assert address.triton_http_port is not None
        direct = replace(address, http_port=address.triton_http_port)
        async with (
            Client(address, fields, TIMEOUT_S) as front,
            Client(direct, fields, TIMEOUT_S) as client,
        ):
            sides = Sides(front, client, triton.front_pid, local, max_tokens)
            return await measure(sides, policies, sizes, rounds, shown)

    try:
        with signals_interrupt(), triton:
            wait_with_progress(triton, console)
            local = Server(build_engine(config, Path.cwd()), config)
            local.start()
            try:
                total = (rounds + 1) * len(sizes) * len(policies)
                with Progress("warming up", total, "runs", console=console) as shown:
                    return asyncio.run(both(local))
            finally:
                local.stop()
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except (BenchError, ConfigError, InterpreterError, InstallationError, TritonServerError) as e:
        fail(str(e))


def _document(one: Overhead) -> dict[str, Any]:
    ratios = {"ratio": one.ratio, "front_ratio": one.front_ratio}
    return {
        **asdict(one),
        **{name: None if each is None else asdict(each) for name, each in ratios.items()},
    }


def _table(found: list[Overhead]) -> Table:
    table = Table(title="Tokens/s; us/token: the front's processor time")
    table.caption = "geometric means over the rounds"
    table.add_column("policy")
    columns = ("at once", "front", "Triton", "process", "Triton/process", "front/Triton")
    for column in (*columns, "us/token"):
        table.add_column(column, justify="right")
    for one in found:
        means = one.means
        table.add_row(
            one.policy,
            str(one.batch_size),
            *(f"{tps:.1f}" for tps in (means.front_tps, means.triton_tps, means.local_tps)),
            *(_interval(ratio) for ratio in (one.ratio, one.front_ratio)),
            f"{means.front_cpu_s * 1e6:.0f}",
        )
    return table


def _interval(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
