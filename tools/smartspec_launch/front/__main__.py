"""Runs the front until its standard input is closed. It therefore ends with its parent process.

Any data on the standard input means that the server drains.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import threading
from functools import partial
from typing import Any

import aiohttp
import uvicorn

from smartspec_launch.front.protocol import BoundedProtocol
from smartspec_launch.front.proxy import Proxy

CONNECT_S = 5.0
KEEP_ALIVE_S = 75
"""Timeout of an idle connection. It is longer than the timeout of pooling clients."""

SHUTDOWN_S = 2
"""Time for open responses to end after the front is told to stop. Triton ends before the front."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m smartspec_launch.front", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--triton", required=True, help="URL of Triton's HTTP port")
    parser.add_argument("--max-body-bytes", type=int, default=1 << 20)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(serve(options.host, options.port, options.triton, options.max_body_bytes, 0))


async def serve(host: str, port: int, triton_url: str, max_body_bytes: int, lifeline: int) -> None:
    """Serve until `lifeline` is closed.

    lifeline: descriptor of a pipe that the parent process keeps open. It writes when it drains.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    ) as session:
        protocol: Any = partial(BoundedProtocol, max_body_bytes)
        proxy = Proxy(triton_url, session)
        config = uvicorn.Config(
            proxy,
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
        server = uvicorn.Server(config)
        threading.Thread(target=follow, args=(lifeline, proxy, server), daemon=True).start()
        await server.serve()


def follow(lifeline: int, proxy: Proxy, server: uvicorn.Server) -> None:
    while os.read(lifeline, 1024):
        proxy.is_draining = True
    server.should_exit = True


if __name__ == "__main__":
    main()
