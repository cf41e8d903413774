"""`smartspec explain`: shows why steps got their plans, and how accurate the plans were."""

from __future__ import annotations

import http.client
import urllib.error
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench.streams import step_trace
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    write_json,
)
from smartspec_cli.explanation import Candidate, WindowReport, candidates, options, window
from smartspec_py.core.types import SequenceId
from smartspec_py.serving.step import StepRecord
from smartspec_py.serving.step_trace import StepTraceFile
from smartspec_sim.traces import TraceError, parse_steps, read_steps

SERVER = "http://127.0.0.1:8000"


def explain(
    url: Annotated[
        str | None,
        typer.Option(
            help=f"HTTP address of a server that was started with --explain. [default: {SERVER}]",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A recorded step trace instead of a server.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of most recent steps.", min=1, max=1024)] = 256,
    step: Annotated[
        int, typer.Option(help="The step to show in detail: 0 is the first, -1 the last.")
    ] = -1,
    sequence: Annotated[
        int | None, typer.Option(help="Request to show; default: the first of the step.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the trace to this file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show why a step got its draft lengths, and how accurate recent plans were.

    For a step: the plan, and plans with one draft length for all requests. For a request: every
    draft length, with the others unchanged. For the window of recent steps: expected and actual
    tokens and step times, how often drafting started or stopped for a request, and predicted and
    observed acceptance rates.
    """
    check_outputs(json=json_file)
    if url is not None and trace is not None:
        fail("give only one of --url and --trace", USAGE_ERROR)
    found, text = _fetched(url or SERVER, steps) if trace is None else (_read(trace), None)
    if save is not None and text is not None:
        save.write_text(text, encoding="utf-8")
    found = replace(found, steps=found.steps[-steps:])
    if not found.steps:
        fail("the trace has no step with a plan: send requests first")
    try:
        shown = found.steps[step]
    except IndexError:
        fail(f"--step: got {step}, but the trace has {len(found.steps)} steps", USAGE_ERROR)
    decision = shown.decision
    chosen = sequence if sequence is not None else decision.views[0].sequence
    try:
        lengths = options(shown, chosen)
    except KeyError:
        fail(f"--sequence: {chosen} is not in the plan of this step", USAGE_ERROR)
    plans, report = candidates(shown), window(found.steps)
    console = result_console(json_file)
    console.print(_step_table(shown, plans))
    console.print(_sequence_table(shown, chosen, lengths))
    _show_window(report, console)
    document = {
        "window": asdict(report),
        "step": {
            "reason": decision.reason,
            "total_s": shown.total_s,
            "num_prefilling": decision.settings.num_prefilling,
            "num_background": decision.settings.num_background,
            "candidates": _listed(plans),
        },
        "sequence": {"sequence": chosen, "candidates": _listed(lengths)},
    }
    write_json(json_file, document)


def _fetched(url: str, steps: int) -> tuple[StepTraceFile, str]:
    """The step trace of a running server, parsed and as text. url: may be without http://."""
    url = url if "://" in url else f"http://{url}"
    try:
        text = step_trace(url, steps)
        return parse_steps(url, text), text
    except urllib.error.HTTPError as error:
        fail(f"{url}: HTTP {error.code}: {error.read().decode(errors='replace').strip()}")
    except urllib.error.URLError as error:
        fail(f"--url: no server answers at {url}: {error.reason}")
    except http.client.HTTPException:
        fail(f"--url: {url} does not answer in HTTP: give the port of --http-port")
    except (OSError, ValueError, KeyError, TraceError) as error:
        fail(f"{url}: {error}")


def _read(path: Path) -> StepTraceFile:
    try:
        return read_steps(path)
    except TraceError as error:
        fail(str(error))


def _step_table(step: StepRecord, plans: Sequence[Candidate]) -> Table:
    table = _candidate_table(
        f"A step of {step.batch_size} sequences ({step.decision.reason})", plans
    )
    settings = step.decision.settings
    beside = [
        f"{count} {what}"
        for count, what in (
            (step.num_prefill_tokens, "prompt tokens"),
            (settings.num_prefilling, "requests in prefill"),
            (settings.num_background, "sequences in a burst"),
        )
        if count
    ]
    table.caption = f"actual: {step.num_generated} tokens in {1e3 * step.total_s:.1f} ms" + (
        f", together with {', '.join(beside)}" if beside else ""
    )
    return table


def _sequence_table(step: StepRecord, sequence: SequenceId, found: Sequence[Candidate]) -> Table:
    table = _candidate_table(f"Sequence {sequence}, draft length", found)
    option = next(
        step.decision.plan.option(view) for view in step.decision.views if view.sequence == sequence
    )
    for event in step.events:
        if event.sequence == sequence and event.num_drafted:
            nodes = f": {', '.join(str(node + 1) for node in event.path)}" if event.path else ""
            drafts = ("a tree of " if option.is_tree else "") + f"{event.num_drafted} drafts"
            table.caption = f"verified: {drafts}, accepted {event.num_accepted}{nodes}"
    return table


def _candidate_table(title: str, found: Sequence[Candidate]) -> Table:
    table = Table(title=title)
    table.add_column("plan", no_wrap=True)
    for column in ("drafts", "tokens", "ms", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            one.name + (", best" if one.is_best else ""),
            str(sum(one.draft_lens)),
            f"{one.expected_tokens:.2f}",
            f"{1e3 * one.expected_s:.2f}",
            f"{one.goodput:.1f}",
        )
    return table


def _show_window(report: WindowReport, console: Console) -> None:
    if not report.num_steps:
        console.print("Every step of the window had prompt chunks, so nothing can be compared.")
        return
    table = Table(title=f"{report.num_steps} steps without prompt chunks")
    for column in ("", "expected", "actual"):
        table.add_column(column, justify="right" if column else "left")
    expected = report.expected_tokens / report.expected_s
    realised = report.realised_tokens / report.realised_s
    table.add_row("tokens", f"{report.expected_tokens:.0f}", str(report.realised_tokens))
    table.add_row("seconds", f"{report.expected_s:.2f}", f"{report.realised_s:.2f}")
    table.add_row("tokens/s", f"{expected:.1f}", f"{realised:.1f}")
    table.caption = (
        f"mean error of step times {100 * report.time_error:.0f} %; drafting started or stopped "
        f"for a request {report.num_switches} times"
    )
    console.print(table)
    if report.reliability:
        bins = Table(title="Acceptance of verified drafts")
        for column in ("predicted", "observed", "drafts"):
            bins.add_column(column, justify="right")
        for one in report.reliability:
            bins.add_row(f"{one.predicted:.2f}", f"{one.observed:.2f}", str(one.num_trials))
        console.print(bins)


def _listed(found: Sequence[Candidate]) -> list[dict[str, Any]]:
    return [asdict(one) | {"tokens_per_s": one.goodput} for one in found]
