"""`smartspec serve`: serves a target and a draft on Triton, in the foreground."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from smartspec_cli.commands import USAGE_ERROR, fail
from smartspec_cli.commands.settings import checked_config, set_keys
from smartspec_launch import paths
from smartspec_launch.address import can_bind
from smartspec_launch.files import InstallationError, exposure, find_installation
from smartspec_launch.foreground import run_in_foreground
from smartspec_launch.gateway import OPENAI_PORT, OpenAi, tokenizer_dir
from smartspec_launch.interpreter import InterpreterError
from smartspec_launch.paths import with_absolute_paths
from smartspec_launch.pbtxt import ALIASES
from smartspec_launch.triton_server import (
    Address,
    ModelRefusedError,
    TritonServer,
    TritonServerError,
    taken_ports,
)
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.config import (
    ConfigError,
    ServerConfig,
    TorchEngineConfig,
    read_config,
)
from smartspec_py.engines.torch.pair import PairError, check_pair_files

NAME = re.compile(r"[A-Za-z0-9_-]+")

_ADDRESS = Address()
_DEFAULT_POLICY = str(ServerConfig.model_fields["policy"].default)
_Model = Annotated[
    Path | None,
    typer.Option(help="Hugging Face directory of the target model.", rich_help_panel="Models"),
]
_Draft = Annotated[
    Path | None,
    typer.Option(
        help="Hugging Face directory of the draft model; default: no draft model.",
        rich_help_panel="Models",
    ),
]
_Heads = Annotated[
    Path | None,
    typer.Option(
        help="Directory of Medusa heads, or of an EAGLE-3 head, trained for the target model.",
        rich_help_panel="Models",
    ),
]
_Policy = Annotated[
    str,
    typer.Option(
        help="Default policy: none, fixed:K, batch_table, goodput_global or goodput.",
        rich_help_panel="Models",
    ),
]
_Dtype = Annotated[
    str,
    typer.Option(help="Precision: auto, float32, bfloat16 or float16.", rich_help_panel="Models"),
]
_Threads = Annotated[
    int,
    typer.Option(
        help="Compute threads; 0 uses one less than the number of cores.", rich_help_panel="Models"
    ),
]
_Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on. There is no authentication.", rich_help_panel="Address"
    ),
]
_AllowRemote = Annotated[
    bool,
    typer.Option(
        "--allow-remote",
        help="Allow a --host other than loopback even if this Triton has known remote "
        "vulnerabilities, as the Triton of the wheel has.",
        rich_help_panel="Address",
    ),
]
_Port = Annotated[int, typer.Option(help="Port on that address.", rich_help_panel="Address")]
_OpenAiPort = Annotated[
    int | None,
    typer.Option(
        help="Port of the OpenAI-compatible endpoint; 0: none. Default: 9000 if it is free.",
        show_default=False,
        rich_help_panel="Address",
    ),
]
_ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="Chat template in Jinja; default: the model's own.", rich_help_panel="Address"
    ),
]
_Cors = Annotated[
    list[str] | None,
    typer.Option(
        help="Origin whose pages may use the OpenAI routes, or *. May be repeated.",
        rich_help_panel="Address",
    ),
]
_ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File with API keys of the OpenAI-compatible endpoint, one per line; default: "
        "$SMARTSPEC_API_KEY, or no key.",
        rich_help_panel="Address",
    ),
]
_Runtime = Annotated[
    str,
    typer.Option(
        help="Runtime on a CPU: openvino, torch, or auto, which is OpenVINO if it is installed "
        "and supports the model.",
        rich_help_panel="Models",
    ),
]
_Explain = Annotated[
    bool,
    typer.Option(
        help="Let clients read the step trace, as `smartspec explain` does. It has numbers of all "
        "requests.",
        rich_help_panel="Limits",
    ),
]
_RunDir = Annotated[
    Path | None,
    typer.Option(
        help="Directory for Triton's files and its log; default: in the user's cache directory.",
        rich_help_panel="Files",
    ),
]
_Config = Annotated[
    Path | None,
    typer.Option(
        help="An engine.json. It replaces the options for models. "
        "Required for TensorRT-LLM engines.",
        rich_help_panel="Files",
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of engine.json, such as limits.max_queue=64. Values are JSON, or text. May "
        "be repeated.",
        rich_help_panel="Files",
    ),
]
_Alias = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Additional name of the model, with TensorRT-LLM's tensors: "
        f"{' or '.join(ALIASES)}, or any other. May be repeated.",
        rich_help_panel="Address",
    ),
]


def serve(
    model: _Model = None,
    draft: _Draft = None,
    heads: _Heads = None,
    policy: _Policy = _DEFAULT_POLICY,
    dtype: _Dtype = "auto",
    num_threads: _Threads = 0,
    runtime: _Runtime = "auto",
    host: _Host = _ADDRESS.host,
    allow_remote: _AllowRemote = False,
    http_port: _Port = _ADDRESS.http_port,
    grpc_port: _Port = _ADDRESS.grpc_port,
    metrics_port: _Port = _ADDRESS.metrics_port,
    openai_port: _OpenAiPort = None,
    chat_template: _ChatTemplate = None,
    api_key_file: _ApiKeyFile = None,
    cors: _Cors = None,
    explain: _Explain = False,
    run_dir: _RunDir = None,
    config: _Config = None,
    settings: _Set = None,
    alias: _Alias = None,
) -> None:
    """Serve a target model with speculative decoding on Triton, until Ctrl-C."""
    address = Address(host, http_port, grpc_port, metrics_port)
    if not can_bind(host, 0):
        fail(f"--host: got {host}, must be an address of this machine", USAGE_ERROR)
    _check_exposure(address, allow_remote)
    if config is not None:
        found = _read(config, settings or ())
        openai = _openai(found, address, openai_port, chat_template, api_key_file, cors)
        server = _server(found, address, run_dir, alias, openai)
        _check_files(found)
        raise typer.Exit(_run(server))
    if model is None:
        fail("--model, or --config with an engine.json, must be given", USAGE_ERROR)
    engine = {
        "kind": "torch",
        "model": str(model.resolve()),
        "draft": None if draft is None else str(draft.resolve()),
        "heads": None if heads is None else str(heads.resolve()),
        "dtype": dtype,
        "num_threads": num_threads,
        "runtime": runtime,
        "profile_cache": str(paths.profile_cache().resolve()),
    }
    own: dict[str, Any] = {"engine": engine, "policy": policy, "explain": explain}
    keys = set_keys(own, settings or ())
    checked = with_absolute_paths(checked_config(own, keys), Path.cwd())
    openai = _openai(checked, address, openai_port, chat_template, api_key_file, cors)
    server = _server(checked, address, run_dir, alias, openai)
    _check_files(checked)
    raise typer.Exit(_run(server))


def _check_files(config: ServerConfig) -> None:
    """Check the files that can be checked quickly. The backend checks the rest, which needs
    PyTorch. Importing PyTorch here too would make every start seconds longer."""
    engine = config.engine
    if not isinstance(engine, TorchEngineConfig):
        return
    draft = None if engine.draft is None else Path(engine.draft)
    try:
        check_pair_files(Path(engine.model), draft)
    except PairError as error:
        fail(str(error), USAGE_ERROR)


def _read(path: Path, settings: Sequence[str]) -> ServerConfig:
    """The configuration of a file, with the changes of --set."""
    try:
        found = with_absolute_paths(read_config(path), path.resolve().parent)
    except ConfigError as error:
        fail(str(error), USAGE_ERROR)
    if not settings:
        return found
    own = found.model_dump(mode="json")
    keys = set_keys(own, settings)
    return with_absolute_paths(checked_config(own, keys), Path.cwd())


def _server(
    config: ServerConfig,
    address: Address,
    run_dir: Path | None,
    aliases: Sequence[str] | None,
    openai: OpenAi | None,
) -> TritonServer:
    for name in aliases or ():
        if not NAME.fullmatch(name) or name == MODEL_NAME:
            fail(
                f"--alias: got {name!r}, must be letters, digits, - and _, and not {MODEL_NAME}",
                USAGE_ERROR,
            )
    _check_address(address)
    folder = (run_dir or paths.run_dir(address.http_port)).resolve()
    return TritonServer(config, folder, address, aliases=aliases or (), openai=openai)


def _openai(
    config: ServerConfig,
    address: Address,
    port: int | None,
    chat_template: Path | None,
    api_key_file: Path | None,
    cors: Sequence[str] | None,
) -> OpenAi | None:
    """The OpenAI-compatible endpoint; None if there is none."""
    for option, path in (("--chat-template", chat_template), ("--api-key-file", api_key_file)):
        if path is not None and not path.is_file():
            fail(f"{option}: {path} is not a file", USAGE_ERROR)
    if chat_template is not None:
        _check_template(chat_template)
    folder = tokenizer_dir(config)
    if port == 0 or folder is None:
        return None
    if port is None and not can_bind(address.host, OPENAI_PORT):
        typer.echo(
            f"smartspec: port {OPENAI_PORT} is taken, so there is no OpenAI-compatible endpoint: "
            "choose a port with --openai-port.",
            err=True,
        )
        return None
    if port is not None:
        _check_openai_port(address, port)
    return OpenAi(port or OPENAI_PORT, folder, chat_template, api_key_file, cors or ())


def _check_template(path: Path) -> None:
    from smartspec_gateway.openai.prompts import PromptError, read_template

    try:
        read_template(path)
    except PromptError as error:
        fail(f"--chat-template: {error}", USAGE_ERROR)


def _check_openai_port(address: Address, port: int) -> None:
    others = (address.http_port, address.grpc_port, address.metrics_port)
    if not 1 <= port <= 65535 or port in others:
        fail(
            f"--openai-port: got {port}, must be in 1..65535 and differ from the other ports",
            USAGE_ERROR,
        )
    if not can_bind(address.host, port):
        fail(f"--openai-port: cannot listen on {address.host} port {port}: choose another one")


def _run(server: TritonServer) -> int:
    try:
        return run_in_foreground(server, Console(stderr=True))
    except ModelRefusedError as error:
        fail(str(error).removeprefix("engine.json: "), USAGE_ERROR)
    except (InterpreterError, InstallationError, TritonServerError) as error:
        fail(str(error))


def _check_exposure(address: Address, allow_remote: bool) -> None:
    if address.is_loopback:
        return
    try:
        installation = find_installation()
    except (InterpreterError, InstallationError) as error:
        fail(str(error))
    if installation.is_fit_for_network:
        return
    reason = exposure(address.host, installation.version)
    if not allow_remote:
        fail(f"--host: {reason}; use loopback, a container image, or --allow-remote", USAGE_ERROR)
    typer.echo(f"smartspec: warning: {reason}.", err=True)


def _check_address(address: Address) -> None:
    ports = (address.http_port, address.grpc_port, address.metrics_port)
    if len(set(ports)) < 3 or not all(1 <= port <= 65535 for port in ports):
        fail(f"the three ports must differ and be in 1..65535 (got {ports})", USAGE_ERROR)
    if taken := taken_ports(address):
        numbers = ", ".join(map(str, taken))
        fail(f"cannot listen on {address.host} port {numbers}: choose another host or port")
