"""Entry point of both images. Serves the pair that engine.json names, and drains before it stops.

Plain Triton does not drain: it does not tell its Python backend about a SIGTERM, and requests in
flight are cut. Here a SIGTERM unloads the model first. Requests in flight then have
`limits.drain_s` to finish. Every start writes config.pbtxt from the installed package, so that it
always matches the version of the package.

    SMARTSPEC_ENGINE_JSON   path of engine.json; default /models/smartspec/1/engine.json
    SMARTSPEC_HOST          address to listen on; default 0.0.0.0
    SMARTSPEC_ALLOW_REMOTE  1: an old Triton may listen there, with a warning; the CPU image sets it
    SMARTSPEC_OPENAI_PORT   port of the OpenAI-compatible endpoint; default 9000; 0: none
    SMARTSPEC_API_KEY       its API keys, one per line; without, it needs none
    SMARTSPEC_CHAT_TEMPLATE file with a chat template in Jinja; default: the model's own
    SMARTSPEC_CORS          origins whose pages may use that endpoint, such as https://a.org,http://b
    SMARTSPEC_ALIASES       additional names of the model, such as ensemble,tensorrt_llm_bls
    arguments               go to tritonserver unchanged
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from smartspec_launch import paths
from smartspec_launch.address import Address
from smartspec_launch.files import exposure, usable
from smartspec_launch.foreground import run_in_foreground
from smartspec_launch.gateway import OPENAI_PORT, OpenAi, adapter_names, tokenizer_dir
from smartspec_launch.interpreter import LaunchError
from smartspec_launch.models import with_local_models
from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import ServerConfig, read_config
from smartspec_py.faults import ConfigError

DEFAULT_ENGINE_JSON = "/models/smartspec/1/engine.json"


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return 0
    path = Path(os.environ.get("SMARTSPEC_ENGINE_JSON", DEFAULT_ENGINE_JSON))
    address = Address(os.environ.get("SMARTSPEC_HOST", "0.0.0.0"))
    folder = paths.run_dir(address.http_port)
    try:
        config = paths.with_profile_cache(paths.with_absolute_paths(read_config(path), path.parent))
        check_exposure(address)
        config = with_local_models(config, partial(print, file=sys.stderr, flush=True))
        server = TritonServer(
            config,
            folder,
            address,
            aliases=listed("SMARTSPEC_ALIASES"),
            options=sys.argv[1:],
            openai=openai_of(config),
        )
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            server.log_path.write_bytes(b"")
        # The output is the log of the container. `tail` ends with this process.
        subprocess.Popen(["tail", "-n", "+1", f"--pid={os.getpid()}", "-f", server.log_path])
        return run_in_foreground(server, Console(stderr=True))
    except (ConfigError, LaunchError) as error:
        print(error, file=sys.stderr)
        return 1


def openai_of(config: ServerConfig) -> OpenAi | None:
    port, folder = int(os.environ.get("SMARTSPEC_OPENAI_PORT", OPENAI_PORT)), tokenizer_dir(config)
    if not port or folder is None:
        return None
    template = os.environ.get("SMARTSPEC_CHAT_TEMPLATE")
    if template:
        check_template(Path(template))
    return OpenAi(
        port,
        folder,
        Path(template) if template else None,
        cors=listed("SMARTSPEC_CORS"),
        adapters=adapter_names(config),
        names=config.served_model_name,
    )


def check_template(path: Path) -> None:
    """Raises LaunchError."""
    from smartspec_gateway.openai.formats.prompts import PromptError, read_template

    try:
        read_template(path)
    except PromptError as error:
        raise LaunchError(f"SMARTSPEC_CHAT_TEMPLATE: {error}") from error


def listed(variable: str) -> list[str]:
    """Its values, which commas separate."""
    values = os.environ.get(variable, "").split(",")
    return [value.strip() for value in values if value.strip()]


def check_exposure(address: Address) -> None:
    """Raises LaunchError if this Triton must not listen on this address; warns if it may."""
    reason = exposure(address)
    if reason and os.environ.get("SMARTSPEC_ALLOW_REMOTE") != "1":
        raise LaunchError(f"{reason}; use a newer image, or SMARTSPEC_HOST=127.0.0.1")
    if reason:
        print(f"Warning: {reason}; publish the ports to clients that you trust", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
