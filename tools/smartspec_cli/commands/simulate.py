"""`smartspec simulate`: simulates policies under load, without the hardware."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smartspec_bench.progress import Progress
from smartspec_cli.commands import USAGE_ERROR, check_outputs, fail, result_console, write_json
from smartspec_cli.commands.settings import numbers_of, parsed, policies_of

if TYPE_CHECKING:
    from smartspec_sim.hardware import Hardware
    from smartspec_sim.scenario import Load

DEFAULT_POLICIES = "none,fixed:3,goodput"
NO_DRAFT_MODEL = "none"

_of_load = partial(typer.Option, rich_help_panel="Load")
_of_hardware = partial(typer.Option, rich_help_panel="Hardware")
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
        Path | None, _of_hardware(help="Measured profile, from a server's profile cache.")
    ] = None,
    gpu: Annotated[str, _of_hardware(help="GPU by name, instead of a profile.")] = "h100",
    num_gpus: Annotated[int, _of_hardware(help="Number of GPUs that share the target.", min=1)] = 1,
    model: Annotated[str, _of_hardware(help="Target model on that GPU.")] = "llama-3-8b",
    draft: Annotated[str, _of_hardware(help="Draft model, or none.")] = "eagle",
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
    from smartspec_sim.fleet import fleet_row, search
    from smartspec_sim.latency import parse_slo
    from smartspec_sim.report import simulation_table
    from smartspec_sim.scenario import runs_of
    from smartspec_sim.simulate import SimLimits

    check_outputs(json=json_file)
    names = policies_of(policies)
    slo = None if goodput is None else parsed("goodput", parse_slo, goodput)
    targets = [parsed("target", parse_target, text) for text in target or ()]
    if replicas is not None and targets:
        fail("--replicas and --target cannot be used together", USAGE_ERROR)
    if workload is not None and record is not None:
        fail("--workload and --record cannot be used together", USAGE_ERROR)
    try:
        loads = _loads(workload, record, rates, duration, accept)
        machine = _machine(profile, gpu, num_gpus, model, draft, rows)
        runs = runs_of(loads, names, machine, SimLimits(rows), slo)
    except ValueError as error:
        fail(str(error), USAGE_ERROR)
    found: list[dict[str, Any]] = []
    with Progress("simulating") as shown:
        for run in runs:
            label = f"run {len(found) + 1} of {len(runs)}, {run.policy}"

            def tell(share: float, label: str = label) -> None:
                shown.update(f"{label}: {100 * share:.0f} %")

            if targets:
                found.append(search(run, targets, tell))
            elif replicas is not None:
                found.append(fleet_row(run, replicas, tell))
            else:
                found.append(run.row(tell))
    console = result_console(json_file)
    console.print(simulation_table(found))
    for note in machine.notes:
        console.print(note, highlight=False)
    write_json(json_file, {"hardware": machine.notes, "rows": found})


def _loads(
    workload: Path | None, record: Path | None, rates: str, duration: float, accept: float
) -> list[Load]:
    """Without a file: requests of one kind, with the lengths of ShareGPT, at each of the rates.
    Raises ValueError."""
    from smartspec_sim.record import read_record
    from smartspec_sim.scenario import Load
    from smartspec_sim.workload import KindSpec, PhaseSpec, WorkloadSpec, read_spec

    if workload is not None:
        return [Load(read_spec(workload))]
    if record is not None:
        return [Load(record=tuple(read_record(record, accept=accept)))]
    kind = KindSpec(accept=accept, accept_sd=0.1 if 0.05 <= accept <= 0.95 else 0.0)
    phases = [
        PhaseSpec(duration_s=duration, rate=rate) for rate in numbers_of(rates, "rates", 1e-6, 1e5)
    ]
    return [Load(WorkloadSpec(kinds=(kind,), phases=(phase,))) for phase in phases]


def _machine(
    profile: Path | None, gpu: str, num_gpus: int, model: str, draft: str, rows: int
) -> Hardware:
    """Raises HardwareError."""
    from smartspec_py.engines.profile import load_cost
    from smartspec_sim.hardware import Hardware, gpu_hardware

    if profile is None:
        name = None if draft == NO_DRAFT_MODEL else draft
        return gpu_hardware(gpu, num_gpus, model, name, rows)
    cost = parsed("profile", load_cost, profile)
    notes = [f"measured profile {profile.name}"]
    if rows > cost.target.rows[-1]:
        notes.append(f"above {cost.target.rows[-1]} rows it is extrapolated with the last slope")
    return Hardware(cost, notes=tuple(notes))
