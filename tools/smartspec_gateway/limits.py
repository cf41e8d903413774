"""Limits of the gateway, and checks of a request before its body is parsed.

They bound the memory, files and time that clients can take from the gateway. Triton gets nothing of
HTTP that a client has written: the gateway writes its requests anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from smartspec_py.faults import cut

Headers = Collection[tuple[bytes, bytes]]
"""Names in lower case."""

MAX_HEADER_BYTES = 32 * 1024
MAX_CHUNKS = 4096
"""For one request with chunked encoding. Each chunk takes the parser about 10 microseconds."""

MIN_BODY_BYTES = 4 << 20
"""Room for images in results of tools, which become `[image]`."""

BYTES_PER_TOKEN = 6 * 64
"""The longest accepted text has 64 bytes per token (serving/intake.py). JSON may encode one byte in
six."""

MAX_ELEMENTS = 1_000_000
"""Of the JSON of one request, counted by commas, which text has too. A batch of 128 prompts may
have 7,800 token ids each. Reading so many empty lists takes 0.8 s and 80 MB."""

MAX_BODY_BYTES = 64 << 20
MAX_HELD_BYTES = 256 << 20
"""For the bodies of all requests together."""

MAX_CONNECTIONS = 4096
"""On each port, if the process may open enough files."""

NUM_PORTS = 4
GENERATING, OTHERS = 2, 1
"""Connections to Triton for each connection that a port may have. A request to OpenAI's API may
need several, and then waits."""

RESERVED_FILES = 160
"""Files for connections that are being refused, for gRPC to Triton, and for the libraries."""

LINGERING = 32
"""Refused connections of a port that are still read; see `protocol`."""

ACCEPTS = 64
"""Connections that are accepted at once. The system keeps others until then, as many as may be open
(at most net.core.somaxconn): it drops what exceeds that, and the client tries again after 1 s."""

MAX_CALLS = 1024
"""Of gRPC at once."""

MAX_UNANSWERED = 256
"""Requests of gRPC streams that wait for their first response. All streams share it
evenly, and each may have one."""

MAX_MESSAGE_BYTES = 16 << 20
"""Of gRPC: the longest prompt as text or tokens takes 64 bytes per token, without escapes."""

MAX_ID_BYTES = 256
RECEIVE_S = 30.0
"""Time limit from the start of a request, or of the connection, to the last byte of the body."""

KEEP_ALIVE_S = 75
"""Timeout of a connection without a request. It is longer than the timeout of pooling clients."""

SEND_S = 60.0
"""How long 64 KiB of a response may wait for a client that does not read."""


def connections_for(num_files: int) -> int:
    """Connections of each port, for a process that may open num_files files. Idle clients must not
    use all of them: then nobody could connect, nor the launcher, which would end the server."""
    return min(MAX_CONNECTIONS, (num_files - RESERVED_FILES) // (NUM_PORTS + GENERATING + OTHERS))


class Refused(Exception):
    """The request is not forwarded; the client gets this HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.message)


@dataclass
class Limits:
    """Limits and load that all routes share.

    context_len: prompt and generated tokens of one request; 0 until the model is ready.
    start: what the start does then, for people.
    held_bytes: of all bodies now. max_connections: of each port.
    """

    context_len: int = 0
    start: str = ""
    is_draining: bool = False
    held_bytes: int = 0
    max_connections: int = MAX_CONNECTIONS

    @property
    def max_body_bytes(self) -> int:
        """Of one request: room for the longest prompt."""
        return min(max(MIN_BODY_BYTES, BYTES_PER_TOKEN * self.context_len), MAX_BODY_BYTES)

    def hold(self, num_bytes: int) -> None:
        """Count bytes that were received. The caller subtracts them later, also if this raises."""
        self.held_bytes += num_bytes
        if self.held_bytes > MAX_HELD_BYTES:
            raise Refused(
                503, f"bodies of all requests together exceed {MAX_HELD_BYTES} bytes: try later"
            )

    def check_size(self, num_bytes: int) -> None:
        """Check the size of a body, or of the part that has arrived."""
        if num_bytes > self.max_body_bytes:
            raise Refused(
                413,
                f"body: got {num_bytes} bytes or more, must be at most {self.max_body_bytes}. The "
                "limit grows with limits.max_context_len. Images are not supported",
            )

    def check_elements(self, num_commas: int) -> None:
        """Check what parsing would cost."""
        if num_commas > MAX_ELEMENTS:
            raise Refused(
                413, f"body: got {num_commas} commas or more, must be at most {MAX_ELEMENTS}"
            )

    def check_open(self) -> None:
        """Whether the server takes requests now."""
        if not self.context_len:
            doing = self.start and f" ({self.start})"
            raise Refused(503, f"the model is starting{doing}: send the request again later")
        if self.is_draining:
            raise Refused(503, "the server is shutting down: send the request to another server")


def check_encoding(headers: Headers) -> None:
    """Refuse compressed bodies, because their size after decompression is unknown."""
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            got = cut(value.decode("ascii", "replace"))
            raise Refused(415, f"Content-Encoding: got {got}, must be identity or left out")
