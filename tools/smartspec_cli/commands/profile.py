"""`smartspec profile`: measures pass times and acceptance, and shows the best draft lengths."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench.progress import Progress
from smartspec_bench.prompts import MIXED, chat_template, generated, read_prompts
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    table,
    write_json,
    write_output,
)
from smartspec_cli.commands.settings import (
    Changes,
    Config,
    Draft,
    InputFile,
    Model,
    Temperature,
    engine_of,
    parsed,
    server_config,
)
from smartspec_launch.gateway import tokenizer_dir
from smartspec_py.config import ServerConfig
from smartspec_py.constants import DRAFT_MODEL

if TYPE_CHECKING:
    from smartspec_py.core.cost import CostModel
    from smartspec_py.engines.engine import Engine

DRAFT_LEN = 3
"""With which the acceptance rate is measured."""

MAX_TOKENS = 48
PROFILE_LOGS = [
    logging.getLogger(f"smartspec_py.engines.{name}") for name in ("measure", "profile")
]


def profile(
    model: Model = None,
    draft: Draft = None,
    config: Config = None,
    settings: Changes = None,
    input_file: InputFile = None,
    prompts: Annotated[
        int, typer.Option(help="Prompts for measuring the acceptance rate.", min=1)
    ] = 8,
    temperature: Temperature = 0.0,
    table_file: Annotated[
        Path | None,
        typer.Option("--table", help='File for the table, as a "planner" section of engine.json.'),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time passes as the server does at its first start, and compute the best draft lengths.

    The acceptance rate is measured with a few prompts. From both follow the tokens per second of
    every draft length at every batch size. Takes a minute or two; run it on an idle machine. Use
    the options of the server, which then reads the stored pass times at its start.
    """
    has_draft = draft or config or any("draft=" in one for one in settings or ())
    if model is not None and not has_draft:
        fail("--draft must be given: only drafts of a draft model are measured", USAGE_ERROR)
    own = [] if input_file is None else parsed("input", read_prompts, input_file)
    check_outputs(table=table_file, json=json_file)
    checked = server_config(model, draft, None, config, settings)
    template = parsed("model", chat_template, tokenizer_dir(checked))
    used = own or list(islice(generated(MIXED, template=template), prompts))
    engine, accept_prob = _measured(checked, [one.text for one in used[:prompts]], temperature)
    limits = checked.limits
    sizes = batch_sizes(limits.max_sequences)
    speeds = {
        size: speeds_of(engine.cost, accept_prob, size, limits.max_draft_len) for size in sizes
    }
    best = [row.index(max(row)) for row in speeds.values()]
    document = {
        "kernels": engine.kernels,
        "accept_prob": accept_prob,
        "tokens_per_s": {str(size): row for size, row in speeds.items()},
        "batch_table": {"rows": sizes, "draft_lens": best},
    }
    shown_at = result_console(json_file)
    shown_at.print(f"target; draft: {engine.kernels}", highlight=False)
    shown_at.print(_table(speeds, accept_prob))
    write_json(json_file, document)
    planner = {"planner": {"batch_table": document["batch_table"]}}
    write_output("table", table_file, json.dumps(planner, indent=1) + "\n")


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
    same = replace(cost, shape_change_s=0.0)  # a length that stays the same prepares nothing
    return [evaluate(views, [length] * batch_size, same).goodput for length in lengths]


def _measured(
    config: ServerConfig, texts: Sequence[str], temperature: float
) -> tuple[Engine, float]:
    """The engine, and the probability that a draft is accepted if those before it were."""
    from smartspec_py.api.inputs import GenerateParams
    from smartspec_py.serving.request import RequestError
    from smartspec_testing.local import generate, serving

    policy = f"fixed:{min(DRAFT_LEN, config.limits.max_draft_len)}"
    requests = [
        GenerateParams(
            text, MAX_TOKENS, temperature=temperature, policy=policy, proposer=DRAFT_MODEL
        )
        for text in texts
    ]
    console = Console(stderr=True)
    with Progress("loading the models", console) as shown:
        messages = [""]

        def note(record: logging.LogRecord) -> bool:
            messages.append(record.getMessage())
            shown.update(messages[-1])
            return True

        for log in PROFILE_LOGS:
            log.setLevel(logging.INFO)
            log.addFilter(note)
        try:
            engine = engine_of(config)
        finally:
            for log in PROFILE_LOGS:
                log.removeFilter(note)
        # The last message names the file.
        console.print(messages[-1], highlight=False, soft_wrap=True)
        shown.update("measuring the acceptance rate")
        with serving(engine, config) as server:
            try:
                sinks = generate(server, requests)
            except RequestError as error:
                fail(f"a prompt cannot be served: {error}")
    if failed := [sink.error[1] for sink in sinks if sink.error is not None]:
        fail(f"a prompt cannot be served: {failed[0]}")
    events = [event for record in server.loop.records for event in record.events]
    if not any(event.num_drafted for event in events):
        fail("no token was drafted: the texts are too short")
    num_accepted = sum(event.num_accepted for event in events)
    num_rejected = sum(event.num_accepted < event.num_drafted for event in events)
    return engine, num_accepted / (num_accepted + num_rejected)


def _table(speeds: dict[int, list[float]], accept_prob: float) -> Table:
    """One row per batch size, with the fastest draft length in bold."""
    rows = []
    for size, found in speeds.items():
        cells = [f"[bold]{one:.0f}[/bold]" if one == max(found) else f"{one:.0f}" for one in found]
        rows.append((str(size), *cells))
    title = f"tokens/s by draft length, at an acceptance rate of {accept_prob:.2f}"
    columns = ("rows", *map(str, range(len(rows[0]) - 1)))
    return table(title, columns, rows, "computed from the measured pass times")
