"""uvicorn's HTTP/1.1 protocol, with limits that protect the gateway from its clients.

uvicorn waits without end for the rest of a request and for clients that do not read, and h11 bounds
only a header that arrives in parts. Bodies are bounded in `guard`.

A request over a limit is answered at once, and the connection is closed. For a short time, the
gateway still reads and drops what the client sends. A close with unread data would reset the
connection, and the client could lose the answer.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from smartspec_gateway.guard import ErrorBody
from smartspec_gateway.limits import (
    LINGERING,
    MAX_CHUNKS,
    MAX_HEADER_BYTES,
    RECEIVE_S,
    SEND_S,
    Limits,
)

LINGER_S = 5.0
"""How long a refused connection is still read, so that the client receives the answer."""

LONG_HEADERS = f"headers: must take at most {MAX_HEADER_BYTES} bytes"
CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


class BoundedConnection(h11.Connection):
    """Raises RemoteProtocolError, with the status of the answer, for a request over a limit."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._num_chunks = 0
        self._is_chunked = False

    def send(self, event: Any) -> Any:
        """As h11, which takes 0.05 of 0.3 ms of the gateway's time for a part of a stream."""
        if isinstance(event, h11.Data) and event.data and self._is_chunked:
            return b"%x\r\n%s\r\n" % (len(event.data), event.data)
        sent = super().send(event)
        if isinstance(event, h11.Response):
            self._is_chunked = CHUNKED in sent.lower()
        return sent

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = 0
            if sum(len(name) + len(value) + 4 for name, value in event.headers) > MAX_HEADER_BYTES:
                raise h11.RemoteProtocolError(LONG_HEADERS, 431)
            if {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
                # A proxy may have used the other one, and then sees other requests than the server.
                message = "Content-Length: must be left out with Transfer-Encoding"
                raise h11.RemoteProtocolError(message)
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            if self._num_chunks > MAX_CHUNKS:
                message = f"body: must come in at most {MAX_CHUNKS} chunks"
                raise h11.RemoteProtocolError(message, 413)
        return event


class BoundedProtocol(H11Protocol):
    """One connection, with time limits in addition to the limits of BoundedConnection.

    A request must arrive within RECEIVE_S of its first byte or of the connection. The connection of
    a client that reads too slowly is closed.
    """

    def __init__(self, error_body: ErrorBody, limits: Limits, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._most = limits.max_connections
        self.conn = BoundedConnection()
        self._error_body = error_body
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most + LINGERING:
            self.transport.abort()  # an answer would need a file for longer
        elif len(self.connections) > self._most:
            self._refuse(503, f"connections: the limit of {self._most} is reached: try later")
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()  # a part of the next request may have arrived already

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles an h11 error, which holds the reason."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        # h11 has this status also for a chunk whose header exceeds the buffer.
        self._refuse(status, LONG_HEADERS if status == 431 else str(error or msg))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # A close waits until the client has read all data.
        self.loop.call_later(LINGER_S, self.transport.abort)

    def shutdown(self) -> None:
        if self._is_refused:  # uvicorn would wait for the rest of a body
            self.transport.abort()
        else:
            super().shutdown()

    def _set_deadline(self) -> None:
        """Start the deadline if a request has arrived in part; stop it otherwise."""
        state = self.conn.their_state
        is_partial = state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0])
        if not is_partial:
            self._stop_deadline()
        elif self._deadline is None and not self._is_refused:
            self._start_deadline()

    def _start_deadline(self) -> None:
        late = f"request: must arrive within {RECEIVE_S:.0f} s"
        self._deadline = self.loop.call_later(RECEIVE_S, self._refuse, 408, late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, unless a response has begun, and close the connection."""
        self._stop_deadline()
        self._is_refused = True
        if self.cycle is not None:  # tell the application that the client has disconnected
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state is h11.SEND_BODY:
            self.transport.abort()
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(status, self._error_body(status, message, ""))
        self.flow.resume_reading()
        if not self.transport.is_closing():
            with suppress(OSError):  # the client may have reset the connection
                self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _answer(self, status: int, body: bytes) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(
                status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()
            ),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
