"""`smartspec steps`: times the parts of a step, without Triton."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from smartspec_bench.progress import Progress, tracked
from smartspec_bench.workloads import WORKLOADS
from smartspec_bench.workloads import generate as make_document
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    write_json,
)
from smartspec_cli.commands.settings import checked_config, pair_settings, policies_of, sizes_of
from smartspec_py.serving.config import DEFAULT_CONTEXT_LEN, DRAFT_MODEL, ConfigError
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.local import generate

PROMPT_SEED = 5_000_011
NUM_TOKENS = 128
"""Enough tokens that the first sequence still decodes when the last one ends its prefill."""


@dataclass(frozen=True)
class StepTimes:
    """Medians over the decoding steps of one policy, in milliseconds.

    share_outside: the share of time outside model passes, over all steps including prefill.
    """

    batch_size: int
    policy: str
    num_steps: int
    step_ms: float
    plan_ms: float
    draft_ms: float
    target_ms: float
    share_outside: float


def steps(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target model.")],
    draft: Annotated[Path, typer.Option(help="Hugging Face directory of the draft model.")],
    rows: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32",
    policies: Annotated[
        str, typer.Option(help="Policies, separated by commas.")
    ] = "none,fixed:3,goodput",
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32 or bfloat16.")] = "auto",
    num_threads: Annotated[
        int, typer.Option(help="Compute threads; 0 uses one less than the number of cores.", min=0)
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time the loop's steps in this process: plan, draft, target and the rest of a step."""
    check_outputs(json=json_file)
    sizes, names = sizes_of(rows), policies_of(policies)
    engine_settings = pair_settings(model, draft, dtype, num_threads)
    limits = {"max_sequences": max(sizes), "max_context_len": DEFAULT_CONTEXT_LEN}
    config = checked_config({"engine": engine_settings, "limits": limits})
    from smartspec_py.engines.torch.target import TorchTarget
    from smartspec_py.proposers.draft_model import DraftModelProposer
    from smartspec_py.serving.build import build_engine

    try:
        with Progress("loading models, timing passes"):
            engine = build_engine(config, Path.cwd())
    except ConfigError as error:
        fail(str(error), USAGE_ERROR)
    target, proposer = engine.target, engine.proposers.get(DRAFT_MODEL)
    assert isinstance(target, TorchTarget)
    assert isinstance(proposer, DraftModelProposer)
    server = Server(engine, config)
    server.start()
    cells = [(size, policy) for size in sizes for policy in names]
    found = [
        _time(server, lambda: target.passes_s + proposer.passes_s, size, policy)
        for size, policy in tracked("timing steps", cells, "policies and sizes")
    ]
    server.stop()
    result_console(json_file).print(_table(found))
    write_json(json_file, [asdict(times) for times in found])


def _time(server: Server, passes_s: Callable[[], float], batch_size: int, policy: str) -> StepTimes:
    """Serve batch_size requests together, twice. Only the second run is measured."""
    requests = [
        GenerateParams(
            text=make_document(WORKLOADS[index % len(WORKLOADS)], PROMPT_SEED, index).prompt,
            max_tokens=NUM_TOKENS,
            policy=policy,
            end_id=-1,
            reuse_prefix=False,
        )
        for index in range(batch_size)
    ]
    for _ in range(2):
        server.loop.records.clear()
        before_s = passes_s()
        generate(server, requests)
        spent_s = passes_s() - before_s
    total_s = sum(r.total_s for r in server.loop.records)
    records = [
        r for r in server.loop.records if r.batch_size == batch_size and not r.num_prefill_tokens
    ]
    if not records:
        fail(f"no decoding step had {batch_size} sequences: reduce --rows")

    def median_ms(values: Sequence[float]) -> float:
        return 1e3 * statistics.median(values)

    return StepTimes(
        batch_size=batch_size,
        policy=policy,
        num_steps=len(records),
        step_ms=median_ms([r.total_s for r in records]),
        plan_ms=median_ms([r.views_s + r.plan_s for r in records]),
        draft_ms=median_ms([r.draft_s for r in records]),
        target_ms=median_ms([r.target_s for r in records]),
        share_outside=1 - spent_s / total_s,
    )


def _table(found: Sequence[StepTimes]) -> Table:
    table = Table(title="A decoding step, milliseconds")
    for column in ("sequences", "policy", "step", "plan", "draft", "target", "outside passes"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for times in found:
        table.add_row(
            str(times.batch_size),
            times.policy,
            f"{times.step_ms:.1f}",
            f"{times.plan_ms:.2f}",
            f"{times.draft_ms:.1f}",
            f"{times.target_ms:.1f}",
            f"{100 * times.share_outside:.1f} %",
        )
    return table
