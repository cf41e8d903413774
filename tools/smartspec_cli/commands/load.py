"""`smartspec load`: sends open-loop load to a running server and reports client latencies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from smartspec_bench.progress import Progress, duration
from smartspec_bench.prompts import (
    MIXED,
    Prompt,
    PromptFileError,
    generated,
    read_prompts,
    repeated,
)
from smartspec_bench.workloads import WORKLOADS
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    write_json,
)
from smartspec_sim.arrivals import (
    PATTERNS,
    RatePhase,
    arrival_times,
    parse_phases,
    pattern_gaps,
    steady,
    trace_times,
)
from smartspec_sim.latency import DEFINITIONS, Slo, parse_slo, with_errors

if TYPE_CHECKING:
    from smartspec_bench.open_loop import Bounds
    from smartspec_bench.streams import Exchange

TRACE = "trace"


def load(
    url: Annotated[str, typer.Option(help="The server's HTTP address.")] = "http://127.0.0.1:8000",
    arrivals: Annotated[
        str, typer.Option(help=f"{', '.join(PATTERNS)}, or trace (--times).")
    ] = "poisson",
    rate: Annotated[float, typer.Option(help="Requests/s.", min=0.001, max=100_000)] = 1.0,
    phases: Annotated[
        str | None,
        typer.Option(
            help="Instead of --rate: SECONDS:RATE for steps, SECONDS:RATE-RATE for ramps, ..."
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(help="For gamma arrivals: below 1 is burstier, 1 is Poisson.", min=0.001),
    ] = 1.0,
    times: Annotated[
        Path | None,
        typer.Option(help="For trace arrivals: a file of times in seconds, one per line."),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Largest number of requests.", min=1, max=10_000_000)
    ] = 1000,
    duration: Annotated[
        float, typer.Option(help="Longest time of sending in seconds.", min=0.001)
    ] = 60.0,
    timeout: Annotated[
        float, typer.Option(help="Timeout of a request in seconds.", min=0.001)
    ] = 300.0,
    max_out: Annotated[
        int,
        typer.Option(help="Largest number of unanswered requests. More count as failed.", min=1),
    ] = 1000,
    workload: Annotated[str, typer.Option(help=f"{', '.join(WORKLOADS)} or mixed.")] = MIXED,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your own prompts: JSON lines of prompt and max_tokens, or ShareGPT."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate for prompts without max_tokens.", min=1)
    ] = 64,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)
    ] = 0.0,
    policy: Annotated[
        str | None, typer.Option(help="Policy of the requests; default: the server's.")
    ] = None,
    goodput: Annotated[
        str | None, typer.Option(help='Targets in ms: "ttft:200 tpot:20 e2e:5000".')
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.", min=0)] = 1,
    jsonl: Annotated[
        Path | None, typer.Option(help="File for one JSON line per request, written as each ends.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    check_outputs(jsonl=jsonl, json=json_file)
    schedule = _schedule(arrivals, rate, phases, burstiness, times, seed)
    slo = _slo(goodput)
    source = _prompts(workload, prompts)
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "return_spec_metrics": "detailed",
        "return_perf_metrics": True,
    }
    if policy is not None:
        fields["speculation_policy"] = policy
    from smartspec_bench.open_loop import Bounds
    from smartspec_sim.report import print_load

    console = Console(stderr=True)
    bounds = Bounds(requests, duration, max_out, timeout)
    try:
        exchanges, unreachable = asyncio.run(
            _run(url, bounds, fields, schedule, source, jsonl, console)
        )
    except OSError as error:
        fail(f"--jsonl: {error}")
    except KeyboardInterrupt:
        fail("interrupted", 130)
    if unreachable and not any(exchange.num_tokens for exchange in exchanges):
        fail(f"--url: no server at {url}: {unreachable}")
    summary = with_errors([exchange.timing for exchange in exchanges], slo)
    print_load(result_console(json_file), summary)
    write_json(json_file, summary)
    if unreachable:
        fail(f"the server at {url} is not reachable any more, so sending ended: {unreachable}")
    if not summary["num_finished"]:
        raise typer.Exit(1)


load.__doc__ = f"""Send requests at fixed times, however slow the server is, and report latencies.

{DEFINITIONS}

send_lag: how late requests were sent. It should be small compared with the latencies; otherwise the
client machine is the bottleneck. `smartspec simulate --record` reads the file of --jsonl.
"""


async def _run(
    url: str,
    bounds: Bounds,
    fields: dict[str, Any],
    schedule: Iterator[float],
    source: Iterator[Prompt],
    jsonl: Path | None,
    console: Console,
) -> tuple[list[Exchange], str]:
    """The exchanges, and the reason why sending stopped if the server was not reachable."""
    from smartspec_bench.open_loop import OpenLoop
    from smartspec_bench.streams import HttpStreams

    with ExitStack() as stack:
        lines: TextIO | None = None
        if jsonl is not None:
            lines = stack.enter_context(jsonl.open("w", encoding="utf-8"))
        label = f"sending at most {bounds.max_requests:,} requests for {duration(bounds.max_s)}"
        shown = stack.enter_context(Progress(label, console=console))
        num_ended = 0

        def ended(exchange: Exchange) -> None:
            nonlocal num_ended
            num_ended += 1
            shown.update(f"{label}: {num_ended:,} have ended")
            if lines is not None:
                lines.write(json.dumps(exchange.record()) + "\n")

        async with HttpStreams(url) as streams:
            loop = OpenLoop(streams, bounds, fields)
            return await loop.run(schedule, source, ended), loop.unreachable


def _schedule(
    arrivals: str, rate: float, phases: str | None, burstiness: float, times: Path | None, seed: int
) -> Iterator[float]:
    if (arrivals == TRACE) != (times is not None):
        fail("--arrivals trace and --times must be given together", USAGE_ERROR)
    if times is not None:
        return trace_times(_read_times(times))
    try:
        gaps = pattern_gaps(arrivals, burstiness, seed)
    except ValueError as error:
        fail(f"--arrivals: {error}", USAGE_ERROR)
    stretches: Sequence[RatePhase] = steady(rate)
    if phases is not None:
        try:
            stretches = parse_phases(phases)
        except ValueError as error:
            fail(f"--phases: {error}", USAGE_ERROR)
    return arrival_times(gaps, stretches)


def _read_times(path: Path) -> list[float]:
    """Each line is a number or a JSON object with `scheduled_s`, `arrival_s` or `timestamp`."""
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                raw = json.loads(line)
                if isinstance(raw, dict):
                    names = ("scheduled_s", "arrival_s", "timestamp")
                    raw = next(raw[name] for name in names if name in raw)
                found.append(float(raw))
    except (OSError, ValueError, TypeError, StopIteration) as error:
        fail(f"--times: {path.name}, line {len(found) + 1}: {error}", USAGE_ERROR)
    if not found:
        fail(f"--times: {path.name} has no times", USAGE_ERROR)
    return found


def _slo(text: str | None) -> Slo | None:
    try:
        return None if text is None else parse_slo(text)
    except ValueError as error:
        fail(f"--goodput: {error}", USAGE_ERROR)


def _prompts(workload: str, prompts: Path | None) -> Iterator[Prompt]:
    if prompts is not None:
        try:
            return repeated(read_prompts(prompts))
        except PromptFileError as error:
            fail(f"--prompts: {error}", USAGE_ERROR)
    if workload not in (*WORKLOADS, MIXED):
        allowed = ", ".join((*WORKLOADS, MIXED))
        fail(f"--workload: {workload!r} must be one of {allowed}", USAGE_ERROR)
    return generated(workload)
