"""`smartspec explain`: shows why steps got their plans, and how accurate the plans were."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    table,
    write_json,
)
from smartspec_cli.explanation import Candidate, WindowReport, candidates, options, window
from smartspec_launch.address import DIRECT
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.core.types import SequenceId
from smartspec_py.serving.step import StepRecord
from smartspec_sim.traces import TraceError, parse_steps

SERVER = "http://127.0.0.1:8000"
ANSWER_S = 60.0


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
    tokens, step times and acceptance rates, and how often drafting started or stopped for a
    request.
    """
    check_outputs(json=json_file, save=save)
    if url is not None and trace is not None:
        fail("give only one of --url and --trace", USAGE_ERROR)
    name = str(trace or url or SERVER)
    try:
        text = _fetched(name, steps) if trace is None else trace.read_text(encoding="utf-8")
        records = parse_steps(name, text)[-steps:]
    except TraceError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{name}: {error.strerror or error}")
    except (ValueError, KeyError):
        fail(f"{name}: the answer is not that of a server of this project")
    if save is not None:
        save.write_text(text, encoding="utf-8")
    if not records:
        fail("the trace has no step with a plan: send requests first")
    try:
        shown = records[step]
    except IndexError:
        fail(f"--step: got {step}, but the trace has {len(records)} steps", USAGE_ERROR)
    chosen = sequence if sequence is not None else shown.decision.views[0].sequence
    try:
        lengths = options(shown, chosen)
    except KeyError:
        fail(f"--sequence: {chosen} is not in the plan of this step", USAGE_ERROR)
    plans, report = candidates(shown), window(records)
    console = result_console(json_file)
    console.print(_step_table(shown, plans), _sequence_table(shown, chosen, lengths))
    if report.num_steps:
        console.print(_window_table(report))
    else:
        console.print("Every step of the window had prompt chunks, so nothing can be compared.")
    document = {
        "window": asdict(report),
        "step": {
            "reason": shown.decision.reason,
            "total_s": shown.total_s,
            "num_prefilling": shown.decision.settings.num_prefilling,
            "candidates": [asdict(one) for one in plans],
        },
        "sequence": {"sequence": chosen, "candidates": [asdict(one) for one in lengths]},
    }
    write_json(json_file, document)


def _fetched(url: str, num_steps: int) -> str:
    """The last steps of a running server. url: may be without http://. Raises OSError, ValueError
    if the answer is not JSON, and KeyError if it has no steps."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    fields = {"text_input": "-", "max_tokens": 1, "explain_steps": num_steps}
    headers = {"Content-Type": "application/json"}
    path = f"{url}/v2/models/{MODEL_NAME}/generate"
    request = urllib.request.Request(path, json.dumps(fields).encode(), headers)
    try:
        with DIRECT.open(request, timeout=ANSWER_S) as response:
            return str(json.loads(response.read())["explanation"])
    except urllib.error.HTTPError as error:
        fail(f"{url}: {_reason(error.read()) or f'HTTP {error.code}'}")
    except (urllib.error.URLError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        fail(f"--url: no HTTP server answers at {url}: {reason}")


def _reason(body: bytes) -> str:
    """The message of a refusal; empty if it has none."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def _step_table(step: StepRecord, plans: Sequence[Candidate]) -> Table:
    title = f"A step of {step.batch_size} sequences ({step.decision.reason})"
    caption = (
        f"actual: {step.num_generated} tokens in {1e3 * step.total_s:.1f} ms, together with "
        f"{step.num_prefill_tokens} prompt tokens and {step.decision.settings.num_prefilling} "
        "requests in prefill"
    )
    return _candidate_table(title, plans, caption)


def _sequence_table(step: StepRecord, sequence: SequenceId, found: Sequence[Candidate]) -> Table:
    caption = ""
    for event in step.events:
        if event.sequence == sequence and event.num_drafted:
            caption = f"verified: {event.num_drafted} drafts, accepted {event.num_accepted}"
    return _candidate_table(f"Sequence {sequence}, draft length", found, caption)


def _candidate_table(title: str, found: Sequence[Candidate], caption: str) -> Table:
    rows = (
        (
            one.name + (", best" if one.is_best else ""),
            str(sum(one.draft_lens)),
            f"{one.expected_tokens:.2f}",
            f"{1e3 * one.expected_s:.2f}",
            f"{one.tokens_per_s:.1f}",
        )
        for one in found
    )
    return table(title, ("plan", "drafts", "tokens", "ms", "tokens/s"), rows, caption)


def _window_table(report: WindowReport) -> Table:
    expected = report.expected_tokens / report.expected_s
    realised = report.realised_tokens / report.realised_s
    rows = [
        ("tokens", f"{report.expected_tokens:.0f}", str(report.realised_tokens)),
        ("seconds", f"{report.expected_s:.2f}", f"{report.realised_s:.2f}"),
        ("tokens/s", f"{expected:.1f}", f"{realised:.1f}"),
        ("acceptance", f"{report.predicted:.2f}", f"{report.observed:.2f}"),
    ]
    title = f"{report.num_steps} steps without prompt chunks"
    caption = (
        f"mean error of step times {100 * report.time_error:.0f} %; {report.num_trials} verified "
        f"drafts; drafting started or stopped for a request {report.num_switches} times"
    )
    return table(title, ("", "expected", "actual"), rows, caption)
