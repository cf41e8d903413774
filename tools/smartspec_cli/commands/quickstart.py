"""`scripts/quickstart`: streams four answers from Triton, with and without speculation.

It serves SmolLM2-135M-Instruct, or the tiny pair of this repository if the model cannot be
downloaded. Runs with and without speculation alternate on one live server.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench import texts
from smartspec_bench.progress import Progress
from smartspec_bench.prompts import chat_template
from smartspec_bench.real_model import FILE, HEAD, REPOSITORY, download
from smartspec_bench.streams import COUNTS, Exchange, GrpcStreams, HttpStreams, StreamError, ask
from smartspec_cli.commands import (
    JsonFile,
    check_outputs,
    fail,
    result_console,
    table,
    write_json,
)
from smartspec_cli.commands.settings import Changes, Temperature, policies_of, server_config
from smartspec_launch.address import can_bind, free_address
from smartspec_launch.foreground import announce, signals_interrupt, wait_with_progress, watch
from smartspec_launch.gateway import OPENAI_PORT, OpenAi
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.triton_server import TritonServer, TritonServerError
from smartspec_py.engines.checkpoints.gguf.folder import model_folder
from smartspec_py.engines.profile import machine_name

CACHE = REPOSITORY / ".smartspec"
TINY_PAIR = REPOSITORY / "engines_build" / "tiny"
MAX_SEQUENCES = 8
NO_SPECULATION = "none"
NUM_RUNS = 3
MAX_TOKENS = 96
SEED = 2024
NEXT = (
    "Next: scripts/quickstart --keep leaves the server running, with a page to chat with it. "
    "docs/start/your-own-pair.md shows how to serve your own models."
)


@dataclass(frozen=True)
class Shown:
    """What is served. prompts: by workload."""

    target: Path
    draft: Path | None
    heads: Path | None
    prompts: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """A workload's line in the table. Lengths are per decoding step with speculation: drafted
    tokens, and gained tokens (accepted drafts plus one). The step of the prompt, which generates
    the first token, is not counted."""

    workload: str
    transport: str
    num_tokens: int
    tokens_per_s_without: float
    tokens_per_s_with: float
    speed_up: float
    mean_draft_len: float
    mean_acceptance_len: float
    is_same_text: bool


COLUMNS = {
    "workload": "{0.workload}",
    "transport": "{0.transport}",
    "tokens": "{0.num_tokens}",
    "tokens/s\nwithout": "{0.tokens_per_s_without:.1f}",
    "tokens/s\nwith": "{0.tokens_per_s_with:.1f}",
    "speed-up": "{0.speed_up:.2f}",
    "drafted\nper\nstep": "{0.mean_draft_len:.2f}",
    "tokens\nper\nstep": "{0.mean_acceptance_len:.2f}",
}
"""Of the table: headings, and formats of a `Row`."""


def summarise(
    workload: str, transport: str, speculated: Sequence[Exchange], plain: Sequence[Exchange]
) -> Row:
    """Medians over the runs; lengths are over all of their steps."""
    without, with_it = (
        statistics.median(one.num_tokens / one.timing.e2e_s for one in answers)
        for answers in (plain, speculated)
    )
    num_steps, num_drafted, num_accepted = (
        sum(answer.last[name] for answer in speculated) for name in COUNTS
    )
    return Row(
        workload,
        transport,
        num_tokens=speculated[0].num_tokens,
        tokens_per_s_without=without,
        tokens_per_s_with=with_it,
        speed_up=with_it / without,
        mean_draft_len=num_drafted / max(1, num_steps),
        mean_acceptance_len=1.0 + num_accepted / max(1, num_steps),
        is_same_text=len({answer.text for answer in (*speculated, *plain)}) == 1,
    )


def quickstart(
    policy: Annotated[
        str, typer.Option(help="Compared with none: goodput or fixed:K.")
    ] = "goodput",
    temperature: Temperature = 0.0,
    keep: Annotated[bool, typer.Option(help="Leave the server running until Ctrl-C.")] = False,
    settings: Changes = None,
    json_file: JsonFile = None,
) -> None:
    """Stream four answers from Triton and compare the speed with and without speculation."""
    check_outputs(json=json_file)
    policies_of(policy, "policy")
    console = result_console(json_file)
    shown = real_model(console) or tiny_pair()
    models = (shown.target, shown.draft, shown.heads, None, settings)
    engine = {"profile_cache": str(CACHE / "profiles")}
    config = server_config(*models, engine=engine, limits={"max_sequences": MAX_SEQUENCES})
    address = free_address()
    openai = None
    if keep:
        port = OPENAI_PORT if can_bind(address.host, OPENAI_PORT) else free_address().http_port
        openai = OpenAi(port, model_folder(shown.target), names=config.served_model_name)
    server = TritonServer(config, CACHE / f"run-{address.http_port}", address, openai=openai)
    try:
        with signals_interrupt(), server:
            wait_with_progress(server, console)
            rows = asyncio.run(compare(server, shown.prompts, policy, temperature, console))
            differing = [row.workload for row in rows if not row.is_same_text]
            console.print("", as_table(rows, policy))
            console.print(
                f"The text differs with speculation: {', '.join(differing)}."
                if differing
                else f"All {2 * NUM_RUNS} texts of each prompt are the same, with and without "
                f"speculation (temperature {temperature:g}, seed {SEED})."
            )
            about = {"policy": policy, "temperature": temperature, "machine": machine_name()}
            write_json(json_file, about | {"rows": [asdict(row) for row in rows]})
            if keep:
                keep_serving(server, shown.prompts["qa"])
            else:
                console.print(NEXT, highlight=False)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except (StreamError, LaunchError) as error:
        fail(str(error))
    if differing:
        fail("a text with speculation differs from the text without")


def real_model(console: Console) -> Shown | None:
    """SmolLM2-135M-Instruct, downloaded once; None if that fails."""
    if not FILE.is_file():
        with Progress("downloading SmolLM2-135M-Instruct, 93 MB"):
            reason = download()
        if reason:
            console.print(
                f"SmolLM2-135M-Instruct cannot be downloaded ({reason}). The tiny pair of this "
                "repository is served instead."
            )
            return None
    console.print(
        "Serving SmolLM2-135M-Instruct (Apache-2.0). Drafts come from an EAGLE-3 head, or are "
        "copied from earlier text."
    )
    template = chat_template(FILE)
    prompts = {one: template(texts.prompt(one, 0)) for one in texts.WORKLOADS}
    return Shown(FILE, None, HEAD, prompts)


def tiny_pair() -> Shown:
    prompts = {name: texts.prompt(name, 0) for name in texts.TINY}
    return Shown(TINY_PAIR / "target", TINY_PAIR / "draft", None, prompts)


async def compare(
    server: TritonServer,
    prompts: Mapping[str, str],
    policy: str,
    temperature: float,
    console: Console,
) -> list[Row]:
    """Stream each prompt, the first two over HTTP and the others over gRPC.

    Runs with and without speculation alternate. The first run is printed as it streams.
    """
    fields = {
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "temperature": temperature,
        "seed": SEED,
        "reuse_prefix": False,
    }
    speculating = {**fields, "speculation_policy": policy}
    plain = {**fields, "speculation_policy": NO_SPECULATION}

    def show(text: str, style: str) -> None:
        console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)

    def show_answer(response: Mapping[str, Any]) -> None:
        show(response["text_output"], "bold")

    rows = []
    address = server.address
    async with HttpStreams(address.http_url) as http, GrpcStreams(address.grpc_url) as grpc:
        with Progress("warming up"):
            for each in (http, grpc):
                for more in (speculating, plain):
                    await ask(each, {**more, "text_input": "Warm-up", "max_tokens": 8})
        transports: Sequence[HttpStreams | GrpcStreams] = (http, http, grpc, grpc)
        for (workload, text), transport in zip(prompts.items(), transports, strict=True):
            prompt = {"text_input": text}
            console.rule(f"{workload} over {transport.name}", align="left")
            show(prompt["text_input"], "dim")
            with_it = [await ask(transport, speculating | prompt, show_answer)]
            console.print()
            with Progress("measuring with and without speculation"):
                without = [await ask(transport, plain | prompt)]
                for _ in range(NUM_RUNS - 1):
                    with_it.append(await ask(transport, speculating | prompt))
                    without.append(await ask(transport, plain | prompt))
            row = summarise(workload, transport.name, with_it, without)
            show(
                f"{row.tokens_per_s_with:.1f} tokens/s, {row.speed_up:.2f} times the speed "
                "without speculation\n",
                "dim",
            )
            rows.append(row)
    return rows


def as_table(rows: Sequence[Row], policy: str) -> Table:
    cells = ([value.format(row) for value in COLUMNS.values()] for row in rows)
    title = f"One request at a time, policy {policy} compared with none"
    caption = f"median of {NUM_RUNS} runs, prefill included"
    return table(title, list(COLUMNS), cells, caption, num_texts=2)


def keep_serving(server: TritonServer, prompt: str) -> None:
    """Serve until Ctrl-C. Prints to stderr, so that the JSON is the last line of stdout."""
    console = Console(stderr=True)
    announce(server, console, prompt)
    try:
        if watch(server, console):
            raise TritonServerError("the server ended")
    except KeyboardInterrupt:
        console.print("Stopping.")


if __name__ == "__main__":
    typer.run(quickstart)
