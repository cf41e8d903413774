"""`smartspec simulate`: simulates policies under load, without the hardware."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smartspec_bench.progress import Progress
from smartspec_cli.commands import (
    USAGE_ERROR,
    check_outputs,
    fail,
    note,
    result_console,
    write_json,
)
from smartspec_cli.commands.settings import numbers_of, parsed, policies_of

if TYPE_CHECKING:
    from smartspec_sim.hardware import Hardware
    from smartspec_sim.workload import SimRequest

FEW_REQUESTS = 30
"""Fewer give no mean, and no 99th percentile at all."""

DEFAULT_POLICIES = "none,fixed:3,goodput"

_of_load = partial(typer.Option, rich_help_panel="Load")
_of_server = partial(typer.Option, rich_help_panel="Server")
_of_output = partial(typer.Option, rich_help_panel="Output")


def simulate(
    workload: Annotated[
        Path | None,
        _of_load(help="Workload file, TOML or JSON: kinds of requests and phases of load."),
    ] = None,
    record: Annotated[
        Path | None, _of_load(help="JSONL of recorded requests, as of `scripts/loadtest --jsonl`.")
    ] = None,
    rates: Annotated[str, _of_load(help="Requests/s, separated by commas.")] = "4",
    duration: Annotated[float, _of_load(help="Length of the load in seconds.", min=0.001)] = 10.0,
    accept: Annotated[
        float,
        _of_load(
            help="Probability that a draft is accepted if all earlier ones were.", min=0, max=1
        ),
    ] = 0.7,
    policies: Annotated[str, _of_server(help="Policies, separated by commas.")] = DEFAULT_POLICIES,
    rows: Annotated[int, _of_server(help="Requests served at the same time.", min=1, max=512)] = 32,
    replicas: Annotated[
        int | None,
        _of_server(help="Number of servers behind a load balancer.", min=1, max=10_000),
    ] = None,
    target: Annotated[
        list[str] | None,
        _of_server(
            help="Find the smallest number of replicas that meets this target, such as "
            '"p99 ttft < 500 ms". May be repeated.'
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        _of_server(
            help="Measured profile, from a server's profile cache. [default: published costs of "
            "Llama 3 8B with an EAGLE head on an H100]",
            show_default=False,
        ),
    ] = None,
    goodput: Annotated[
        str | None, _of_output(help='Targets in ms, such as "ttft:200 tpot:20 e2e:5000".')
    ] = None,
    json_file: Annotated[
        Path | None,
        _of_output("--json", metavar="FILE", help="Write the result as JSON; - is stdout."),
    ] = None,
) -> None:
    """Simulate policies with the server's own loop and planner on a virtual clock.

    The table has a row for each load and policy. Latencies count from the time a request was due.
    With --replicas or --target, servers behind a load balancer are simulated. tokens/s is
    token_goodput_tps: generated tokens per second. slo/s is slo_goodput_rps: requests per second
    that met every target of --goodput.
    """
    from smartspec_sim.capacity import parse_target
    from smartspec_sim.latency import parse_slo
    from smartspec_sim.report import simulation_table
    from smartspec_sim.scenario import Run
    from smartspec_sim.simulate import SimLimits

    check_outputs(json=json_file)
    names = policies_of(policies)
    slo = None if goodput is None else parsed("goodput", parse_slo, goodput)
    targets = [parsed("target", parse_target, text) for text in target or ()]
    if replicas is not None and targets:
        fail("--replicas and --target cannot be used together", USAGE_ERROR)
    if workload is not None or record is not None:
        loads = [_given(workload, record, accept)]
    else:
        loads = [_drawn(rate, duration, accept) for rate in numbers_of(rates, "rates", 1e-6, 1e5)]
    machine, limits = _machine(profile, rows), SimLimits(rows)
    runs = [Run(load, policy, machine, limits, slo) for load in loads for policy in names]
    found = []
    with Progress("simulating") as shown:
        for number, run in enumerate(runs, start=1):
            label = f"run {number} of {len(runs)}: {run.policy}, {len(run.requests):,} requests"
            tell = partial(_tell, shown, label, time.monotonic())
            found.append(run.search(targets, tell) if targets else run.row(replicas or 1, tell))
    console = result_console(json_file)
    console.print(simulation_table(found))
    for about in machine.notes:
        console.print(about, highlight=False)
    if (fewest := min(map(len, loads))) < FEW_REQUESTS:
        note(
            f"smartspec: {fewest} requests are too few: other draws would give other results. "
            f"Simulate at least {FEW_REQUESTS}: a longer load, or a higher rate."
        )
    write_json(json_file, {"hardware": machine.notes, "rows": found})


def _tell(shown: Progress, label: str, begin_s: float, share: float) -> None:
    """Show the share that is done, and the time that is left."""
    left_s = (time.monotonic() - begin_s) * (1 - share) / max(share, 1e-6)
    left = f", about {left_s / 60:.0f} min left" if share > 0 and left_s > 90 else ""
    shown.update(f"{label}, {100 * share:.0f} %{left}")


def _drawn(rate: float, duration: float, accept: float) -> list[SimRequest]:
    """Requests of one kind, with the lengths of ShareGPT, in one phase."""
    from smartspec_sim.workload import KindSpec, PhaseSpec, WorkloadError, WorkloadSpec, draw

    kind = KindSpec(accept=accept, accept_sd=0.1 if 0.05 <= accept <= 0.95 else 0.0)
    phase = PhaseSpec(duration_s=duration, rate=rate)
    try:
        return draw(WorkloadSpec(kinds=(kind,), phases=(phase,)))
    except WorkloadError as error:
        fail(f"--rates: got {rate:g} for {duration:g} s: {error}", USAGE_ERROR)


def _given(workload: Path | None, record: Path | None, accept: float) -> list[SimRequest]:
    from smartspec_sim.record import read_record
    from smartspec_sim.workload import WorkloadError, draw, read_spec

    if workload is not None and record is not None:
        fail("--workload and --record cannot be used together", USAGE_ERROR)
    try:
        if workload is not None:
            return draw(read_spec(workload))
        assert record is not None
        return read_record(record, accept=accept)
    except WorkloadError as error:
        fail(str(error), USAGE_ERROR)


def _machine(profile: Path | None, rows: int) -> Hardware:
    from smartspec_sim.hardware import measured, published

    if profile is None:
        return published()
    try:
        return measured(profile, rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"--profile: {profile}: {error}", USAGE_ERROR)
