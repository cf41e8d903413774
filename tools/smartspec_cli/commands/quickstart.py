"""`scripts/quickstart`: streams four answers from Triton, with and without speculation.

It serves the models of the options; SmolLM2-135M-Instruct by default, or the tiny pair of this
repository if that cannot be downloaded. Runs with and without speculation alternate on one live
server.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smartspec_bench import texts
from smartspec_bench.progress import Progress
from smartspec_bench.prompts import chat_template
from smartspec_bench.real_model import FILE, HEAD, REPOSITORY, download
from smartspec_bench.streams import StreamError
from smartspec_cli.commands import (
    USAGE_ERROR,
    JsonFile,
    check_outputs,
    fail,
    result_console,
    write_json,
)
from smartspec_cli.commands.settings import (
    Changes,
    Draft,
    Heads,
    Model,
    Temperature,
    check_model_files,
    parsed,
    policies_of,
    server_config,
)
from smartspec_cli.side_by_side import NUM_RUNS, SEED, Comparison, Sent
from smartspec_launch.address import can_bind, free_address
from smartspec_launch.foreground import announce, signals_interrupt, wait_with_progress, watch
from smartspec_launch.gateway import OPENAI_PORT, OpenAi, tokenizer_dir
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.triton_server import TritonServer, TritonServerError
from smartspec_py.engines.profile import machine_name

CACHE = REPOSITORY / ".smartspec"
TINY_PAIR = REPOSITORY / "engines_build" / "tiny"
MAX_SEQUENCES = 8
QUESTIONS = {
    "code": "Write a Python function that reverses a string, and an example of its use.",
    "explain": "How does a vaccine work? Answer in three sentences.",
    "summarize": "The town council of Harwell Bay voted on Tuesday to close Mill Street to cars "
    "from the first of May. The street will be open to buses, bicycles and people on foot. The "
    "work, which includes 40 trees and new benches, costs 1.2 million pounds.\n\n"
    "Summarise this in one sentence.",
    "advise": "What are three benefits of regular exercise?",
}
"""SmolLM2-135M-Instruct answers them well, and ends by itself."""

NEXT = (
    "Next: scripts/quickstart --keep leaves the server running, with a page to chat with it. "
    "docs/start/your-own-pair.md shows how to serve your own models."
)


def quickstart(
    model: Model = None,
    draft: Draft = None,
    heads: Heads = None,
    policy: Annotated[
        str, typer.Option(help="Compared with none: goodput or fixed:K.")
    ] = "goodput",
    temperature: Temperature = 0.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the server until Ctrl-C.")] = False,
    settings: Changes = None,
    json_file: JsonFile = None,
) -> None:
    """Stream four answers from Triton and compare the speed with and without speculation."""
    check_outputs(json=json_file)
    policies_of(policy, "policy")
    console = result_console(json_file)
    if model is None and (draft or heads):
        fail("--draft and --heads need --model", USAGE_ERROR)
    models = (model, draft, heads) if model else shipped_models(console)
    engine = {"profile_cache": str(CACHE / "profiles")}
    limits = {"max_sequences": MAX_SEQUENCES}
    config = server_config(*models, None, settings, engine=engine, limits=limits)
    check_model_files(config)
    model_dir = tokenizer_dir(config)
    assert model_dir is not None
    prompts = prompts_for(model_dir, config.served_model_name[0])
    address = free_address()
    openai = None
    if keep:
        port = OPENAI_PORT if can_bind(address.host, OPENAI_PORT) else free_address().http_port
        openai = OpenAi(port, model_dir, names=config.served_model_name)
    folder = CACHE / f"run-{address.http_port}"
    server = TritonServer(config, folder, address, openai=openai)
    comparison = Comparison(policy, temperature, console)
    try:
        with signals_interrupt(), server:
            wait_with_progress(server, console)
            rows = asyncio.run(comparison.run(server.address, prompts))
            differing = [row.prompt for row in rows if not row.is_same_text]
            console.print("", comparison.table(rows))
            console.print(
                f"The text differs with speculation: {', '.join(differing)}."
                if differing
                else f"All {2 * NUM_RUNS} texts of each prompt are the same, with and without "
                f"speculation (temperature {temperature:g}, seed {SEED})."
            )
            about = {"policy": policy, "temperature": temperature, "machine": machine_name()}
            write_json(json_file, about | {"rows": [asdict(row) for row in rows]})
            if keep:
                keep_serving(server)
            else:
                console.print(NEXT, highlight=False)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except (StreamError, LaunchError) as error:
        fail(str(error))
    shutil.rmtree(folder, ignore_errors=True)  # a log that nobody needs
    if differing:
        fail("a text with speculation differs from the text without")


def shipped_models(console: Console) -> tuple[Path, Path | None, Path | None]:
    """Model, draft and heads: SmolLM2-135M-Instruct, which is downloaded once; if that fails, the
    tiny pair."""
    if not FILE.is_file():
        with Progress("downloading SmolLM2-135M-Instruct, 93 MB"):
            reason = download()
        if reason:
            console.print(
                f"SmolLM2-135M-Instruct cannot be downloaded ({reason}). The tiny pair of this "
                "repository is served instead."
            )
            return TINY_PAIR / "target", TINY_PAIR / "draft", None
    console.print(
        "The model is SmolLM2-135M-Instruct (Apache-2.0). Drafts come from an EAGLE-3 head, or are "
        "copied from earlier text."
    )
    return FILE, None, HEAD


def prompts_for(folder: Path, name: str) -> list[Sent]:
    """Chats with the model of this folder and name, or plain texts if it has no chat template. The
    tiny pair was trained for documents."""
    if folder == TINY_PAIR / "target":
        documents = {kind: texts.prompt(kind, 0) for kind in texts.TINY}
        return [Sent(kind, text, text) for kind, text in documents.items()]
    template = parsed("model", chat_template, folder)
    prompts = []
    for kind, text in QUESTIONS.items():
        prompt = template(text)
        shown = text if prompt == text else f"You: {text}\n\n{name}: "
        prompts.append(Sent(kind, prompt, shown))
    return prompts


def keep_serving(server: TritonServer) -> None:
    """Serve until Ctrl-C. Prints to stderr, so that the JSON is the last line of stdout."""
    console = Console(stderr=True)
    announce(server, console)
    try:
        if watch(server, console):
            raise TritonServerError("the server ended")
    except KeyboardInterrupt:
        console.print("Stopping.")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(quickstart)
    app(prog_name="scripts/quickstart")
