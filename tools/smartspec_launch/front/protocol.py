"""uvicorn's HTTP/1.1 protocol with bounds on what is received: size, chunks, headers, time.

A request that passes a bound is answered at once and the connection closed; what the client still
sends is read and dropped for a while, since a close with unread data would reset the connection,
and the client could lose the answer.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from smartspec_launch.front.limits import (
    MAX_CHUNKS,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    RECEIVE_S,
    SEND_S,
    Refused,
    check_framing,
    error_body,
    too_large,
)

LINGER_S = 5.0
"""So long a refused connection is read to let the client take its answer."""

_BUFFER_FULL = "Receive buffer too long"
"""h11's words for a header, or the header of a chunk, that does not end."""


class BoundedConnection(h11.Connection):
    """Raises RemoteProtocolError with the status of the answer where a request passes a bound."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._max_body_bytes = max_body_bytes
        self._num_bytes = self._num_chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        try:
            if isinstance(event, h11.Request):
                self._num_bytes = self._num_chunks = 0
                check_framing(event.http_version, event.headers, self._max_body_bytes)
            elif isinstance(event, h11.Data):
                self._count(event)
        except Refused as refused:
            raise h11.RemoteProtocolError(refused.message, refused.status) from None
        return event

    def _count(self, data: h11.Data) -> None:
        self._num_bytes += len(data.data)
        if self._num_bytes > self._max_body_bytes:
            raise too_large(self._num_bytes, self._max_body_bytes)
        self._num_chunks += data.chunk_start
        if self._num_chunks > MAX_CHUNKS:
            raise Refused(413, f"body: must come in at most {MAX_CHUNKS} chunks")


class BoundedProtocol(H11Protocol):
    """One connection. Beside what BoundedConnection counts: a request arrives within RECEIVE_S from
    its first byte, or from the connection; and a client that reads too slowly is cut off."""

    def __init__(self, max_body_bytes: int, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.conn = BoundedConnection(max_body_bytes)
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, f"connections: {MAX_CONNECTIONS} are open, which is the limit")
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
        self._set_deadline()  # the next request may have begun to arrive before

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles the error of h11 that says what is wrong."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        message = str(error or msg)
        if message == _BUFFER_FULL:
            message = f"headers: must take at most {MAX_HEADER_BYTES} bytes"
        self._refuse(status, message)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # A close waits for what the client has not read.
        self.loop.call_later(LINGER_S, self.transport.abort)

    def shutdown(self) -> None:
        if self._is_refused:
            self.transport.abort()
        else:
            super().shutdown()

    def _set_deadline(self) -> None:
        """It runs while a part of a request has arrived."""
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
        """Answer, unless an answer has begun, and close."""
        self._stop_deadline()
        self._is_refused = True
        if self.cycle is not None:  # the application hears that the client has gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state is h11.SEND_BODY:
            self.transport.abort()
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(status, error_body(message))
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _answer(self, status: int, body: bytes) -> None:
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(
                status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()
            ),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
