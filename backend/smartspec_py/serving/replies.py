"""The reply channel: a pair of sockets, on which replies take the short way to the gateway.

On the way through Triton, a reply wakes seven threads of three processes, which takes 1 ms of
processor time from the pass (docs/research/performance.md). So a launcher connects the backend with
the gateway. Requests, their errors and their ends still pass through Triton, and clients of gRPC
get all replies from Triton.

    gateway to Triton       the request, with a key as its parameter KEY_PARAMETER
    backend to gateway      a line for each reply: the key, a space, and the outputs in JSON
    gateway to backend      a line with the key, if the client of the request has disconnected

The replies to a request are written before Triton is told of its end. This module is the backend's
end. `smartspec_gateway.replies` is the gateway's end.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

REPLIES_VARIABLE = "SMARTSPEC_REPLIES"
"""Environment variable with the inherited descriptor of the backend's end."""

KEY_PARAMETER = "reply_key"

SEND_S = 10
"""How long a reply may wait for a gateway that does not read."""

READ_BYTES = 1 << 16


class ReplyChannel:
    """The backend's end. Any thread may call `open`, and only the responder's thread the rest."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        wait = struct.pack("ll", SEND_S, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self._has_left: dict[str, bool] = {}
        self._begun = b""
        """The beginning of a line whose end has not arrived."""

    def open(self, key: str) -> None:
        """A request with this key begins."""
        self._has_left[key] = False

    def close(self, key: str) -> None:
        """It has ended."""
        self._has_left.pop(key, None)

    def send(self, key: str, outputs: str) -> None:
        """Raises OSError if the gateway does not read. Then the channel is closed, because a reply
        may have been sent in part. If the gateway has ended, nothing is sent."""
        try:
            self._socket.sendall(f"{key} {outputs}\n".encode())
        except ConnectionError:
            pass  # the launcher ends this process too
        except OSError:
            self._socket.close()
            raise

    def has_left(self, key: str) -> bool:
        """Whether the client has disconnected, or the gateway has ended. Raises OSError if the
        channel is closed."""
        with suppress(BlockingIOError):
            try:
                data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except ConnectionError:
                return True
            *lines, self._begun = (self._begun + data).split(b"\n")
            gone = {line.decode() for line in lines} & self._has_left.keys()
            self._has_left |= dict.fromkeys(gone, True)
            if not data:
                return True
        return self._has_left.get(key, False)

    def end(self) -> None:
        """Close the channel. Idempotent."""
        self._socket.close()


def inherited_channel() -> ReplyChannel | None:
    """The backend's end; None if this Triton was not started by a launcher."""
    fd = os.environ.pop(REPLIES_VARIABLE, None)
    return None if fd is None else ReplyChannel(int(fd))
