"""`smartspec check`: checks whether speculation changes the text of this pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from smartspec_bench.exactness import (
    NO_SPECULATION,
    CheckArm,
    CheckError,
    CheckReport,
    Divergence,
    check_pair_exactness,
    force_drafting,
)
from smartspec_bench.progress import Progress
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    write_json,
)
from smartspec_cli.commands.settings import checked_config, temperatures_of, torch_settings
from smartspec_py.config import DRAFT_MODEL, HEADS, PROMPT_LOOKUP, ConfigError, ServerConfig
from smartspec_py.engines.torch.pair import PairError, check_pair
from smartspec_py.serving.request import GenerateParams, RequestError

if TYPE_CHECKING:
    from smartspec_bench.nearties import TieVerdict
    from smartspec_py.engines.engine import Engine
    from smartspec_py.serving.intake import Intake

MAX_TOKENS = 64
MAX_CONTEXT_LEN = 512
NUM_ROWS = 8
TREE_WIDTH = 4
"""Heads draft trees here on CPUs too."""

CACHE_SHARE = 0.4
"""Cache size as a share of all rows full. Small enough to cause preemptions in mixed batches."""

NUM_SHOWN = 5

PASS, FAIL = "PASS", "FAIL"

PENALTIES: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 40, "top_p": 0.95},
    {"repetition_penalty": 1.2, "min_p": 0.02},
    {"presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 24},
    {"bias_words": (" the",), "bias_weights": (-2.0,), "bad_words": ("and",)},
    {"stop_words": (" of", "?")},
)
"""Request fields besides temperature. The requests use these sets in turn."""


def check(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target model.")],
    draft: Annotated[
        Path | None,
        typer.Option(help="Hugging Face directory of the draft model. Needed without --heads."),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(help="Directory of Medusa heads or of an EAGLE-3 head of the target model."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision. In float32 there must be no difference.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    tokens: Annotated[
        int, typer.Option(help="Number of tokens to compare, at least.", min=1)
    ] = 12_000,
    temperatures: Annotated[
        str, typer.Option(help="Sampling temperatures, separated by commas.")
    ] = "0,0.7,1.0",
    max_draft_len: Annotated[
        int, typer.Option(help="Check fixed draft lengths of 1, 3 and N.", min=1)
    ] = 7,
    prompts: Annotated[int, typer.Option(help="Prompts per workload.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 1,
    runtime: Annotated[
        str, typer.Option(help="Runtime on a CPU: auto, torch or openvino.")
    ] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Compare the text of every policy and proposer with that of no speculation.

    Each request runs alone and in mixed batches, together with requests that are cancelled and
    preempted. Policies that choose by cost get a cost model with almost free drafts, so that they
    draft. If a text differs, the step is examined. Two almost equally likely tokens are a near-tie,
    caused by rounding. In float32 there should be none. Any other difference is a fault. The check
    of a small pair takes about a minute.

    Prints PASS (exit code 0) or FAIL (1). FAIL means a fault, or a policy that drafted nothing.
    """
    check_outputs(json=json_file)
    console = Console(stderr=True)
    if draft is None and heads is None:
        fail("nothing to check: give --draft, --heads or both", USAGE_ERROR)
    try:
        check_pair(model, draft)
        requests = _requests(temperatures_of(temperatures), prompts, seed)
    except (PairError, ValueError) as error:
        fail(str(error), USAGE_ERROR)
    config = checked_config(
        {
            "engine": torch_settings(
                model,
                draft,
                heads=None if heads is None else str(heads.resolve()),
                dtype=dtype,
                device=device,
                runtime=runtime,
            ),
            "limits": {
                "max_draft_len": max_draft_len,
                "max_tree_width": TREE_WIDTH,
                "max_sequences": NUM_ROWS,
                "max_queue": 4096,
                "max_context_len": MAX_CONTEXT_LEN,
                "max_cache_tokens": int(CACHE_SHARE * NUM_ROWS * MAX_CONTEXT_LEN),
                "profile_s": 0.0,  # the check plans with constant costs
            },
        }
    )
    drafters = {DRAFT_MODEL: draft, PROMPT_LOOKUP: model, HEADS: heads}
    arms = _arms(max_draft_len, [name for name, path in drafters.items() if path])
    reports, verdicts = _run(config, requests, arms, tokens, console)
    shown_at = result_console(json_file)
    shown_at.print(_table(reports))
    _show(verdicts, shown_at)
    summary = _summary(reports, verdicts, dtype)
    shown_at.print(_verdict_line(summary), style="bold", highlight=False, soft_wrap=True)
    write_json(json_file, summary)
    raise typer.Exit(0 if summary["verdict"] == PASS else 1)


def _arms(max_draft_len: int, names: Sequence[str]) -> list[CheckArm]:
    """names: the proposers. With several proposers, one arm leaves the choice to the planner."""
    lengths = sorted({1, min(3, max_draft_len), max_draft_len})
    return [
        CheckArm("none"),
        *(CheckArm(f"fixed:{k}", name) for name in names for k in lengths),
        *(CheckArm("goodput", name) for name in names),
        *([CheckArm("goodput")] if len(names) > 1 else []),
    ]


def _run(
    config: ServerConfig,
    requests: Sequence[GenerateParams],
    arms: Sequence[CheckArm],
    tokens: int,
    console: Console,
) -> tuple[list[CheckReport], list[tuple[Divergence, TieVerdict]]]:
    from smartspec_py.serving.build import build_engine
    from smartspec_py.serving.server import Server

    try:
        with Progress("loading models, timing passes", console=console):
            engine = build_engine(config, Path.cwd())
    except ConfigError as error:
        fail(str(error), USAGE_ERROR)
    server = Server(engine, config)
    force_drafting(server, config)
    server.start()
    try:
        with Progress("reference", unit="requests", console=console) as shown:

            def begin(label: str, num_requests: int) -> None:
                shown.update(label, total=num_requests)

            reports = check_pair_exactness(server, requests, arms, tokens, begin, shown.advance)
    except (CheckError, RequestError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", 130)
    finally:
        server.stop()
    divergences = [d for report in reports for d in report.divergences]
    return reports, _judged(engine, server.intake, divergences)


def _judged(
    engine: Engine, intake: Intake, divergences: Sequence[Divergence]
) -> list[tuple[Divergence, TieVerdict]]:
    """Each divergence with its verdict. The server has stopped, so its engine can be used here."""
    from smartspec_bench.nearties import judge
    from smartspec_py.engines.torch.target import TorchTarget
    from smartspec_testing.local import LocalSink
    from smartspec_testing.scoring import TargetScorer

    assert isinstance(engine.target, TorchTarget)
    scorer, found = TargetScorer(engine.target), []
    for divergence in divergences:
        request = intake.receive(divergence.params, LocalSink()).request
        found.append((divergence, judge(scorer, request, divergence)))
    return found


def _requests(temperatures: Sequence[float], prompts: int, seed: int) -> list[GenerateParams]:
    from smartspec_bench.workloads import WORKLOADS, generate

    return [
        GenerateParams(
            text=generate(workload, seed, index).prompt,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=seed + index,
            **PENALTIES[index % len(PENALTIES)],
        )
        for workload in WORKLOADS
        for index in range(prompts)
        for temperature in temperatures
    ]


def _table(reports: Sequence[CheckReport]) -> Table:
    """A table that fits in 80 columns."""
    table = Table(
        title="Tokens with speculation compared with tokens without",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for column in ("policy", "proposer", "mode"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens", "drafted", "accepted", "cached", "differ"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in reports:
        policy, _, proposer = r.arm.partition(", ")
        counts = (r.num_tokens, r.num_drafted, r.num_accepted, r.num_cached, len(r.divergences))
        table.add_row(policy, proposer, r.mode, *map(str, counts))
    cancelled = sum(r.num_cancelled for r in reports)
    preempted = sum(r.num_preemptions for r in reports)
    table.caption = (
        "cached: prompt tokens served from the prefix cache; differ: texts. "
        f"There were also {cancelled} cancelled requests and {preempted} preemptions."
    )
    return table


def _show(verdicts: Sequence[tuple[Divergence, TieVerdict]], console: Console) -> None:
    """Print up to NUM_SHOWN divergences, faults first."""
    ordered = sorted(verdicts, key=lambda pair: pair[1].is_near_tie)
    for divergence, verdict in ordered[:NUM_SHOWN]:
        kind = "near-tie" if verdict.is_near_tie else "FAULT"
        console.print(
            f"{kind}: {divergence.arm}, {divergence.mode}: token {divergence.index} is "
            f"{divergence.found} instead of {divergence.expected}; their scores differ by "
            f"{verdict.gap:.2g}, and rounding explains up to {verdict.allowed:.2g}",
            highlight=False,
        )


def _summary(
    reports: Sequence[CheckReport], verdicts: Sequence[tuple[Divergence, TieVerdict]], dtype: str
) -> dict[str, Any]:
    num_near_ties = sum(verdict.is_near_tie for _, verdict in verdicts)
    num_tokens, num_faults = sum(r.num_tokens for r in reports), len(verdicts) - num_near_ties
    without_drafts = [
        f"{r.arm} {r.mode}" for r in reports if r.arm != str(NO_SPECULATION) and not r.num_drafted
    ]
    is_passed = num_tokens > 0 and not num_faults and not without_drafts
    return {
        "verdict": PASS if is_passed else FAIL,
        "dtype": dtype,
        "num_requests": sum(r.num_requests for r in reports),
        "num_tokens": num_tokens,
        "num_drafted": sum(r.num_drafted for r in reports),
        "num_accepted": sum(r.num_accepted for r in reports),
        "num_cached": sum(r.num_cached for r in reports),
        "num_preemptions": sum(r.num_preemptions for r in reports),
        "num_cancelled": sum(r.num_cancelled for r in reports),
        "num_diverged": len(verdicts),
        "num_near_ties": num_near_ties,
        "near_ties_per_1000_tokens": 1e3 * num_near_ties / max(1, num_tokens),
        "num_faults": num_faults,
        "without_drafts": without_drafts,
        "divergences": [asdict(d) | asdict(v) for d, v in verdicts[:20]],
    }


def _verdict_line(summary: Mapping[str, Any]) -> str:
    """Such as `PASS: 7,588 tokens compared, 7,215 drafted, 3,033 accepted; no text differs`."""
    line = (
        f"{summary['verdict']}: {summary['num_tokens']:,} tokens compared, "
        f"{summary['num_drafted']:,} drafted, {summary['num_accepted']:,} accepted; "
    )
    if summary["num_diverged"]:
        texts = f"{summary['num_diverged']} texts differ"
        line += f"{texts}: {summary['num_faults']} faults, {summary['num_near_ties']} near-ties"
        line += f" ({summary['near_ties_per_1000_tokens']:.2g} in 1,000 tokens)"
    else:
        line += "no text differs"
    if summary["without_drafts"]:
        line += f"; no drafts, nothing compared: {'; '.join(summary['without_drafts'])}"
    return line
