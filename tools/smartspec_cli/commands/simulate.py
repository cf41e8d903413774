"""`smartspec simulate`: simulates policies under load, without the hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smartspec_bench.progress import Progress
from smartspec_cli.commands import USAGE_ERROR, check_outputs, fail, result_console, write_json
from smartspec_cli.commands.fleet_options import DEFAULT_ROUTE, FleetOptions
from smartspec_cli.commands.settings import policies_of

if TYPE_CHECKING:
    from smartspec_sim.hardware import Hardware
    from smartspec_sim.latency import Slo
    from smartspec_sim.scenario import Deviation, Scenario
    from smartspec_sim.simulate import SimLimits
    from smartspec_sim.workload import WorkloadSpec

DEFAULT_POLICIES = "none,fixed:1,fixed:3,fixed:5,goodput"
NO_DRAFT_MODEL, HEADS = "none", "heads"

_of_load = partial(typer.Option, rich_help_panel="Load")
_of_hardware = partial(typer.Option, rich_help_panel="Hardware")
_of_server = partial(typer.Option, rich_help_panel="Server")
_of_fleet = partial(typer.Option, rich_help_panel="Fleet")
_of_output = partial(typer.Option, rich_help_panel="Output")


def simulate(
    workload: Annotated[
        Path | None,
        _of_load(help="Workload file, TOML or JSON: kinds of requests and phases of load."),
    ] = None,
    record: Annotated[
        Path | None, _of_load(help="JSONL of recorded requests, written by `load --jsonl`.")
    ] = None,
    oracle: Annotated[
        Path | None,
        _of_load(help="Oracle trace with accepted lengths; see `smartspec trace`."),
    ] = None,
    rates: Annotated[str, _of_load(help="Requests/s, separated by commas.")] = "4",
    duration: Annotated[float, _of_load(help="Length of the load in seconds.", min=0.001)] = 60.0,
    prompt: Annotated[float, _of_load(help="Mean prompt tokens.", min=1)] = 227,
    output: Annotated[float, _of_load(help="Mean generated tokens.", min=1)] = 250,
    accept: Annotated[
        float, _of_load(help="Probability that a draft is accepted if all earlier ones were.")
    ] = 0.7,
    policies: Annotated[str, _of_server(help="Policies, separated by commas.")] = DEFAULT_POLICIES,
    profile: Annotated[
        Path | None, _of_hardware(help="Measured profile, from a server's profile cache.")
    ] = None,
    gpu: Annotated[str, _of_hardware(help="GPU by name, instead of a profile.")] = "h100",
    num_gpus: Annotated[int, _of_hardware(help="Number of GPUs that share the target.", min=1)] = 1,
    model: Annotated[str, _of_hardware(help="Target model on that GPU.")] = "llama-3-8b",
    draft: Annotated[str, _of_hardware(help="Draft model, heads, or none.")] = "eagle",
    heads_ms: Annotated[
        float, _of_hardware(help="Milliseconds of drafting with heads, per step.", min=0)
    ] = 0.3,
    tree_width: Annotated[
        int, _of_server(help="Guesses of a head for one position; 1 drafts chains.", min=1, max=4)
    ] = 4,
    host_ms: Annotated[
        float, _of_hardware(help="Milliseconds per step outside the passes.", min=0)
    ] = 0.0,
    max_num_tokens: Annotated[
        int,
        _of_hardware(
            help="Tokens of an iteration of TensorRT-LLM, which counts the whole text of each "
            "verification; 0 counts new tokens only.",
            min=0,
        ),
    ] = 0,
    wrong: Annotated[
        list[str] | None,
        _of_hardware(
            help="Actual step times relative to the planner's cost model: draft=2, base=0.9, "
            "slope=1.5, extra_ms=5, host_ms=1. With @40 they apply from second 40. May be repeated."
        ),
    ] = None,
    rows: Annotated[int, _of_server(help="Requests served at the same time.", min=1, max=512)] = 32,
    max_draft_len: Annotated[int, _of_server(help="Largest draft length.", min=1, max=64)] = 7,
    prefill_chunk: Annotated[int, _of_server(help="Prompt tokens per step.", min=1)] = 512,
    max_queue: Annotated[
        int, _of_server(help="Requests that may wait. More are refused.", min=1)
    ] = 100_000,
    max_cache_tokens: Annotated[
        int, _of_server(help="KV cache in tokens; 0 uses all that fits in GPU memory.", min=0)
    ] = 0,
    goodput: Annotated[
        str | None, _of_output(help='Targets in ms, such as "ttft:200 tpot:20 e2e:5000".')
    ] = None,
    replicas: Annotated[
        int | None,
        _of_fleet(help="Number of servers behind a load balancer.", min=1, max=10_000),
    ] = None,
    target: Annotated[
        list[str] | None,
        _of_fleet(
            help="Find the smallest number of replicas that meets this target, such as "
            '"p99 ttft < 500 ms". May be repeated.'
        ),
    ] = None,
    route: Annotated[
        str,
        _of_fleet(
            help="Choice of the replica: least (fewest open requests), prefix (the same for the "
            "same shared prefix) or random."
        ),
    ] = DEFAULT_ROUTE,
    fail_: Annotated[
        list[str] | None,
        _of_fleet(
            "--fail",
            metavar="AT:RESTART",
            help="At second AT, the busiest replica fails; it is back after RESTART seconds. May "
            "be repeated.",
        ),
    ] = None,
    rolling_restart: Annotated[
        str | None,
        _of_fleet(
            metavar="AT:RESTART",
            help="From second AT on, one replica after another drains and restarts, which takes "
            "RESTART seconds.",
        ),
    ] = None,
    prefix_cache_tokens: Annotated[
        int, _of_server(help="Room for shared prefixes of prompts; 0: no reuse.", min=0)
    ] = 0,
    what_if: Annotated[
        list[str] | None,
        _of_load(help="A change to run in addition: rate=2x, rows=64, accept=0.5, output=2x, ..."),
    ] = None,
    seed: Annotated[int, _of_load(help="Seed; a workload file has its own.", min=0)] = 1,
    jobs: Annotated[int, _of_output(help="Number of processes.", min=1, max=256)] = 1,
    json_file: Annotated[
        Path | None,
        _of_output("--json", metavar="FILE", help="Write the result as JSON; - is stdout."),
    ] = None,
    plot: Annotated[
        Path | None, _of_output(help="File for a chart of latency by load; needs Altair.")
    ] = None,
) -> None:
    """Simulate policies with the server's own loop and planner on a virtual clock.

    docs/evaluate/simulator.md describes what is modelled.

    ttft, tpot and e2e are shown as mean/p99. ttft and e2e count from the scheduled time of a
    request. With --replicas or --target, several servers behind a load balancer are simulated.
    tokens/s is token_goodput_tps: generated tokens per second. slo/s is slo_goodput_rps:
    requests per second that met every target of --goodput.
    """
    from smartspec_sim.engine import SimHeadsSpec
    from smartspec_sim.scenario import Load, Scenario, run_all, runs_of
    from smartspec_sim.simulate import SimLimits

    limits = SimLimits(
        rows,
        max_queue,
        max_draft_len,
        prefill_chunk,
        heads=SimHeadsSpec(heads_ms / 1e3, tree_width),
        prefix_tokens=prefix_cache_tokens,
    )
    fleet = FleetOptions(replicas, target or [], route, fail_ or [], rolling_restart)
    check_outputs(json=json_file, plot=plot)
    names = policies_of(policies)
    slo = _slo(goodput)
    if workload is not None or record is not None:
        base = _given(workload, record, accept, seed, limits)
    else:
        proposer: Literal["draft_model", "heads"]
        proposer = "heads" if draft == HEADS else "draft_model"
        specs = [_spec(r, duration, prompt, output, accept, seed, proposer) for r in _rates(rates)]
        base = [Scenario(Load(spec), limits) for spec in specs]
    if oracle is not None:
        if record is not None:
            fail("--oracle and --record cannot be used together", USAGE_ERROR)
        base = _with_texts(base, oracle)
    deviations = _deviations(wrong or [])
    base = [
        replace(scenario, max_cache_tokens=max_cache_tokens, deviations=deviations)
        for scenario in base
    ]
    scenarios = _with_changes(base, what_if or [])
    machine = _machine(profile, gpu, num_gpus, model, draft, host_ms, max_num_tokens)
    try:
        runs = runs_of(scenarios, names, machine, slo)
        if fleet.are_given():
            runs = fleet.runs(runs)
        with Progress("simulating", len(runs), "runs") as shown:
            found = run_all(runs, lambda label, done: shown.update(label, done=done), jobs)
    except ValueError as error:
        fail(str(error), USAGE_ERROR)
    notes = (*machine(rows).notes, *(f"steps really take: {text}" for text in wrong or []))
    if draft == HEADS:
        notes = (*notes, f"heads: {heads_ms:g} ms per step that drafts")
    _show(found, notes, json_file, plot)


def _show(
    rows: list[dict[str, Any]], notes: tuple[str, ...], json_file: Path | None, plot: Path | None
) -> None:
    """Print tables and notes, and write the JSON document and the chart."""
    from smartspec_sim.report import PlotError, draw_picture, simulation_tables

    console = result_console(json_file)
    for table in simulation_tables(rows):
        console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    summary = {"hardware": notes, "rows": rows}
    write_json(json_file, summary)
    try:
        if plot is not None:
            draw_picture(rows, plot)
    except PlotError as error:
        fail(str(error))


def _slo(text: str | None) -> Slo | None:
    from smartspec_sim.latency import parse_slo

    try:
        return None if text is None else parse_slo(text)
    except ValueError as error:
        fail(f"--goodput: {error}", USAGE_ERROR)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        fail(f"--rates: got {text!r}, must be numbers separated by commas", USAGE_ERROR)
    if not all(0 < rate <= 1e5 for rate in rates):
        fail(f"--rates: got {text!r}, each must be above 0 and at most 100000", USAGE_ERROR)
    return rates


def _spec(
    rate: float,
    duration: float,
    prompt: float,
    output: float,
    accept: float,
    seed: int,
    proposer: Literal["draft_model", "heads"],
) -> WorkloadSpec:
    """A workload of one kind and one phase. Lengths vary like those of ShareGPT."""
    from pydantic import ValidationError

    from smartspec_sim.workload import KindSpec, LengthSpec, PhaseSpec, WorkloadSpec

    try:
        kind = KindSpec(
            prompt=LengthSpec(mean=prompt, sd=1.16 * prompt, most=max(1, round(9 * prompt))),
            output=LengthSpec(mean=output, sd=0.8 * output, most=max(1, round(4 * output))),
            accept=accept,
            accept_sd=0.1 if 0.05 <= accept <= 0.95 else 0.0,
            proposer=proposer,
        )
        phase = PhaseSpec(duration_s=duration, rate=rate)
        return WorkloadSpec(kinds=(kind,), phases=(phase,), seed=seed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        fail(f"--{first['loc'][0]}: {first['msg']} (got {first['input']!r})", USAGE_ERROR)


def _given(
    workload: Path | None, record: Path | None, accept: float, seed: int, limits: SimLimits
) -> list[Scenario]:
    from smartspec_sim.record import read_record
    from smartspec_sim.scenario import Load, Scenario
    from smartspec_sim.workload import WorkloadError, read_spec

    if workload is not None and record is not None:
        fail("--workload and --record cannot be used together", USAGE_ERROR)
    try:
        if workload is not None:
            return [Scenario(Load(read_spec(workload)), limits)]
        assert record is not None
        return [Scenario(Load(record=tuple(read_record(record, accept=accept, seed=seed))), limits)]
    except WorkloadError as error:
        fail(str(error), USAGE_ERROR)


def _with_texts(base: list[Scenario], oracle: Path) -> list[Scenario]:
    from smartspec_sim.traces.oracle import read_oracle

    from smartspec_sim.traces.files import TraceError

    try:
        texts = tuple(read_oracle(oracle)[1])
    except (TraceError, OSError) as error:
        fail(f"--oracle: {error}", USAGE_ERROR)
    return [replace(scenario, load=replace(scenario.load, texts=texts)) for scenario in base]


def _with_changes(base: list[Scenario], changes: list[str]) -> list[Scenario]:
    from smartspec_sim.scenario import change

    try:
        return [*base, *(change(scenario, text) for text in changes for scenario in base)]
    except ValueError as error:
        fail(f"--what-if: {error}", USAGE_ERROR)


def _deviations(texts: list[str]) -> tuple[Deviation, ...]:
    from smartspec_sim.scenario import parse_deviation

    try:
        found = tuple(parse_deviation(text) for text in texts)
    except ValueError as error:
        fail(f"--wrong: {error}", USAGE_ERROR)
    times = [one.time_s for one in found]
    if len(set(times)) != len(times):
        fail("--wrong: two changes begin at the same time; combine them in one option", USAGE_ERROR)
    return found


def _machine(
    profile: Path | None,
    gpu: str,
    num_gpus: int,
    model: str,
    draft: str,
    host_ms: float,
    max_num_tokens: int,
) -> Callable[[int], Hardware]:
    """A function from the largest batch size to the hardware. Its tables end at that size."""
    from smartspec_sim.hardware import Hardware, gpu_hardware

    @lru_cache
    def machine(batch_size: int) -> Hardware:
        if profile is not None:
            cost = _read_profile(profile)
            found = Hardware(cost, notes=(f"measured profile {profile.name}",))
            if batch_size > cost.target.rows[-1]:
                note = f"above {cost.target.rows[-1]} rows it is extrapolated with the last slope"
                found = replace(found, notes=(*found.notes, note))
        else:
            name = None if draft in (NO_DRAFT_MODEL, HEADS) else draft
            found = gpu_hardware(gpu, num_gpus, model, name, batch_size)
        charged = max_num_tokens or found.cost.max_charged_tokens
        host_s = found.cost.host_s + host_ms / 1e3
        return replace(found, cost=replace(found.cost, host_s=host_s, max_charged_tokens=charged))

    return machine


def _read_profile(path: Path) -> Any:
    from smartspec_sim.observed import load_observed

    try:
        return load_observed(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"--profile: {path}: {error}", USAGE_ERROR)
