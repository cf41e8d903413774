"""Runs the endpoint until its standard input is closed. It ends with its parent process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from smartspec_launch.front.protocol import BoundedProtocol
from smartspec_openai.app import create_app
from smartspec_openai.endpoint import Settings
from smartspec_openai.prompts import PromptError, Prompts
from smartspec_openai.triton import TritonModel

KEY_VARIABLE = "SMARTSPEC_API_KEY"
SHUTDOWN_S = 2
KEEP_ALIVE_S = 75
MAX_BODY_BYTES = 8 << 20


def main() -> None:
    options = _parser().parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    try:
        prompts = Prompts(options.model_dir, options.chat_template)
        keys = _keys(options.api_key_file)
    except (PromptError, OSError) as error:
        sys.exit(f"smartspec_openai: {error}")
    settings = Settings(options.name, options.context_len, keys, options.metrics_url)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_serve(options, prompts, settings))


async def _serve(options: argparse.Namespace, prompts: Prompts, settings: Settings) -> None:
    protocol: Any = partial(BoundedProtocol, MAX_BODY_BYTES)
    config = uvicorn.Config(
        create_app(TritonModel(options.triton, settings.name), prompts, settings),
        host=options.host,
        port=options.port,
        http=protocol,
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = uvicorn.Server(config)
    if options.ends_with_stdin:
        threading.Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
    await server.serve()


def _end_with_stdin(server: uvicorn.Server) -> None:
    while os.read(0, 1024):
        pass
    server.should_exit = True


def _keys(path: Path | None) -> tuple[str, ...] | None:
    """The keys of the file, one per line, and of the environment; None if there are none."""
    text = os.environ.get(KEY_VARIABLE, "")
    if path is not None:
        text += "\n" + path.read_text(encoding="utf-8")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if path is not None and not keys:
        sys.exit(f"smartspec_openai: {path} has no API key: write one per line")
    return keys or None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m smartspec_openai", description=__doc__)
    parser.add_argument("--triton", required=True, help="host:port of Triton's gRPC")
    parser.add_argument("--model-dir", type=Path, required=True, help="directory of the target")
    parser.add_argument("--context-len", type=int, required=True, help="that of the server")
    parser.add_argument("--name", default="smartspec", help="name of the model in Triton")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--chat-template", type=Path, help="default: that of the model")
    parser.add_argument("--api-key-file", type=Path, help=f"default: ${KEY_VARIABLE}")
    parser.add_argument("--metrics-url", help="URL of Triton's metrics")
    parser.add_argument("--ends-with-stdin", action="store_true", help="for a parent process")
    return parser


if __name__ == "__main__":
    main()
