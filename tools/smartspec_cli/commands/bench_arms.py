"""`smartspec bench arms`: the speed of each policy per request, measured on a live Triton."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench.arms import NONE, Arm, Job, run_arms
from smartspec_bench.progress import Progress
from smartspec_bench.streams import StreamError
from smartspec_bench.workloads import WORKLOADS, generate
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    write_json,
)
from smartspec_cli.commands.settings import checked_config, pair_settings, policies_of
from smartspec_launch import paths
from smartspec_launch.files import InstallationError
from smartspec_launch.foreground import signals_interrupt, wait_with_progress
from smartspec_launch.interpreter import InterpreterError
from smartspec_launch.triton_server import TritonServer, TritonServerError, free_address
from smartspec_py.serving.config import DEFAULT_CONTEXT_LEN
from smartspec_py.serving.profile import machine_name

DEFAULT_POLICIES = "none,fixed:1,fixed:2,fixed:3,fixed:4,fixed:5,fixed:6,fixed:7,goodput"
EACH, MIXED = "each", "mixed"
PROMPT_SEED = 4_000_037
"""Seed of the prompts. It is far from the seeds of the shipped pair's training data."""


def arms(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target model.")],
    draft: Annotated[Path, typer.Option(help="Hugging Face directory of the draft model.")],
    policies: Annotated[
        str, typer.Option(help="Policies, separated by commas.")
    ] = DEFAULT_POLICIES,
    concurrency: Annotated[
        int, typer.Option(help="Number of requests at the same time.", min=1)
    ] = 1,
    workload: Annotated[
        str,
        typer.Option(
            help="chat, sql, summarize or qa; each: one after another; mixed: all at once."
        ),
    ] = EACH,
    rounds: Annotated[
        int, typer.Option(help="Number of repeats. Prompts differ between them.", min=1)
    ] = 8,
    max_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens to generate for a request.", min=1)
    ] = 64,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)
    ] = 0.0,
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32 or bfloat16.")] = "auto",
    num_threads: Annotated[
        int, typer.Option(help="Compute threads; 0 uses one less than the number of cores.", min=0)
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare policies as interleaved arms on one live Triton server.

    Every policy gets the same prompts in every round. tokens/s is generated tokens divided by the
    time from sending to the last response, as geometric mean over the rounds.
    """
    check_outputs(json=json_file)
    names = _policies(policies)
    if workload not in (*WORKLOADS, EACH, MIXED):
        allowed = ", ".join((*WORKLOADS, EACH, MIXED))
        fail(f"--workload: {workload!r} must be one of {allowed}", USAGE_ERROR)
    engine = pair_settings(model, draft, dtype, num_threads)
    limits = {"max_sequences": concurrency, "max_context_len": DEFAULT_CONTEXT_LEN}
    config = checked_config({"engine": engine, "limits": limits})
    address = free_address()
    folder = paths.run_dir(address.http_port).resolve()
    server = TritonServer(config, folder, address, keeps_files=False)
    groups = {
        name: [
            _round_jobs(name, number, concurrency, max_tokens, temperature)
            for number in range(rounds)
        ]
        for name in (WORKLOADS if workload == EACH else (workload,))
    }
    console = Console(stderr=True)
    try:
        with signals_interrupt(), server:
            wait_with_progress(server, console)
            with Progress("warming up", unit="runs", console=console) as shown:
                results = asyncio.run(run_arms(server.address.grpc_url, names, groups, shown))
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except (StreamError, InterpreterError, InstallationError, TritonServerError) as error:
        fail(str(error))
    shown_at = result_console(json_file)
    for name, found in results.items():
        shown_at.print(_table(found, f"{name}, {concurrency} at once, {rounds} rounds"))
    summary = {
        "format": "smartspec-arms",
        "version": 1,
        "average": "geometric mean over the rounds",
        "machine": machine_name(),
        "model": model.name,
        "draft": draft.name,
        "concurrency": concurrency,
        "rounds": rounds,
        "temperature": temperature,
        "dtype": dtype,
        "num_threads": num_threads,
        "max_tokens": max_tokens,
        "arms": {name: _summary(found) for name, found in results.items()},
    }
    write_json(json_file, summary)


def _policies(text: str) -> list[str]:
    names = policies_of(text)
    if NONE not in names:
        fail(f"--policies: must include {NONE}, which is the baseline", USAGE_ERROR)
    return names


def _round_jobs(
    workload: str, number: int, concurrency: int, max_tokens: int, temperature: float
) -> list[Job]:
    """The requests of one round. No other round has the same prompts."""
    jobs = []
    for index in range(concurrency):
        unit = number * concurrency + index
        name = WORKLOADS[unit % len(WORKLOADS)] if workload == MIXED else workload
        fields = {
            "text_input": generate(name, PROMPT_SEED, unit).prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": unit + 1,
            # Arms use the same prompts. With the prefix cache, only the first arm would pay for
            # the prefill.
            "reuse_prefix": False,
        }
        jobs.append(Job(fields))
    return jobs


def best_fixed(arms: Sequence[Arm]) -> Arm | None:
    """The fixed draft length with the most tokens/s, which is known only after the run."""
    fixed = [arm for arm in arms if arm.policy.startswith("fixed:")]
    return max(fixed, key=lambda arm: arm.tokens_per_s, default=None)


def _table(arms: Sequence[Arm], title: str) -> Table:
    table = Table(title=title)
    for column in ("policy", "tokens/s", "over none", "over best fixed", "drafted", "gained"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in _summary(arms):
        over_best = row["over_best_fixed"]
        table.add_row(
            row["policy"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['over_none']:.3f}",
            "" if over_best is None else f"{over_best:.3f}",
            f"{row['mean_draft_len']:.2f}",
            f"{row['mean_acceptance_len']:.2f}",
        )
    table.caption = (
        "tokens/s: geometric mean over the rounds; over: ratio of these means; "
        "drafted, gained: tokens per decoding step and sequence"
    )
    return table


def _summary(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    none = next(arm for arm in arms if arm.policy == NONE)
    best = best_fixed(arms)
    return [
        {
            "policy": arm.policy,
            "num_tokens": sum(phase.num_tokens for phase in arm.phases),
            "tokens_per_s": arm.tokens_per_s,
            "over_none": arm.tokens_per_s / none.tokens_per_s,
            "over_best_fixed": None if best is None else arm.tokens_per_s / best.tokens_per_s,
            "is_best_fixed": arm is best,
            "mean_draft_len": arm.mean_draft_len,
            "mean_acceptance_len": arm.mean_acceptance_len,
        }
        for arm in arms
    ]
