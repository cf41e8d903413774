"""`smartspec check`: does speculation change the text of this pair?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_py.commands import USAGE_ERROR, fail
from smartspec_py.commands.settings import checked_config, torch_settings
from smartspec_py.exactness import CheckReport, check_pair_exactness
from smartspec_py.pair import PairError, check_pair
from smartspec_py.serving.config import ConfigError, ServerConfig
from smartspec_py.serving.request import GenerateParams

MAX_TOKENS = 64


def check(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target.")],
    draft: Annotated[Path, typer.Option(help="That of the draft.")],
    dtype: Annotated[str, typer.Option(help="float32 must show no difference.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    tokens: Annotated[int, typer.Option(help="Tokens to compare at least.", min=1)] = 20_000,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0,0.7,1.0",
    max_draft_len: Annotated[int, typer.Option(help="Policies fixed:1 to this.", min=1)] = 7,
    prompts: Annotated[int, typer.Option(help="Prompts a workload.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Keys prompts and sampling.")] = 1,
) -> None:
    """Compare the text of every policy with that of no speculation.

    Each request runs alone and in mixed batches with neighbours that come, go and are cancelled.
    Exits with 1 when any text differs. In float32 none should; in lower precision near-ties do.
    The last line is one JSON document.
    """
    console = Console(stderr=True)
    try:
        check_pair(model, draft)
        requests = _requests(_floats(temperatures), prompts, seed)
    except (PairError, ValueError) as error:
        fail(str(error), USAGE_ERROR)
    config = checked_config(
        {
            "engine": torch_settings(model, draft, dtype=dtype, device=device),
            "limits": {"max_draft_len": max_draft_len, "max_sequences": 8, "max_queue": 4096},
        }
    )
    policies = ["none", *(f"fixed:{k}" for k in range(1, max_draft_len + 1)), "goodput"]
    reports = _run(config, requests, policies, tokens, console)
    console.print(_table(reports))
    num_diverged = sum(len(report.divergences) for report in reports)
    for divergence in [d for report in reports for d in report.divergences][:5]:
        console.print(f"{divergence.policy}, {divergence.mode}: {divergence.params}")
        console.print(f"  expected {divergence.expected[divergence.index :][:60]!r}")
        console.print(f"  found    {divergence.found[divergence.index :][:60]!r}")
    print(json.dumps(_summary(reports, dtype)))
    raise typer.Exit(1 if num_diverged else 0)


def _run(
    config: ServerConfig,
    requests: Sequence[GenerateParams],
    policies: Sequence[str],
    tokens: int,
    console: Console,
) -> list[CheckReport]:
    from smartspec_py.serving.build import build_engine
    from smartspec_py.serving.server import Server

    try:
        engine = build_engine(config, Path.cwd())
    except ConfigError as error:
        fail(str(error), USAGE_ERROR)
    server = Server(engine, config.limits, config.policy)
    server.start()
    with console.status("reference without speculation") as status:

        def show(report: CheckReport) -> None:
            status.update(f"{report.policy} {report.mode}: {report.num_tokens} tokens compared")

        reports = check_pair_exactness(server, requests, policies, tokens, show)
    server.stop()
    return reports


def _requests(temperatures: Sequence[float], prompts: int, seed: int) -> list[GenerateParams]:
    from smartspec_py.workloads import WORKLOADS, generate

    return [
        GenerateParams(
            text=generate(workload, seed, index).prompt,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            # Truncation takes part in every other prompt.
            top_k=40 if index % 2 and temperature else 0,
            top_p=0.95 if index % 2 and temperature else 1.0,
            seed=seed + index,
        )
        for workload in WORKLOADS
        for index in range(prompts)
        for temperature in temperatures
    ]


def _floats(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value < 100 for value in values):
        raise ValueError(f"--temperatures: got {text!r}, must be numbers from 0 to 100")
    return values


def _table(reports: Sequence[CheckReport]) -> Table:
    table = Table(title="Text with speculation against text without")
    for column in ("policy", "requests", "tokens", "accepted / drafted", "cancelled", "differ"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for r in reports:
        table.add_row(
            f"{r.policy}, {r.mode}",
            str(r.num_requests),
            str(r.num_tokens),
            f"{r.num_accepted} / {r.num_drafted}",
            str(r.num_cancelled),
            str(len(r.divergences)),
        )
    return table


def _summary(reports: Sequence[CheckReport], dtype: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "num_requests": sum(r.num_requests for r in reports),
        "num_tokens": sum(r.num_tokens for r in reports),
        "num_drafted": sum(r.num_drafted for r in reports),
        "num_accepted": sum(r.num_accepted for r in reports),
        "num_diverged": sum(len(r.divergences) for r in reports),
        "divergences": [asdict(d) for r in reports for d in r.divergences][:20],
    }
