"""`scripts/quickstart`: streams four answers from Triton, with and without speculation.

The shipped pair is tiny, so it is expanded first. The expanded pair has the same answers and the
same acceptance rate, at the cost of larger models. Runs with and without speculation alternate on
one live server.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from smartspec_bench.progress import Progress
from smartspec_bench.streams import COUNTS, Exchange, GrpcStreams, HttpStreams, StreamError, ask
from smartspec_bench.workloads import WORKLOADS, generate
from smartspec_cli.commands import (
    JsonFile,
    check_outputs,
    fail,
    result_console,
    table,
    write_json,
)
from smartspec_cli.commands.settings import policies_of, server_config
from smartspec_launch.address import can_bind, free_address
from smartspec_launch.files import InstallationError
from smartspec_launch.foreground import announce, signals_interrupt, wait_with_progress, watch
from smartspec_launch.gateway import OPENAI_PORT, OpenAi
from smartspec_launch.interpreter import InterpreterError
from smartspec_launch.triton_server import TritonServer, TritonServerError
from smartspec_py.config import DEFAULT_CONTEXT_LEN
from smartspec_py.engines.profile import machine_name

REPOSITORY = Path(__file__).resolve().parents[3]
CACHE = REPOSITORY / ".smartspec"
SHIPPED_PAIR = REPOSITORY / "engines_build" / "tiny"
PRESETS = {"target": "88m", "draft": "4m"}
NO_SPECULATION = "none"
NUM_RUNS = 3
MAX_TOKENS = 64
SEED = 2024
HELD_OUT_STREAM = 1_000_003
"""Seed of the shown documents. It is far from the seeds of the training data."""

NEXT = (
    "Next: scripts/quickstart --keep leaves the server running, with a page to chat with it. "
    "docs/start/your-own-pair.md shows how to serve your own models."
)


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


def summarise(
    workload: str, transport: str, speculated: Sequence[Exchange], plain: Sequence[Exchange]
) -> Row:
    """Medians over the runs; lengths are over all of their steps."""
    rate_with = statistics.median(_tokens_per_s(answer) for answer in speculated)
    rate_without = statistics.median(_tokens_per_s(answer) for answer in plain)
    num_steps, num_drafted, num_accepted = (
        sum(answer.last[name] for answer in speculated) for name in COUNTS
    )
    num_steps = num_steps or 1
    return Row(
        workload=workload,
        transport=transport,
        num_tokens=speculated[0].num_tokens,
        tokens_per_s_without=rate_without,
        tokens_per_s_with=rate_with,
        speed_up=rate_with / rate_without,
        mean_draft_len=num_drafted / num_steps,
        mean_acceptance_len=1.0 + num_accepted / num_steps,
        is_same_text=len({answer.text for answer in (*speculated, *plain)}) == 1,
    )


def _tokens_per_s(answer: Exchange) -> float:
    timing = answer.timing
    return answer.num_tokens / timing.e2e_s(timing.sent_s)


def quickstart(
    policy: Annotated[
        str, typer.Option(help="Compared with none: goodput or fixed:K.")
    ] = "goodput",
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    keep: Annotated[bool, typer.Option(help="Leave the server running until Ctrl-C.")] = False,
    json_file: JsonFile = None,
    num_threads: Annotated[
        int, typer.Option(help="Compute threads; 0 uses one less than the number of cores.")
    ] = 0,
    dtype: Annotated[
        str, typer.Option(help="Precision of both models: float32 or bfloat16.")
    ] = "float32",
) -> None:
    """Stream four answers from Triton and compare the speed with and without speculation."""
    check_outputs(json=json_file)
    policies_of(policy, "policy")
    console = result_console(json_file)
    pair = expanded_pair(console)
    cache = str(CACHE / "profiles")
    engine = {"num_threads": num_threads, "dtype": dtype, "profile_cache": cache}
    limits = {"max_context_len": DEFAULT_CONTEXT_LEN}
    models = (pair / "target", pair / "draft", None, None, None)
    config = server_config(*models, engine=engine, limits=limits)
    address = free_address()
    openai = _openai(address.host) if keep else None
    server = TritonServer(config, CACHE / f"run-{address.http_port}", address, openai=openai)
    try:
        with signals_interrupt(), server:
            wait_with_progress(server, console)
            rows = asyncio.run(compare(server, policy, temperature, console))
            console.print()
            console.print(as_table(rows, policy))
            differing = [row.workload for row in rows if not row.is_same_text]
            console.print(
                f"The text differs with speculation: {', '.join(differing)}."
                if differing
                else f"All {2 * NUM_RUNS} texts of each prompt are the same, with and without "
                f"speculation (temperature {temperature:g}, seed {SEED})."
            )
            document = {
                "policy": policy,
                "temperature": temperature,
                "rows": [asdict(row) for row in rows],
                "machine": machine_name(),
            }
            write_json(json_file, document)
            if keep:
                keep_serving(server)
            else:
                console.print(NEXT, highlight=False)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except (StreamError, InterpreterError, InstallationError, TritonServerError) as error:
        fail(str(error))
    if differing:
        fail("a text with speculation differs from the text without")


def expanded_pair(console: Console) -> Path:
    """The folder with the expanded target and draft, built once for given sources and sizes."""
    from smartspec_bench import expand

    sizes = {role: preset.upper() for role, preset in PRESETS.items()}
    console.print(
        f"The shipped pair is tiny. It is expanded, the target to {sizes['target']} parameters "
        f"and the draft to {sizes['draft']}. Answers and acceptance rate stay the same, and the "
        "cost is that of models of this size."
    )
    digest = hashlib.sha256(Path(expand.__file__).read_bytes())
    for role, preset in PRESETS.items():
        digest.update(preset.encode())
        for path in sorted((SHIPPED_PAIR / role).iterdir()):
            digest.update(path.read_bytes())
    pair = CACHE / f"pair-{digest.hexdigest()[:12]}"
    if not pair.is_dir():
        with Progress("expanding the pair"):
            for older in CACHE.glob("pair-*"):
                shutil.rmtree(older)
            part = pair.with_suffix(".part")
            for role, preset in PRESETS.items():
                expand.expand(SHIPPED_PAIR / role, part / role, expand.PRESETS[preset])
            part.rename(pair)
    return pair


def _openai(host: str) -> OpenAi:
    port = OPENAI_PORT if can_bind(host, OPENAI_PORT) else free_address().http_port
    return OpenAi(port, SHIPPED_PAIR / "target")


async def compare(
    server: TritonServer, policy: str, temperature: float, console: Console
) -> list[Row]:
    """Stream one prompt of each workload, the first two over HTTP and the others over gRPC.

    Runs with and without speculation alternate. The first run is printed as it streams.
    """

    def show(response: Mapping[str, Any]) -> None:
        text = response["text_output"]
        console.print(text, style="bold", end="", markup=False, highlight=False, soft_wrap=True)

    fields = {
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "temperature": temperature,
        "seed": SEED,
        "reuse_prefix": False,
    }
    speculating = {**fields, "speculation_policy": policy}
    plain = {**fields, "speculation_policy": NO_SPECULATION}
    rows = []
    address = server.address
    async with HttpStreams(address.http_url) as http, GrpcStreams(address.grpc_url) as grpc:
        with Progress("warming up"):
            for each in (http, grpc):
                for more in (speculating, plain):
                    await ask(each, {**more, "text_input": "Warm-up", "max_tokens": 8})
        transports: Sequence[HttpStreams | GrpcStreams] = (http, http, grpc, grpc)
        for workload, transport in zip(WORKLOADS, transports, strict=True):
            prompt = {"text_input": generate(workload, HELD_OUT_STREAM, 0).prompt}
            console.rule(f"{workload} over {transport.name}", align="left")
            text = prompt["text_input"]
            console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True, end="")
            with_it, without = [await ask(transport, speculating | prompt, show)], list[Exchange]()
            console.print()
            with Progress("measuring with and without speculation"):
                for number in range(NUM_RUNS):
                    if number:
                        with_it.append(await ask(transport, speculating | prompt))
                    without.append(await ask(transport, plain | prompt))
            row = summarise(workload, transport.name, with_it, without)
            console.print(
                f"[dim]{row.tokens_per_s_with:.1f} tokens/s, {row.speed_up:.2f} times the speed "
                "without speculation[/dim]",
                highlight=False,
            )
            rows.append(row)
    return rows


def as_table(rows: Sequence[Row], policy: str) -> Table:
    columns = (
        "workload",
        "transport",
        "tokens",
        "tokens/s\nwithout",
        "tokens/s\nwith",
        "speed-up",
        "drafted\nper\nstep",
        "tokens\nper\nstep",
    )
    cells = (
        (
            row.workload,
            row.transport,
            str(row.num_tokens),
            f"{row.tokens_per_s_without:.1f}",
            f"{row.tokens_per_s_with:.1f}",
            f"{row.speed_up:.2f}",
            f"{row.mean_draft_len:.2f}",
            f"{row.mean_acceptance_len:.2f}",
        )
        for row in rows
    )
    title = f"One request at a time, policy {policy} compared with none"
    caption = f"median of {NUM_RUNS} runs, prefill included"
    return table(title, columns, cells, caption, num_texts=2)


def keep_serving(server: TritonServer) -> None:
    """Serve until Ctrl-C. Prints to stderr, so that the JSON is the last line of stdout."""
    console = Console(stderr=True)
    announce(server, console, generate("qa", HELD_OUT_STREAM, 0).prompt)
    try:
        if watch(server, console):
            raise TritonServerError("the server ended")
    except KeyboardInterrupt:
        console.print("Stopping.")


if __name__ == "__main__":
    typer.run(quickstart)
