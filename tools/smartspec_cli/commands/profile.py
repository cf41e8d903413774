"""`smartspec profile`: measures pass times and acceptance, and shows the best draft lengths."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench.progress import Progress
from smartspec_bench.prompts import MIXED, PROMPT_SEED, PromptFileError, generated, read_prompts
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    write_json,
    write_output,
)
from smartspec_cli.commands.settings import checked_config, torch_settings
from smartspec_launch import paths
from smartspec_py.config import (
    DRAFT_MODEL,
    BatchTableConfig,
    ConfigError,
    LimitsConfig,
    ServerConfig,
)
from smartspec_py.engines.torch.pair import PairError, check_pair

if TYPE_CHECKING:
    from smartspec_py.core.cost import CostModel
    from smartspec_py.engines.engine import Engine

DRAFT_LEN = 3
"""With which the acceptance rate is measured."""

MAX_TOKENS = 48

_LIMITS = LimitsConfig()


def profile(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target model.")],
    draft: Annotated[Path, typer.Option(help="Hugging Face directory of the draft model.")],
    rows: Annotated[
        int,
        typer.Option(
            help="Largest batch size; use the server's limits.max_sequences.", min=1, max=1024
        ),
    ] = _LIMITS.max_sequences,
    max_draft_len: Annotated[
        int, typer.Option(help="Largest draft length; use the server's.", min=1, max=16)
    ] = _LIMITS.max_draft_len,
    max_context_len: Annotated[
        int | None, typer.Option(help="Context length; use the server's.")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", help='Own prompts: one {"prompt": ".."} per line, or ShareGPT.'),
    ] = None,
    prompts: Annotated[
        int, typer.Option(help="Prompts for measuring the acceptance rate.", min=1)
    ] = 8,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)
    ] = 0.0,
    seconds: Annotated[
        float, typer.Option(help="Time for measuring passes, about; use the server's.", min=0)
    ] = 30.0,
    dtype: Annotated[
        str, typer.Option(help="Precision: auto, float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    num_threads: Annotated[
        int, typer.Option(help="Compute threads; 0 uses one less than the number of cores.", min=0)
    ] = 0,
    runtime: Annotated[
        str, typer.Option(help="Runtime on a CPU: auto, torch or openvino.")
    ] = "auto",
    profile_cache: Annotated[
        Path | None, typer.Option(help="Profile directory of the server.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(help='File for the table, as a "planner" section of engine.json.'),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time passes as the server does at its first start, and compute the best draft lengths.

    The acceptance rate is measured with a few prompts. From both follow the tokens per second of
    every draft length at every batch size. Takes about a minute; run it on an idle machine. A
    server with the same settings reads the stored pass times at its start.
    """
    try:
        check_pair(model, draft)
        texts = None if input_file is None else read_prompts(input_file)
    except (PairError, PromptFileError) as error:
        fail(str(error), USAGE_ERROR)
    check_outputs(table=table, json=json_file)
    settings = {
        "dtype": dtype,
        "device": device,
        "num_threads": num_threads,
        "runtime": runtime,
        "profile_cache": str((profile_cache or paths.profile_cache()).resolve()),
    }
    limits = {
        "max_sequences": rows,
        "max_draft_len": max_draft_len,
        "max_context_len": max_context_len,
        "max_queue": max(prompts, 1),
        "profile_s": seconds,
    }
    config = checked_config({"engine": torch_settings(model, draft, **settings), "limits": limits})
    own = texts or list(islice(generated(MIXED, PROMPT_SEED), prompts))
    engine, accept_prob = _measured(config, [one.text for one in own[:prompts]], temperature)
    sizes = batch_sizes(rows)
    speeds = {size: speeds_of(engine.cost, accept_prob, size, max_draft_len) for size in sizes}
    best = [row.index(max(row)) for row in speeds.values()]
    section = BatchTableConfig.model_validate({"rows": sizes, "draft_lens": best})
    document = {
        "model": model.name,
        "draft": draft.name,
        "kernels": engine.kernels,
        "accept_prob": accept_prob,
        "tokens_per_s": {str(size): row for size, row in speeds.items()},
        "batch_table": section.model_dump(mode="json"),
    }
    shown_at = result_console(json_file)
    shown_at.print(f"target; draft: {engine.kernels}", highlight=False)
    shown_at.print(_table(speeds, accept_prob))
    write_json(json_file, document)
    planner = {"planner": {"batch_table": document["batch_table"]}}
    write_output("table", table, json.dumps(planner, indent=1) + "\n")


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, .. and `most`."""
    powers = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return [*powers, most]


def speeds_of(
    cost: CostModel, accept_prob: float, batch_size: int, max_draft_len: int
) -> list[float]:
    """Tokens per second of a batch by draft length from 0, by the cost model."""
    from smartspec_py.core.plan.planner import evaluate
    from smartspec_py.core.types import DraftOption, SequenceView

    option = DraftOption(max_draft_len, (accept_prob,) * max_draft_len)
    views = [
        SequenceView(
            sequence=number,
            context_len=cost.target.context_len,
            remaining=max_draft_len + 1,
            policy="goodput",
            options=(option,),
        )
        for number in range(batch_size)
    ]
    lengths = range(max_draft_len + 1)
    return [evaluate(views, [length] * batch_size, cost).goodput for length in lengths]


def _measured(
    config: ServerConfig, texts: Sequence[str], temperature: float
) -> tuple[Engine, float]:
    """The engine, and the probability that a draft is accepted if those before it were."""
    from smartspec_py.serving.build import build_engine
    from smartspec_py.serving.request import GenerateParams, RequestError
    from smartspec_py.serving.server import Server
    from smartspec_testing.local import generate

    console = Console(stderr=True)
    try:
        with _shown(console):
            engine = build_engine(config, Path.cwd())
    except ConfigError as error:
        fail(str(error), USAGE_ERROR)
    policy = f"fixed:{min(DRAFT_LEN, config.limits.max_draft_len)}"
    requests = [
        GenerateParams(
            text=text,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            policy=policy,
            proposer=DRAFT_MODEL,
        )
        for text in texts
    ]
    server = Server(engine, config)
    server.start()
    try:
        with Progress("measuring the acceptance rate", console=console):
            sinks = generate(server, requests)
    except RequestError as error:
        fail(f"a prompt cannot be served: {error}")
    except KeyboardInterrupt:
        fail("interrupted", 130)
    finally:
        server.stop()
    failed = [sink.error[1] for sink in sinks if sink.error is not None]
    if failed:
        fail(f"a prompt cannot be served: {failed[0]}")
    num_drafted, num_accepted, num_rejected = 0, 0, 0
    for record in server.loop.records:
        for event in record.events:
            num_drafted += event.num_drafted
            num_accepted += event.num_accepted
            num_rejected += event.num_accepted < event.num_drafted
    if not num_drafted:
        fail("no token was drafted: the texts are too short")
    return engine, num_accepted / (num_accepted + num_rejected)


@contextmanager
def _shown(console: Console) -> Iterator[None]:
    """Show the profile's log messages as progress. Print the last one, which names the file."""
    logger = logging.getLogger("smartspec_py.engines.profile")
    messages: list[str] = []
    level = logger.level
    with Progress("loading the models", console=console) as shown:
        handler = logging.Handler()

        def emit(record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            shown.update(messages[-1])

        handler.emit = emit  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    for message in messages[-1:]:
        console.print(message, highlight=False, soft_wrap=True)


def _table(speeds: dict[int, list[float]], accept_prob: float) -> Table:
    """One row per batch size, with the fastest draft length in bold."""
    title = f"tokens/s by draft length, at an acceptance rate of {accept_prob:.2f}"
    shown = Table(title=title, padding=0, caption="computed from the measured pass times")
    for column in ("rows", *map(str, range(len(next(iter(speeds.values())))))):
        shown.add_column(column, justify="right", no_wrap=True)
    for size, row in speeds.items():
        cells: list[Any] = [f"{speed:.0f}" for speed in row]
        best = row.index(max(row))
        cells[best] = f"[bold]{cells[best]}[/bold]"
        shown.add_row(str(size), *cells)
    return shown
