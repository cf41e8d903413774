"""`smartspec bench load`: compares policies under open-loop load on one live Triton server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from smartspec_bench.about import DEFINITIONS, describe
from smartspec_bench.plan import FORMS, MIXED, SHAPES
from smartspec_bench.progress import Progress, duration
from smartspec_bench.tables import (
    phase_line,
    print_about,
    print_ceilings,
    print_results,
    write_csv,
)
from smartspec_bench.workloads import WORKLOADS
from smartspec_cli.commands import (
    STDOUT,
    USAGE_ERROR,
    check_outputs,
    fail,
    result_console,
    write_json,
)
from smartspec_cli.commands.bench_settings import changed, names_of, shares_of, slo_of
from smartspec_cli.commands.settings import checked_config, pair_settings
from smartspec_launch import paths
from smartspec_launch.files import InstallationError
from smartspec_launch.foreground import signals_interrupt, wait_with_progress
from smartspec_launch.interpreter import InterpreterError
from smartspec_launch.triton_server import TritonServer, TritonServerError, free_address
from smartspec_py.serving.config import DEFAULT_CONTEXT_LEN, ConfigError, ServerConfig

if TYPE_CHECKING:
    from smartspec_bench.document import About, Ceilings, Phase
    from smartspec_bench.session import Kept, Listener, Load

MAX_QUEUE = 4096
OUT = Path("bench.json")
TABLE_WIDTH = 120


def load(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target model.")],
    draft: Annotated[Path, typer.Option(help="Hugging Face directory of the draft model.")],
    form: Annotated[
        str, typer.Option(help=f"Defaults of the options below: {', '.join(FORMS)}.")
    ] = "short",
    policies: Annotated[str | None, typer.Option(help="Policies, separated by commas.")] = None,
    shapes: Annotated[
        str | None, typer.Option(help=f"Shapes of the load: {', '.join(SHAPES)}.")
    ] = None,
    workloads: Annotated[
        str | None,
        typer.Option(help=f"Workloads of steady and closed: {', '.join(WORKLOADS)}, {MIXED}."),
    ] = None,
    loads: Annotated[
        str | None, typer.Option(help="Loads of steady, as shares of the saturation rate of none.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Number of repeats; 2 or more for intervals.", min=1)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds of a steady phase. Stretches of other shapes take twice as long.", min=1
        ),
    ] = None,
    min_requests: Annotated[
        int | None, typer.Option(help="Requests of a steady phase, at least.", min=1)
    ] = None,
    num_closed: Annotated[
        int | None, typer.Option(help="Number of requests in the shape closed.", min=1)
    ] = None,
    saturation_s: Annotated[
        float | None, typer.Option(help="Seconds to measure each saturation rate.", min=1)
    ] = None,
    step_loads: Annotated[str | None, typer.Option(help="Loads of step, one per stretch.")] = None,
    changing_load: Annotated[
        float | None,
        typer.Option(help="Load of shift and mix, as a share of saturation.", min=0.001),
    ] = None,
    shift_workloads: Annotated[
        str | None, typer.Option(help="Workloads of shift, before and after.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, prompts and order.", min=0)] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="Time limit in minutes: no phase begins later.", min=0.1)
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens to generate for a request.", min=2)
    ] = 64,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)
    ] = 0.0,
    slo: Annotated[
        str | None, typer.Option(help='Targets in ms: "ttft:200 tpot:20 e2e:5000".')
    ] = None,
    timeout: Annotated[float, typer.Option(help="Timeout of a request in seconds.", min=1)] = 300.0,
    max_sequences: Annotated[
        int, typer.Option(help="Requests served at the same time.", min=1)
    ] = 32,
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32 or bfloat16.")] = "auto",
    num_threads: Annotated[
        int, typer.Option(help="Compute threads; 0 uses one less than the number of cores.", min=0)
    ] = 0,
    lockstep: Annotated[
        bool,
        typer.Option(
            "--lockstep", help="Run without Triton; policies take turns step by step. See above."
        ),
    ] = False,
    json_file: Annotated[
        Path,
        typer.Option(
            "--json", metavar="FILE", help="The document, written after each phase; - is stdout."
        ),
    ] = OUT,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="CSV file with one line per phase.")
    ] = None,
) -> None:
    settings = changed(
        form,
        policies=names_of(policies),
        shapes=names_of(shapes),
        workloads=names_of(workloads),
        loads=shares_of("loads", loads),
        repeats=repeats,
        seconds=seconds,
        min_requests=min_requests,
        num_closed=num_closed,
        saturation_s=saturation_s,
        step_loads=shares_of("step-loads", step_loads),
        changing_load=changing_load,
        shift_workloads=names_of(shift_workloads),
        seed=seed,
    )
    check_outputs(json=json_file, csv=csv_file)
    targets = slo_of(slo)
    engine = pair_settings(model, draft, dtype, num_threads)
    limits = {
        "max_sequences": max_sequences,
        "max_queue": MAX_QUEUE,
        "max_context_len": DEFAULT_CONTEXT_LEN,
    }
    config = checked_config({"engine": engine, "limits": limits, "explain": True})
    from smartspec_bench.session import Load

    asked = Load(settings, max_tokens, temperature, timeout, targets, minutes)
    about = describe(form, model, draft, config.limits, f"{dtype}, {num_threads} threads asked")
    if lockstep:
        about = replace(about, title=f"{about.title}, in lockstep", form=f"{form}, lockstep")
    measure = _in_lockstep if lockstep else _on_triton
    _run(partial(measure, config, asked), about, json_file, csv_file)


load.__doc__ = f"""Compare policies under open-loop load on one live server.

Requests leave at Poisson times, however slow the server is. Every policy gets the same arrivals and
prompts, in random order. Shapes: steady: constant rate; closed: one request at a time; step: the
load changes; shift: the workload changes halfway; mix: all workloads at once.

--lockstep runs all policies in one process, without Triton and HTTP. Each has its own loop, engine
and clock, and they take turns step by step, so that a slow period of the machine affects all of
them. Idle time is skipped. It needs the memory of one engine per policy.

{DEFINITIONS}

The command prints beforehand how long the run takes. The document is written after every phase, so
that an interrupted run keeps its results. With --json - it is written to stdout at the end.
"""


def _run(
    measure: Callable[[Kept, Console], None], about: About, json_file: Path, csv_file: Path | None
) -> NoReturn:
    """Measure and print the results. After an interruption or error, print the results so far."""
    from smartspec_bench.client import BenchError
    from smartspec_bench.session import Kept

    console = Console(stderr=True)
    console.width = max(console.width, TABLE_WIDTH)
    print_about(console, about)
    try:
        kept = Kept(about, None if json_file == STDOUT else json_file)
    except OSError as error:
        fail(f"--json: {error}", USAGE_ERROR)
    code = 0
    try:
        with signals_interrupt():
            measure(kept, console)
    except KeyboardInterrupt:
        code = _told(console, "interrupted", 130)
    except (
        BenchError,
        ConfigError,
        InterpreterError,
        InstallationError,
        TritonServerError,
    ) as error:
        code = _told(console, str(error), 1)
    except OSError as error:
        code = _told(console, f"{type(error).__name__}: {error}", 1)
    shown_at = result_console(json_file)
    shown_at.width = max(shown_at.width, TABLE_WIDTH)
    print_results(shown_at, kept.document)
    if json_file == STDOUT:
        write_json(json_file, kept.document.to_json())
    else:
        shown_at.print(f"document: {json_file}", soft_wrap=True)
    try:
        if csv_file is not None:
            write_csv(csv_file, kept.document.phases)
    except OSError as error:
        fail(f"--csv: {error}")
    raise typer.Exit(code)


def _on_triton(config: ServerConfig, asked: Load, kept: Kept, console: Console) -> None:
    from smartspec_bench.session import run

    address = free_address()
    folder = paths.run_dir(address.http_port).resolve()
    with TritonServer(config, folder, address, keeps_files=False) as server:
        wait_with_progress(server, console)
        with Progress("warming up", console=console) as shown:
            listener = _listener(console, shown)
            asyncio.run(run(address, config.limits.max_sequences, asked, kept, listener))


def _in_lockstep(config: ServerConfig, asked: Load, kept: Kept, console: Console) -> None:
    from smartspec_bench.lockstep import Side, policies_of, run
    from smartspec_py.serving.build import build_engine

    fields = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "reuse_prefix": asked.fields["reuse_prefix"],
    }
    with Progress("loading models, timing passes", console=console) as shown:
        sides = {
            policy: Side(policy, build_engine(config, Path.cwd()), config, fields)
            for policy in policies_of(asked.settings)
        }
        run(sides, config.limits.max_sequences, asked, kept, _listener(console, shown))


def _told(console: Console, message: str, code: int) -> int:
    console.print(f"smartspec: {message}", markup=False, highlight=False)
    return code


def _listener(console: Console, shown: Progress) -> Listener:
    """Prints the ceilings and one line per phase, and shows the progress."""
    from smartspec_bench.session import Listener

    def measured(ceilings: Ceilings, num_phases: int, left_s: float) -> None:
        print_ceilings(console, ceilings)
        console.print(f"{num_phases} phases, about {duration(left_s)}", highlight=False)

    def ended(phase: Phase, num_left: int, left_s: float) -> None:
        console.print(phase_line(phase), f"| {num_left} left, {duration(left_s)}", highlight=False)

    return Listener(shown.update, measured, ended)
