"""`smartspec profile`: measures pass times and the best draft length for each batch size."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench.progress import Progress
from smartspec_bench.prompts import (
    MIXED,
    Prompt,
    PromptFileError,
    generated,
    read_prompts,
    repeated,
)
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
from smartspec_py.engines.torch.pair import PairError, check_pair
from smartspec_py.serving.config import (
    LEAST_CHUNK,
    BatchTableConfig,
    ConfigError,
    LimitsConfig,
    ServerConfig,
)

if TYPE_CHECKING:
    from smartspec_bench.grid_search import Found, SearchPlan
    from smartspec_bench.power_law import PowerLaw
    from smartspec_py.core.cost import CostModel
    from smartspec_py.serving.server import Engine

PROMPT_SEED = 7_000_003
"""Seed of the prompts. It is far from the seeds of the shipped pair's training data."""

MAX_DRAFT_LEN = 16
"""More columns do not fit in a terminal, and a larger grid takes too long."""

LOUD = 0.1
"""Spread of the rounds above which neighbouring draft lengths cannot be distinguished."""

_LIMITS = LimitsConfig()


@dataclass(frozen=True)
class Size:
    """The results of one batch size. tokens_per_s, step_s: by draft length from 0.

    The best draft length has three sources. grid_search: measured. cost_model: computed from the
    profile and one acceptance rate. power_law: the closed form, not rounded and never 0; None if it
    could not be fitted. step_line: the fitted seconds of a step that this law uses.
    """

    batch_size: int
    tokens_per_s: list[float]
    step_s: list[float]
    grid_search: int
    cost_model: int
    power_law: float | None
    step_line: dict[str, float] | None


def profile(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of the target model.")],
    draft: Annotated[Path, typer.Option(help="Hugging Face directory of the draft model.")],
    rows: Annotated[
        int,
        typer.Option(help="Largest batch size; use the server's --max-sequences.", min=1, max=1024),
    ] = _LIMITS.max_sequences,
    max_draft_len: Annotated[
        int, typer.Option(help="Largest draft length; use the server's.", min=1, max=MAX_DRAFT_LEN)
    ] = _LIMITS.max_draft_len,
    max_context_len: Annotated[
        int | None, typer.Option(help="Context length; use the server's.")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", help='Own prompts: one {"prompt": ".."} per line, or ShareGPT.'),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts for each batch size, at least.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.", min=2)] = 48,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)
    ] = 0.0,
    rounds: Annotated[
        int, typer.Option(help="Number of repeats; the result is the median.", min=1)
    ] = 3,
    max_seconds: Annotated[
        float,
        typer.Option(
            help="Time limit: no round begins that would end later. One round always runs.", min=0
        ),
    ] = 300.0,
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
    """Time passes as the server does at its first start, and search the best draft lengths.

    For each batch size it runs every draft length on the engine and shows the fastest. It also
    shows the choices of the cost model and of Su et al.'s power law. Run it on an idle machine.
    """
    try:
        check_pair(model, draft)
        texts = _texts(input_file)
    except (PairError, PromptFileError) as error:
        fail(str(error), USAGE_ERROR)
    check_outputs(table=table, json=json_file)
    # The prefill step, a step in which the draft model reads the prompt, and a measured step.
    least = 1 + 2 * (max_draft_len + 1)
    if max_tokens < least:
        drafts = f"a draft length of {max_draft_len}"
        fail(f"--max-tokens: got {max_tokens}, must be at least {least} for {drafts}", USAGE_ERROR)
    from smartspec_bench.grid_search import SearchPlan, batch_sizes

    cache = (profile_cache or paths.profile_cache()).resolve()
    settings = {
        "dtype": dtype,
        "device": device,
        "num_threads": num_threads,
        "runtime": runtime,
    }
    config = checked_config(
        {
            "engine": torch_settings(model, draft, profile_cache=str(cache), **settings),
            "limits": {
                "max_sequences": rows,
                "max_draft_len": max_draft_len,
                "max_context_len": max_context_len,
                "max_queue": rows,
                # One step must have room for the last prompt token of every sequence in a batch.
                "prefill_chunk": rows if rows > LEAST_CHUNK else None,
            },
        }
    )
    plan = SearchPlan(
        batch_sizes(rows), max_draft_len, prompts, max_tokens, temperature, rounds, max_seconds
    )
    console = Console(stderr=True)
    engine, found = _run(config, plan, texts, console)
    about = {"model": model.name, "draft": draft.name, **settings, "kernels": engine.kernels}
    document = _document(engine.cost, found, about)
    section = json.dumps(_section(document), indent=1)
    shown_at = result_console(json_file)
    shown_at.print(f"target; draft: {engine.kernels}", highlight=False)
    shown_at.print(_table(document["sizes"], found.accept_prob))
    if found.spread > LOUD:
        shown_at.print(
            f"The machine was busy: rounds differ by {found.spread:.0%}. Repeat on an idle machine."
        )
    write_json(json_file, document)
    write_output("table", table, section + "\n")


def _texts(input_file: Path | None) -> Callable[[], Iterator[Prompt]]:
    """A function that returns the same prompts at each call. Raises PromptFileError."""
    if input_file is None:
        return lambda: generated(MIXED, PROMPT_SEED)
    own = read_prompts(input_file)
    return lambda: repeated(own)


def _run(
    config: ServerConfig,
    plan: SearchPlan,
    texts: Callable[[], Iterator[Prompt]],
    console: Console,
) -> tuple[Engine, Found]:
    from smartspec_bench.grid_search import GridSearchError, search
    from smartspec_py.serving.server import Server

    engine = _built(config, console)
    server = Server(engine, config)
    server.start()
    total = plan.num_rounds * plan.num_runs
    try:
        with Progress("first batch", total, "runs", console=console) as shown:
            return engine, search(server, plan, texts, shown.advance)
    except GridSearchError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", 130)
    finally:
        server.stop()


def _built(config: ServerConfig, console: Console) -> Engine:
    from smartspec_py.serving.build import build_engine

    with _told(console):
        try:
            return build_engine(config, Path.cwd())
        except ConfigError as error:
            fail(str(error), USAGE_ERROR)


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """Show the profile's log messages as progress. Print the last one, which names the file."""
    logger = logging.getLogger("smartspec_py.serving.profile")
    said: list[str] = []
    level = logger.level
    with Progress("loading the models", console=console) as shown:
        handler = logging.Handler()

        def emit(record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            shown.update(said[-1])

        handler.emit = emit  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    for message in said[-1:]:
        console.print(message, highlight=False, soft_wrap=True)


def _document(cost: CostModel, found: Found, about: Mapping[str, object]) -> dict[str, Any]:
    from smartspec_bench.power_law import fitted_power_law
    from smartspec_py.core.plan.planner import batch_table_of
    from smartspec_py.serving.profile import machine_name

    law = fitted_power_law(found.mean_accepted())
    by_cost = batch_table_of(
        cost, found.accept_prob, found.sizes, found.max_draft_len, found.context_len
    )
    sizes = [_size(found, size, by_cost.draft_len(size), law) for size in found.sizes]
    return {
        "machine": machine_name(),
        **about,
        "num_rounds": found.num_rounds,
        "spread": found.spread,
        "accept_prob": found.accept_prob,
        "context_len": found.context_len,
        "mean_accepted": found.mean_accepted(),
        "power_law": None if law is None else asdict(law),
        "sizes": [asdict(size) for size in sizes],
        "batch_table": {
            "rows": list(found.sizes),
            "draft_lens": [size.grid_search for size in sizes],
        },
    }


def _size(found: Found, batch_size: int, by_cost: int, law: PowerLaw | None) -> Size:
    from smartspec_bench.power_law import fitted_line, law_draft_len

    step_s = found.step_s(batch_size)
    line = fitted_line(step_s[1:])
    return Size(
        batch_size=batch_size,
        tokens_per_s=found.tokens_per_s(batch_size),
        step_s=step_s,
        grid_search=found.best_draft_len(batch_size),
        cost_model=by_cost,
        power_law=law_draft_len(law, line),
        step_line=None if line is None else asdict(line),
    )


def _section(document: Mapping[str, Any]) -> dict[str, Any]:
    """The `planner` section for engine.json, checked like the section of a real file."""
    table = BatchTableConfig.model_validate(document["batch_table"])
    return {"planner": {"batch_table": table.model_dump(mode="json")}}


def _table(sizes: Sequence[Mapping[str, Any]], accept_prob: float) -> Table:
    """One row per batch size, with the fastest draft length in bold."""
    title = f"tokens/s by draft length, at an acceptance rate of {accept_prob:.2f}"
    shown = Table(title=title, padding=0)
    draft_lens = range(len(sizes[0]["tokens_per_s"]))
    for column in ("rows", *map(str, draft_lens), "grid", "cost", "law"):
        shown.add_column(column, justify="right", no_wrap=True)
    for size in sizes:
        law = size["power_law"]
        speeds = [f"{speed:.0f}" for speed in size["tokens_per_s"]]
        speeds[size["grid_search"]] = f"[bold]{speeds[size['grid_search']]}[/bold]"
        by_law = "" if law is None else f"{law:.1f}" if law <= draft_lens[-1] else "more"
        best = (str(size["grid_search"]), str(size["cost_model"]), by_law)
        shown.add_row(str(size["batch_size"]), *speeds, *best)
    shown.caption = "best draft length by grid search, cost model, power law (which is never 0)"
    return shown
