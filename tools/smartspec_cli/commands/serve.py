"""`smartspec serve`: serves a target and a draft on Triton, in the foreground."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smartspec_cli.commands import USAGE_ERROR, fail, note
from smartspec_cli.commands.settings import (
    Changes,
    Config,
    Draft,
    Heads,
    Lora,
    Model,
    check_model_files,
    engine_option,
    limits_option,
    server_config,
)
from smartspec_cli.drafts import draft_for
from smartspec_launch import paths
from smartspec_launch.address import Address, can_bind, status_of, taken_ports
from smartspec_launch.files import exposure
from smartspec_launch.foreground import run_in_foreground
from smartspec_launch.gateway import OPENAI_PORT, OpenAi, adapter_names, tokenizer_dir
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.pbtxt import ALIASES
from smartspec_launch.triton_server import ModelRefusedError, TritonServer
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.config import LocalEngineConfig, ServerConfig

NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")

LOOK_S = 2.0
"""For the answer of what listens on a port."""

_ADDRESS = Address()
_of_models = partial(typer.Option, rich_help_panel="Models")
_of_address = partial(typer.Option, rich_help_panel="Address")


def serve(
    model: Model = None,
    draft: Draft = None,
    heads: Heads = None,
    lora: Lora = None,
    config: Config = None,
    settings: Changes = None,
    policy: Annotated[
        str | None,
        _of_models(
            help="Default policy: none, fixed:K, batch_table, goodput_global or goodput (default)."
        ),
    ] = None,
    dtype: Annotated[str | None, engine_option("dtype")] = None,
    weights: Annotated[str | None, engine_option("weights")] = None,
    kv_cache: Annotated[str | None, engine_option("kv_cache")] = None,
    num_threads: Annotated[int | None, engine_option("num_threads")] = None,
    runtime: Annotated[str | None, engine_option("runtime")] = None,
    max_context_len: Annotated[int | None, limits_option("max_context_len")] = None,
    host: Annotated[
        str,
        _of_address(
            help="Address to listen on. Only the OpenAI-compatible endpoint can ask for a key."
        ),
    ] = _ADDRESS.host,
    allow_remote: Annotated[
        bool,
        _of_address(
            "--allow-remote",
            help="Allow a --host other than loopback even if this Triton has known remote "
            "vulnerabilities, as the Triton of the wheel has.",
        ),
    ] = False,
    http_port: Annotated[int, _of_address(help="Port on that address.")] = _ADDRESS.http_port,
    grpc_port: Annotated[int, _of_address(help="Port on that address.")] = _ADDRESS.grpc_port,
    metrics_port: Annotated[int, _of_address(help="Port on that address.")] = _ADDRESS.metrics_port,
    openai_port: Annotated[
        int | None,
        _of_address(
            help="Port of the OpenAI-compatible endpoint; 0: none. Default: 9000 if it is free.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, _of_address(help="Chat template in Jinja; default: the model's own.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _of_address(
            help="File with API keys of the OpenAI-compatible endpoint, one per line; default: "
            "$SMARTSPEC_API_KEY, or no key."
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        _of_address(help="Origin whose pages may use the OpenAI routes, or *. May be repeated."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            help="Let clients read the step trace, as `smartspec explain` does. It has numbers of "
            "all requests.",
            rich_help_panel="Limits",
        ),
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for Triton's files and log; default: in the user's cache directory.",
            rich_help_panel="Files",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _of_address(
            help="Name of the model for clients; default: its folder, GGUF file or hub name. May "
            "be repeated.",
            show_default=False,
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        _of_address(
            help=f"Additional name of the model, with TensorRT-LLM's tensors: "
            f"{' or '.join(ALIASES)}, or any other. May be repeated."
        ),
    ] = None,
) -> None:
    """Serve a target model with speculative decoding on Triton, until Ctrl-C."""
    address = Address(host, http_port, grpc_port, metrics_port)
    if not can_bind(host, 0):
        fail(f"--host: got {host}, must be an address of this machine", USAGE_ERROR)
    _check_exposure(address, allow_remote)
    _check_aliases(alias or ())
    _check_address(address)
    _check_files_of_chats(chat_template, api_key_file)
    openai_port = _openai_port(address, openai_port)
    engine = {"dtype": dtype, "weights": weights, "kv_cache": kv_cache, "runtime": runtime}
    models = (model, draft, heads, config, settings)
    checked = server_config(
        *models,
        lora=lora,
        options={
            "engine": {**engine, "num_threads": num_threads},
            "limits": {"max_context_len": max_context_len},
            "policy": policy,
            "explain": explain or None,
            "served_model_name": served_model_name or None,
        },
    )
    console = Console(stderr=True)
    if console.is_terminal and (draft_name := suggested_draft(checked)):
        note(f"A draft model with the same tokens is --draft {draft_name}")
    check_model_files(checked)
    tokenizer = tokenizer_dir(checked)
    openai = None
    if openai_port and tokenizer is not None:
        openai = OpenAi(
            openai_port,
            tokenizer,
            chat_template,
            api_key_file,
            cors=cors or (),
            adapters=adapter_names(checked),
            names=checked.served_model_name,
        )
    folder = (run_dir or paths.run_dir(http_port)).resolve()
    server = TritonServer(checked, folder, address, aliases=alias or (), openai=openai)
    try:
        code = run_in_foreground(server, console)
    except ModelRefusedError as error:
        fail(str(error).removeprefix("engine.json: "), USAGE_ERROR)
    except LaunchError as error:
        fail(str(error))
    raise typer.Exit(code)


def suggested_draft(config: ServerConfig) -> str | None:
    """A draft model for a model of the hub that is served without draft model and heads."""
    engine = config.engine
    if not isinstance(engine, LocalEngineConfig) or engine.draft or engine.heads:
        return None
    return next(filter(None, map(draft_for, config.served_model_name)), None)


def _check_exposure(address: Address, allow_remote: bool) -> None:
    try:
        reason = exposure(address)
    except LaunchError as error:
        fail(str(error))
    if reason and not allow_remote:
        fail(f"--host: {reason}; use loopback, a container image, or --allow-remote", USAGE_ERROR)
    if reason:
        typer.echo(f"smartspec: warning: {reason}.", err=True)


def _check_files_of_chats(chat_template: Path | None, api_key_file: Path | None) -> None:
    for option, path in (("--chat-template", chat_template), ("--api-key-file", api_key_file)):
        if path is not None and not path.is_file():
            fail(f"{option}: {path} is not a file", USAGE_ERROR)
    if chat_template is not None:
        from smartspec_gateway.openai.formats.prompts import PromptError, read_template

        try:
            read_template(chat_template)
        except PromptError as error:
            fail(f"--chat-template: {error}", USAGE_ERROR)


def _openai_port(address: Address, port: int | None) -> int:
    """The port of the OpenAI-compatible endpoint; 0 if there is none."""
    if port == 0:
        return 0
    others = (address.http_port, address.grpc_port, address.metrics_port)
    if port is None and (OPENAI_PORT in others or not can_bind(address.host, OPENAI_PORT)):
        note(
            f"smartspec: port {OPENAI_PORT} is taken, so there is no OpenAI-compatible endpoint: "
            "choose a port with --openai-port."
        )
        return 0
    if port is not None:
        if not 1 <= port <= 65535 or port in others:
            rule = "must be in 1..65535 and differ from the other ports"
            fail(f"--openai-port: got {port}, {rule}", USAGE_ERROR)
        if not can_bind(address.host, port):
            fail(f"--openai-port: cannot listen on {address.host} port {port}: choose another one")
    return port or OPENAI_PORT


def _check_aliases(names: Sequence[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name) or name == MODEL_NAME:
            rule = f"must be 1 to 200 letters, digits, - and _, and not {MODEL_NAME}"
            fail(f"--alias: got {name!r}, {rule}", USAGE_ERROR)


def _check_address(address: Address) -> None:
    ports = (address.http_port, address.grpc_port, address.metrics_port)
    if len(set(ports)) < 3 or not all(1 <= port <= 65535 for port in ports):
        fail(f"the three ports must differ and be in 1..65535 (got {ports})", USAGE_ERROR)
    if taken := taken_ports(address):
        url = f"{address.http_url}/v2/models/{MODEL_NAME}"
        is_own = taken[0] == address.http_port and status_of(url, LOOK_S) == 200
        who = ", where another server of this kind listens: stop it, or" if is_own else ":"
        fail(
            f"cannot listen on {address.host} port {taken[0]}{who} choose other ports with "
            "--http-port, --grpc-port and --metrics-port"
        )
