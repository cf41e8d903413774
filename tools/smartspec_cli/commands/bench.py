"""`smartspec bench`: compares policies, in lockstep in one process or live on Triton."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from smartspec_bench import real_model
from smartspec_bench.plan import SHAPES, Settings
from smartspec_bench.progress import Progress
from smartspec_bench.prompts import MIXED, WORKLOADS, chat_template, read_prompts
from smartspec_bench.results import BenchError, Recorder, described
from smartspec_bench.streams import GrpcStreams, HttpStreams, StreamError
from smartspec_cli.commands import STDOUT, USAGE_ERROR, JsonFile, check_outputs, fail, write_json
from smartspec_cli.commands.settings import (
    Changes,
    Config,
    Draft,
    Heads,
    InputFile,
    Model,
    Temperature,
    engine_of,
    numbers_of,
    parsed,
    policies_of,
    server_config,
)
from smartspec_launch import paths
from smartspec_launch.address import free_address
from smartspec_launch.foreground import signals_interrupt, wait_with_progress
from smartspec_launch.gateway import tokenizer_dir
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import ServerConfig
from smartspec_py.constants import DEFAULT_CONTEXT_LEN

if TYPE_CHECKING:
    from smartspec_bench.live import Load, Serve

bench = typer.Typer(
    help="Compare policies: in lockstep in one process, or live on Triton.",
    no_args_is_help=True,
    add_completion=False,
)

_DEFAULTS = Settings()
_POLICIES, _SHAPES = ",".join(_DEFAULTS.policies), ",".join(_DEFAULTS.shapes)
_LOADS = ",".join(map(str, _DEFAULTS.loads))
LIMITS = {"max_queue": 4096, "max_context_len": DEFAULT_CONTEXT_LEN}
MAX_AT_ONCE = 1024
FAILURES = (BenchError, StreamError, LaunchError)

_Policies = Annotated[
    str, typer.Option(help="Policies, separated by commas. `none` is the baseline.")
]
_Workload = Annotated[
    str,
    typer.Option(
        help="Real texts: chat, sql, summarize, qa, or mixed for all in turn. edit: tasks to "
        "change a file. agent, aider: sessions with a coding agent. tiny: documents for the "
        "shipped tiny pair, and pairs expanded from it."
    ),
]
_Reuse = Annotated[
    bool,
    typer.Option(
        "--reuse",
        help="Reuse cached prefixes, and with lookup.history_tokens what other requests of the "
        "same phase or round have generated.",
    ),
]
_MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate per request.", min=2)]
Measure = Callable[[Recorder, Callable[[str], object]], None]
"""Runs a benchmark. Its second argument is told what comes next."""


@bench.command()
def lockstep(
    model: Model = None,
    draft: Draft = None,
    heads: Heads = None,
    config: Config = None,
    settings: Changes = None,
    policies: _Policies = _POLICIES,
    shapes: Annotated[
        str, typer.Option(help=f"Shapes of load, separated by commas: {', '.join(SHAPES)}.")
    ] = _SHAPES,
    loads: Annotated[
        str,
        typer.Option(help="Loads of `steady`: shares of the saturation rate without speculation."),
    ] = _LOADS,
    workload: _Workload = MIXED,
    repeats: Annotated[
        int, typer.Option(help="Number of repeats; 2 or more for intervals.", min=1)
    ] = _DEFAULTS.repeats,
    seconds: Annotated[
        float, typer.Option(help="Duration of a steady phase. Others last 4 times as long.")
    ] = _DEFAULTS.seconds,
    saturation_s: Annotated[
        float, typer.Option(help="Seconds, at least, for measuring the saturation rate.")
    ] = _DEFAULTS.saturation_s,
    minutes: Annotated[
        float, typer.Option(help="Time limit in minutes: no phase begins later.", min=0.0)
    ] = 60.0,
    max_tokens: _MaxTokens = _DEFAULTS.max_tokens,
    temperature: Temperature = 0.0,
    reuse: _Reuse = False,
    json_file: JsonFile = None,
) -> None:
    """Compare policies under load in one process, step by step in turns.

    All policies get the same requests. Each has its own loop, engine and clock, and they take
    turns, so that a slow period of the machine affects all of them. Idle time is skipped. Triton
    and HTTP are not included. It needs the memory of one engine per policy.

    Shapes: closed: one request at a time; steady: Poisson arrivals at --loads; step: the load rises
    and falls; start: the first requests of a new server.
    """
    check_outputs(json=json_file)
    if config is None:
        model, heads = _served(model, heads)
    checked = server_config(model, draft, heads, config, settings, limits=LIMITS)
    plan = Settings(
        policies=tuple(_with_none(policies)),
        shapes=tuple(_among("shapes", shapes.split(","), SHAPES)),
        loads=tuple(numbers_of(loads, "loads", 0.001, 1000)),
        workload=_among("workload", [workload], WORKLOADS)[0],
        repeats=repeats,
        seconds=seconds,
        saturation_s=saturation_s,
        max_tokens=max_tokens,
        temperature=temperature,
        template=parsed("model", chat_template, tokenizer_dir(checked)),
    )

    def measure(recorder: Recorder, say: Callable[[str], object]) -> None:
        from smartspec_bench.lockstep import Side, run

        say("loading models, measuring passes")
        fields = {"max_tokens": max_tokens, "temperature": temperature, "reuse_prefix": reuse}
        sides = {
            policy: Side(policy, engine_of(checked), checked.limits, fields)
            for policy in plan.policies
        }
        run(sides, checked.limits.max_sequences, plan, recorder, minutes, say)

    about = described("Policies in lockstep", **_about(checked, temperature))
    _run(about, json_file, measure)


@bench.command()
def live(
    model: Model = None,
    draft: Draft = None,
    heads: Heads = None,
    config: Config = None,
    settings: Changes = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="A running server, such as http://127.0.0.1:8000. Of --model, only the chat "
            "template is then used."
        ),
    ] = None,
    policies: _Policies = _POLICIES,
    concurrency: Annotated[
        str, typer.Option(help="Numbers of requests at once, separated by commas.")
    ] = "1,8",
    workload: _Workload = MIXED,
    input_file: InputFile = None,
    rounds: Annotated[
        int, typer.Option(help="Number of repeats; 2 or more for intervals.", min=1)
    ] = 6,
    overhead: Annotated[
        bool, typer.Option(help="Also serve in this process: the difference is Triton and HTTP.")
    ] = False,
    max_tokens: _MaxTokens = _DEFAULTS.max_tokens,
    temperature: Temperature = 0.0,
    reuse: _Reuse = False,
    json_file: JsonFile = None,
) -> None:
    """Compare policies on a live Triton server, with fixed numbers of requests at once.

    Every policy gets the same prompts in every round, in an order that rotates. The first round is
    a warm-up and does not count.
    """
    from smartspec_bench.live import IN_PROCESS, Load, in_process
    from smartspec_testing.local import serving

    check_outputs(json=json_file)
    names = _with_none(policies)
    sizes = [int(size) for size in numbers_of(concurrency, "concurrency", 1, MAX_AT_ONCE)]
    _among("workload", [workload], WORKLOADS)
    own = [] if input_file is None else parsed("input", read_prompts, input_file)
    label = workload if input_file is None else input_file.name
    load = Load(sizes, label, rounds, max_tokens, temperature, own, reuses=reuse)
    if url is not None:
        if draft or heads or config or overhead:
            fail("--url excludes --draft, --heads, --config and --overhead", USAGE_ERROR)
        load = replace(load, template=parsed("model", chat_template, model))
        address = url if "://" in url else f"http://{url}"
        about = described("Policies on a running server", url=address)
        _run(
            about,
            json_file,
            lambda recorder, say: asyncio.run(
                _on_server(HttpStreams(address), names, load, {}, recorder, say)
            ),
        )
        return
    limits = {**LIMITS, "max_sequences": max(sizes)}
    if config is None:
        model, heads = _served(model, heads)
    checked = server_config(model, draft, heads, config, settings, limits=limits)
    load = replace(load, template=parsed("model", chat_template, tokenizer_dir(checked)))

    def measure(recorder: Recorder, say: Callable[[str], object]) -> None:
        address = free_address()
        folder = paths.run_dir(0).resolve()  # one folder for all runs
        with ExitStack() as stack:
            server = stack.enter_context(TritonServer(checked, folder, address))
            wait_with_progress(server, Console(stderr=True))
            beside: dict[str, Serve] = {}
            if overhead:
                local = stack.enter_context(serving(engine_of(checked), checked))
                beside = {f"{name}{IN_PROCESS}": in_process(local, load) for name in names}
            streams = GrpcStreams(address.grpc_url)
            asyncio.run(_on_server(streams, names, load, beside, recorder, say))

    _run(described("Policies on Triton", **_about(checked, temperature)), json_file, measure)


def _served(model: Path | None, heads: Path | None) -> tuple[Path, Path | None]:
    """The model and heads of the options; without a model, that of the quickstart."""
    try:
        return real_model.served(model, heads)
    except FileNotFoundError as error:
        fail(str(error), USAGE_ERROR)


async def _on_server(
    streams: HttpStreams | GrpcStreams,
    names: Sequence[str],
    load: Load,
    beside: dict[str, Serve],
    recorder: Recorder,
    say: Callable[[str], object],
) -> None:
    from smartspec_bench.live import run, through

    async with streams:
        sides = {name: through(streams, load) for name in names}
        await run({**sides, **beside}, load, recorder, say)


def _run(about: dict[str, object], json_file: Path | None, measure: Measure) -> None:
    """Measure and print the tables. After an interruption or error, print the results so far."""
    from smartspec_bench.report import markdown

    console = Console(stderr=True)
    path = None if json_file == STDOUT else json_file
    recorder = Recorder(about, path, lambda text: console.print(text, highlight=False))
    reason, code = None, 0
    try:
        with signals_interrupt(), Progress("start", console) as shown:
            measure(recorder, shown.update)
    except KeyboardInterrupt:
        reason, code = "interrupted", 130
    except FAILURES as error:
        reason, code = str(error), 1
    document = replace(recorder.document, error=reason)
    typer.echo(markdown(document), err=json_file == STDOUT)
    if json_file == STDOUT:
        write_json(json_file, asdict(document))
    if reason is not None:
        fail(reason, code)


def _about(config: ServerConfig, temperature: float) -> dict[str, object]:
    engine = config.engine.model_dump(mode="json")
    for name in ("model", "draft", "target", "heads"):
        if engine.get(name):
            engine[name] = paths.name_of(Path(engine[name]))
    engine.pop("profile_cache", None)
    limits = config.limits.model_dump(mode="json")
    return {**engine, "limits": limits, "temperature": temperature}


def _with_none(text: str) -> list[str]:
    names = list(dict.fromkeys(policies_of(text)))
    if "none" not in names:
        fail("--policies: must include none, which is the baseline", USAGE_ERROR)
    return names


def _among(option: str, names: list[str], allowed: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in allowed:
            fail(f"--{option}: {name!r} must be one of {', '.join(allowed)}", USAGE_ERROR)
    return names
