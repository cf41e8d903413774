"""A front in a thread of this process, and a stand-in for Triton that does what a test says."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from smartspec_launch.address import DIRECT, free_address
from smartspec_launch.front.__main__ import serve

MAX_BODY_BYTES = 10_000
Handler = Callable[[socket.socket, bytes], None]


class StandIn:
    """Hands each connection with its first request, whole, to `handler`, in a thread."""

    def __init__(self) -> None:
        self.handler: Handler = lambda connection, request: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            request = b""
            while not _is_whole(request):
                data = connection.recv(65_536)
                if not data:
                    return
                request += data
            self.handler(connection, request)


def _is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end) and len(body) >= (int(length[0].split(b":")[1]) if length else 0)


@contextmanager
def running_front(triton_url: str, pipe: tuple[int, int] | None = None) -> Iterator[int]:
    """Its port. pipe: the lifeline and its other end, for tests that write to it."""
    port = free_address().http_port
    lifeline, end = pipe or os.pipe()
    run = serve("127.0.0.1", port, triton_url, MAX_BODY_BYTES, lifeline)
    thread = threading.Thread(target=asyncio.run, args=(run,))
    thread.start()
    try:
        _wait_until_it_answers(port)
        yield port
    finally:
        os.close(end)
        thread.join(20)
        os.close(lifeline)
        assert not thread.is_alive()


def _wait_until_it_answers(port: int) -> None:
    for _ in range(500):
        try:
            DIRECT.open(f"http://127.0.0.1:{port}/", timeout=5.0)
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            threading.Event().wait(0.02)
    raise AssertionError("the front does not answer")
