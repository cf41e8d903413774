"""Runs the gateway until its standard input is closed. It therefore ends with its parent process.

The parent writes one JSON object per line: {"context_len": N} when the model is ready, and
{"drain": true} when the server drains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.middleware.cors import CORSMiddleware

from smartspec_gateway.grpc_front import GrpcFront
from smartspec_gateway.guard import ErrorBody, Guard, triton_error
from smartspec_gateway.limits import Limits
from smartspec_gateway.protocol import BoundedProtocol
from smartspec_gateway.triton import Triton
from smartspec_gateway.v2 import V2

CONNECT_S, ANSWER_S = 5.0, 30.0
KEEP_ALIVE_S = 75
"""Timeout of an idle connection. It is longer than the timeout of pooling clients."""

SHUTDOWN_S = 2
"""Time for open responses to end after the gateway is told to stop."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(serve(options, 0))


async def serve(options: argparse.Namespace, lifeline: int) -> None:
    """Serve until `lifeline` is closed, which is a pipe that the parent process keeps open."""
    limits = Limits(options.triton_bears_bytes)
    triton, grpc_front = Triton(options.triton_grpc), GrpcFront(options.triton_grpc, limits)
    openai = None
    if options.openai_port:
        # Imported here, because it loads tokenizers.
        from smartspec_gateway.openai.port import OpenAi, openai_error

        openai = OpenAi(triton, options)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        v2 = V2(triton, session, options.triton_http)
        servers = [_server(v2, options.host, options.http_port, limits, triton_error)]
        if openai is not None:
            port, cors = options.openai_port, options.cors
            servers.append(_server(openai, options.host, port, limits, openai_error, cors))
        await grpc_front.start(options.host, options.grpc_port)

        def take(message: dict[str, Any]) -> None:
            limits.is_draining |= bool(message.get("drain"))
            if (context_len := message.get("context_len")) is not None:
                limits.fit(context_len)
                if openai is not None:
                    openai.settings.context_len = context_len

        def end(_: object) -> None:
            for server in servers:
                server.should_exit = True

        following = asyncio.create_task(_follow(lifeline, take))
        following.add_done_callback(end)
        await asyncio.gather(*(server.serve() for server in servers))
    await grpc_front.stop(SHUTDOWN_S)
    await triton.close()


def _server(
    app: Any,
    host: str,
    port: int,
    limits: Limits,
    error_body: ErrorBody,
    cors: Sequence[str] = (),
) -> uvicorn.Server:
    """cors: origins whose pages may read the answers, refusals too."""
    protocol: Any = partial(BoundedProtocol, limits, error_body, cors)
    guarded: Any = Guard(app, limits, error_body)
    if cors:
        guarded = CORSMiddleware(guarded, cors, allow_methods=["*"], allow_headers=["*"])
    config = uvicorn.Config(
        guarded,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return uvicorn.Server(config)


async def _follow(lifeline: int, take: Callable[[dict[str, Any]], None]) -> None:
    lines = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(lines)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(lifeline, "rb"))
    async for line in lines:
        take(json.loads(line))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m smartspec_gateway", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--triton-http", required=True, help="URL of Triton's HTTP port")
    parser.add_argument("--triton-grpc", required=True, help="host:port of Triton's gRPC port")
    parser.add_argument("--triton-bears-bytes", type=int, default=64 << 20)
    parser.add_argument("--openai-port", type=int, default=0, help="0: none")
    parser.add_argument("--name", default="smartspec", help="name of the model in Triton")
    parser.add_argument("--model-dir", type=Path, help="directory of the target")
    parser.add_argument("--chat-template", type=Path, help="default: that of the model")
    parser.add_argument("--api-key-file", type=Path, help="default: $SMARTSPEC_API_KEY")
    parser.add_argument("--metrics-url", help="URL of Triton's metrics")
    parser.add_argument("--cors", action="append", default=[], help="an allowed origin")
    return parser


if __name__ == "__main__":
    main()
