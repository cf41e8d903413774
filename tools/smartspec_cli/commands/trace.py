"""`smartspec trace`: records how many drafts would be accepted at every position of a text."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench.progress import Progress
from smartspec_bench.prompts import Prompt, read_prompts
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
from smartspec_cli.commands.settings import checked_config, temperatures_of, torch_settings
from smartspec_launch import paths
from smartspec_py.engines.torch.pair import PairError, check_pair
from smartspec_py.serving.config import ConfigError, ServerConfig
from smartspec_py.serving.request import GenerateParams, RequestError
from smartspec_sim.traces.files import TraceError
from smartspec_sim.traces.oracle import OracleHeader, OracleSequence, write_oracle
from smartspec_sim.traces.walks import Rates, rates

ALL = "all"
DEFAULT_PROMPTS = 10
NUM_ROWS = 8
BATCH = 4 * NUM_ROWS
"""Requests that are submitted at once: enough to keep the rows full."""

SHOWN_LENGTHS = (1, 3, 5, 7)


@dataclass(frozen=True)
class _Job:
    """A text to generate. workload: its tag in the trace."""

    workload: str
    params: GenerateParams


def trace(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target model.")],
    out: Annotated[Path, typer.Option(help="File to write, JSON lines.")],
    draft: Annotated[
        Path | None, typer.Option(help="Hugging Face directory of the draft model.")
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="Directory of Medusa heads of the target model.")
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="No effect. Traces are always oracle traces.")
    ] = True,
    workloads: Annotated[
        str | None, typer.Option(help="all (the default), or some of chat,sql,summarize,qa.")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input", help='Own prompts: one {"prompt", "max_tokens"} per line, or ShareGPT.'
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            help=f"Prompts per workload (default {DEFAULT_PROMPTS}) or of --input (default all).",
            min=1,
        ),
    ] = None,
    temperatures: Annotated[
        str, typer.Option(help="Sampling temperatures, separated by commas.")
    ] = "0,1.0",
    max_draft_len: Annotated[int, typer.Option(help="Largest draft length.", min=1)] = 7,
    max_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens to generate per text.", min=1)
    ] = 64,
    max_context_len: Annotated[
        int, typer.Option(help="Longest prompt plus generated text, in tokens.", min=2)
    ] = 512,
    dtype: Annotated[
        str, typer.Option(help="Precision. float32 is exact; others may differ at near-ties.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.", min=1)] = 6_000_011,
    json_file: JsonFile = None,
) -> None:
    """Record how many drafts would be accepted, at every position and for every draft length.

    The texts are generated without speculation. Then one pass of the draft model over each text,
    and a prompt lookup at every position, show what each proposer would have had accepted.
    `smartspec simulate --oracle` replays the file.
    """
    console = Console(stderr=True)
    _check_heads(heads)
    try:
        check_pair(model, draft)
        jobs = _jobs(
            workloads, input_file, prompts, temperatures_of(temperatures), max_tokens, seed
        )
    except (PairError, ValueError) as error:
        fail(str(error), USAGE_ERROR)
    check_outputs(out=out, json=json_file)
    config = _config(model, draft, heads, dtype, device, max_draft_len, max_context_len)
    traced, refusals = _run(config, jobs, console)
    if not traced:
        fail(f"every prompt was refused; the first error: {refusals[0]}", USAGE_ERROR)
    header = OracleHeader(
        model=model.name,
        draft="none" if draft is None else draft.name,
        dtype=dtype,
        max_draft_len=max_draft_len,
        seed=seed,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        settings={"device": device, "lookup": config.lookup.model_dump()},
    )
    try:
        write_oracle(out, header, traced)
    except OSError as error:
        fail(f"--out: {error}")
    if refusals:
        console.print(
            f"{len(refusals)} requests were refused; the first error: {refusals[0]}",
            highlight=False,
        )
    _report(out, _all_rates(traced, max_draft_len), len(refusals), json_file)


def _check_heads(folder: Path | None) -> None:
    if folder is None:
        return
    from smartspec_py.engines.torch.eagle import is_eagle

    if is_eagle(folder):
        fail(f"--heads: {folder} has an EAGLE-3 head; only Medusa heads can be traced", USAGE_ERROR)


def _config(
    model: Path,
    draft: Path | None,
    heads: Path | None,
    dtype: str,
    device: str,
    max_draft_len: int,
    max_context_len: int,
) -> ServerConfig:
    profiles = str(paths.profile_cache().resolve())
    engine = torch_settings(
        model,
        draft,
        heads=None if heads is None else str(heads.resolve()),
        dtype=dtype,
        device=device,
        profile_cache=profiles,
    )
    limits = {
        "max_draft_len": max_draft_len,
        "max_sequences": NUM_ROWS,
        "max_context_len": max_context_len,
        "max_queue": BATCH,
    }
    return checked_config({"engine": engine, "limits": limits})


def _jobs(
    workloads: str | None,
    input_file: Path | None,
    num_prompts: int | None,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
) -> list[_Job]:
    """Every prompt at every temperature. Raises ValueError, naming the option."""
    if input_file is None:
        prompts = list(_documents(workloads or ALL, num_prompts or DEFAULT_PROMPTS, seed))
    elif workloads is None:
        prompts = [(input_file.stem, prompt) for prompt in read_prompts(input_file)][:num_prompts]
    else:
        raise ValueError("--workloads and --input cannot be used together")
    return [
        _Job(
            workload,
            GenerateParams(
                text=prompt.text,
                max_tokens=prompt.max_tokens or max_tokens,
                temperature=temperature,
                seed=seed + index,
                policy="none",
            ),
        )
        for index, (workload, prompt) in enumerate(prompts)
        for temperature in temperatures
    ]


def _documents(workloads: str, num_prompts: int, seed: int) -> Iterator[tuple[str, Prompt]]:
    names = WORKLOADS if workloads == ALL else workloads.split(",")
    for name in names:
        if name not in WORKLOADS:
            allowed = ", ".join((ALL, *WORKLOADS))
            raise ValueError(f"--workloads: {name!r} must be one of {allowed}")
        for index in range(num_prompts):
            yield name, Prompt(make_document(name, seed, index).prompt)


def _run(
    config: ServerConfig, jobs: Sequence[_Job], console: Console
) -> tuple[list[OracleSequence], list[str]]:
    """The traces, and the errors of refused jobs."""
    from smartspec_py.serving.build import build_engine
    from smartspec_py.serving.server import Server
    from smartspec_sim.traces.make import FinishedText, trace_text, write_texts

    try:
        with Progress("loading models, timing passes", console=console):
            engine = build_engine(config, Path.cwd())
    except ConfigError as error:
        fail(str(error), USAGE_ERROR)
    server = Server(engine, config)
    server.start()
    written, traced = [], []
    with Progress("generating", 2 * len(jobs), "passes", console=console) as shown:
        try:
            for text in write_texts(server, [job.params for job in jobs], BATCH):
                written.append(text)
                shown.advance("texts generated")
        except TraceError as error:
            fail(str(error))
        finally:
            server.stop()
        for job, text in zip(jobs, written, strict=True):
            if isinstance(text, FinishedText):
                traced.append(trace_text(engine, text, job.workload, config.limits.max_draft_len))
                shown.advance("texts traced")
    return traced, [str(text) for text in written if isinstance(text, RequestError)]


def _all_rates(
    traced: Sequence[OracleSequence], max_draft_len: int
) -> dict[tuple[str, str], Rates]:
    """Rates by proposer and workload. Several workloads also get a row for all together."""
    workloads = list(dict.fromkeys(one.workload for one in traced))
    draft_lens = [k for k in SHOWN_LENGTHS if k <= max_draft_len]
    return {
        (proposer, name): rates(
            [one for one in traced if name in (ALL, one.workload)],
            proposer,
            max_draft_len,
            draft_lens,
        )
        for proposer in traced[0].proposers
        for name in (*workloads, *([ALL] if len(workloads) > 1 else []))
    }


def _tables(found: Mapping[tuple[str, str], Rates]) -> Iterator[Table]:
    """Two tables, so that each fits in a narrow terminal."""
    by_position = _table("Acceptance by position, if all earlier drafts were accepted")
    by_length = _table("Tokens per step, including the target's own, at fixed draft lengths")
    some = next(iter(found.values()))
    for position in range(1, len(some.accept_probs) + 1):
        by_position.add_column(str(position), justify="right", no_wrap=True)
    for draft_len in some.mean_acceptance_len:
        by_length.add_column(str(draft_len), justify="right", no_wrap=True)
    for names, one in found.items():
        shown = ("" if prob is None else f"{prob:.2f}" for prob in one.accept_probs)
        by_position.add_row(*names, *shown)
        by_length.add_row(*names, *(f"{gained:.2f}" for gained in one.mean_acceptance_len.values()))
    yield from (by_position, by_length)


def _table(title: str) -> Table:
    table = Table(title=title)
    for column in ("proposer", "workload"):
        table.add_column(column, no_wrap=True)
    return table


def _report(
    out: Path,
    found: Mapping[tuple[str, str], Rates],
    num_refused: int,
    json_file: Path | None,
) -> None:
    console = result_console(json_file)
    for table in _tables(found):
        console.print(table)
    rows: list[dict[str, Any]] = [
        {"proposer": proposer, "workload": workload, **asdict(one)}
        for (proposer, workload), one in found.items()
    ]
    write_json(json_file, {"out": str(out), "num_refused": num_refused, "rates": rows})
