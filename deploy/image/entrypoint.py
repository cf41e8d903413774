"""Entry of both images: serves the pair that an engine.json names, and drains before it stops.

Triton alone cannot: of a SIGTERM its Python backend learns nothing, and what was being answered
is cut off. Here a SIGTERM unloads the model first, which the backend sees; requests in flight then
have `limits.drain_s` to finish. config.pbtxt is written at every start from the installed package,
so that a model repository that was made for another version cannot disagree with it.

    SMARTSPEC_ENGINE_JSON   the file; default /models/smartspec/1/engine.json
    SMARTSPEC_HOST          address to listen on; default 0.0.0.0
    SMARTSPEC_ALIASES       other names for the model, such as ensemble,tensorrt_llm_bls
    arguments               go to tritonserver as they are
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console

from smartspec_launch import paths
from smartspec_launch.address import Address, behind_front
from smartspec_launch.files import InstallationError, exposure, find_installation, usable
from smartspec_launch.foreground import run_in_foreground
from smartspec_launch.interpreter import InterpreterError
from smartspec_launch.triton_server import TritonServer, TritonServerError
from smartspec_py.serving.config import (
    ConfigError,
    ServerConfig,
    read_config,
)

DEFAULT_ENGINE_JSON = "/models/smartspec/1/engine.json"
FOLLOW_S = 0.2


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return 0
    path = Path(os.environ.get("SMARTSPEC_ENGINE_JSON", DEFAULT_ENGINE_JSON))
    aliases = [name for name in os.environ.get("SMARTSPEC_ALIASES", "").split(",") if name]
    address = behind_front(Address(os.environ.get("SMARTSPEC_HOST", "0.0.0.0")))
    folder = paths.run_dir(address.http_port)
    try:
        config = with_cache(paths.with_absolute_paths(read_config(path), path.parent))
        check_exposure(address)
        server = TritonServer(config, folder, address, aliases=aliases, options=sys.argv[1:])
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            server.log_path.unlink(missing_ok=True)
        threading.Thread(target=follow, args=(server.log_path, sys.stdout), daemon=True).start()
        return run_in_foreground(server, Console(stderr=True))
    except (ConfigError, InterpreterError, InstallationError, TritonServerError) as error:
        print(error, file=sys.stderr)
        return 1


def check_exposure(address: Address) -> None:
    """Raises InstallationError where this Triton must not listen on this address."""
    installation = find_installation()
    if not (address.is_loopback or installation.is_fit_for_network):
        reason = exposure(address.host, installation.version)
        raise InstallationError(f"{reason}; use a newer image, or SMARTSPEC_HOST=127.0.0.1")


def with_cache(config: ServerConfig) -> ServerConfig:
    """The config with a place for measured costs, where its engine has any and names none."""
    if getattr(config.engine, "profile_cache", "") is not None:
        return config
    engine = config.engine.model_copy(update={"profile_cache": str(paths.profile_cache())})
    return config.model_copy(update={"engine": engine})


def follow(path: Path, out: TextIO) -> None:
    """Copy a log to `out` as it grows, for ever: a container's log is what its process prints."""
    while not path.exists():
        time.sleep(FOLLOW_S)
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            if text := log.read():
                out.write(text)
                out.flush()
            time.sleep(FOLLOW_S)


if __name__ == "__main__":
    sys.exit(main())
