"""The gateway's end of the reply channel; see `smartspec_py.serving.replies`."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

READ_BYTES = 1 << 18


class Replies:
    """Reads replies and gives each to the request that it belongs to. Needs a running loop."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._begun = b""
        """The beginning of a message whose end has not arrived."""
        self._takers: dict[str, Callable[[str], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self.read)

    def open(self, take: Callable[[str], None]) -> str:
        """A new key, which nobody can guess. take: called with each reply that has it."""
        key = secrets.token_urlsafe()
        self._takers[key] = take
        return key

    def close(self, key: str, *, has_left: bool) -> None:
        """Replies with this key are dropped from now on. has_left: tell the backend that nobody
        reads them."""
        del self._takers[key]
        if has_left:
            # A backend that has ended, or has not read for so long, is ended by the launcher.
            with suppress(OSError):
                self._socket.send(key.encode() + b"\n")

    def read(self) -> None:
        """Read all that has arrived. After the end of a request, that includes all its replies."""
        with suppress(BlockingIOError):
            while data := self._socket.recv(READ_BYTES):
                *lines, self._begun = (self._begun + data).split(b"\n")
                for line in lines:
                    key, _, outputs = line.decode().partition(" ")
                    if take := self._takers.get(key):
                        take(outputs)
                if len(data) < READ_BYTES:
                    return
            self._loop.remove_reader(self._socket)  # the backend has ended

    def end(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
