"""Runs the gateway until its standard input is closed. It therefore ends with its parent process.

Signals do not end it: a supervisor or a terminal sends them to all processes at once, and while the
parent drains, open responses still pass through here.

The parent writes one JSON object per line: {"start": TEXT} while it starts, {"context_len": N} when
the model is ready, and {"is_draining": true} when the server drains.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import aiohttp
import uvicorn
from starlette.middleware.cors import CORSMiddleware

from smartspec_gateway.grpc_front import GrpcFront
from smartspec_gateway.guard import BoundedApp, ErrorBody, triton_error
from smartspec_gateway.limits import (
    ACCEPTS,
    GENERATING,
    KEEP_ALIVE_S,
    OTHERS,
    Limits,
    connections_for,
)
from smartspec_gateway.names import Names
from smartspec_gateway.protocol import BoundedProtocol
from smartspec_gateway.triton import CONNECT_S, Triton
from smartspec_gateway.v2 import V2, Metrics
from smartspec_gateway.workers import Workers
from smartspec_launch.address import Address
from smartspec_launch.gateway import OpenAi, as_json, from_json

ANSWER_S = 30.0
"""Time for Triton to answer what is no request to generate."""

SHUTDOWN_S = 2
"""Time for open responses to end after the gateway is told to stop."""


INCOMPLETE = "ASGI callable returned without completing response."
"""uvicorn writes this for each stream that breaks off with Triton, which is no fault here."""

IGNORED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != INCOMPLETE)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    address, openai, names = from_json(sys.argv[1])
    asyncio.run(serve(address, openai, 0, names))


async def serve(
    address: Address, openai: OpenAi | None, lifeline: int, names: Sequence[str] = ()
) -> None:
    """Serve until `lifeline` is closed, which is a pipe that the parent process keeps open."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ended = asyncio.Event()
    limits = Limits(max_connections=connections_for(num_files))
    workers = Workers(limits, as_json(address, openai))
    known = Names(names)
    grpc_front = GrpcFront(address.triton_grpc_url, limits, workers, known)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=OTHERS * limits.max_connections)
    async with (
        Triton(address.triton_url, GENERATING * limits.max_connections) as triton,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        v2 = V2(triton, session, address.triton_url, workers, known)
        metrics = Metrics(session, address.triton_metrics_url)
        servers = [
            _server(v2, address.host, address.http_port, limits, triton_error, ended),
            _server(metrics, address.host, address.metrics_port, limits, triton_error, ended),
        ]
        if openai is not None:
            # Imported here, because it loads tokenizers.
            from smartspec_gateway.openai.app import openai_app, openai_error

            app = openai_app(triton, limits, openai, address.triton_metrics_url, workers)
            host, port = address.host, openai.port
            servers.append(_server(app, host, port, limits, openai_error, ended, openai.cors))
        await grpc_front.start(address.host, address.grpc_port)

        following = asyncio.create_task(_follow(lifeline, limits))
        following.add_done_callback(lambda _: ended.set())
        await asyncio.gather(*(server.serve() for server in servers))
    await grpc_front.stop(SHUTDOWN_S)
    await workers.close()


def _server(
    app: Any,
    host: str,
    port: int,
    limits: Limits,
    error_body: ErrorBody,
    ended: asyncio.Event,
    cors: Sequence[str] = (),
) -> uvicorn.Server:
    """ended: set when the server should end. cors: origins whose pages may read the answers,
    refusals too."""
    protocol: Any = partial(BoundedProtocol, error_body, limits)
    guarded: Any = BoundedApp(app, limits, error_body)
    if cors:
        guarded = CORSMiddleware(guarded, cors, allow_methods=["*"], allow_headers=["*"])
    config = uvicorn.Config(
        guarded,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        backlog=ACCEPTS,
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return _Server(config, ended, limits.max_connections)


class _Server(uvicorn.Server):
    """uvicorn looks ten times a second whether it should end, and handles signals. This one waits
    for an event."""

    def __init__(self, config: uvicorn.Config, ended: asyncio.Event, backlog: int) -> None:
        """backlog: connections that the system keeps until they are accepted."""
        super().__init__(config)
        self._ended, self._backlog = ended, backlog

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                with listening.dup() as same:
                    same.listen(self._backlog)

    async def main_loop(self) -> None:
        await self._ended.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _follow(lifeline: int, limits: Limits) -> None:
    """Set the fields of `limits` that the parent process sends."""
    lines = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(lines)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(lifeline, "rb"))
    async for line in lines:
        for name, value in json.loads(line).items():
            setattr(limits, name, value)


if __name__ == "__main__":
    main()
