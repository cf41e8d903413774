"""ASGI middleware before both applications: receives the body within the limits.

Every request gets one answer. Refusals have the error format of their port. A response has the
`x-request-id` of its request, or a new one. HEAD is answered as GET, without a body.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeVar

from smartspec_gateway.limits import Limits, Refused, check_encoding

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]
ErrorBody = Callable[[int, str, str], bytes]
"""The body of an error from status, message, and the path if it is known."""

ENDING = "the server ended before the request was answered: send it to another server"

RETRY_AFTER = (b"retry-after", b"1")
"""Of refusals that end by themselves: when to send the request again, in seconds."""

_NEEDS_MODEL = re.compile("/ready$|/health$|^/v1/")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client has disconnected and does not wait for the answer."""


def triton_error(status: int, message: str, path: str = "") -> bytes:
    """In Triton's format."""
    return json.dumps({"error": message}).encode()


class BoundedApp:
    """The application `app` behind the limits."""

    def __init__(self, app: App, limits: Limits, error_body: ErrorBody = triton_error) -> None:
        self.app, self._limits, self._error_body = app, limits, error_body

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = sender = _Sender(scope, send)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        body: list[bytes] = []
        try:
            check_encoding(scope["headers"])
            self._limits.check_size(int(dict(scope["headers"]).get(b"content-length", 0)))
            await self._receive(receive, body)
            body[:] = [b"".join(body)]
            if scope["method"] == "POST" or _NEEDS_MODEL.search(scope["path"]):
                self._limits.check_open()
            await self.app(scope, _replay(body[0], receive), send)
        except Refused as refused:
            await self._refuse(send, refused.status, refused.message, scope["path"])
        except ClientGone:
            pass
        except asyncio.CancelledError:  # the server ends
            if sender.is_started:
                raise
            await self._refuse(send, 503, ENDING, scope["path"])
        finally:
            self._limits.held_bytes -= sum(map(len, body))

    async def _refuse(self, send: Send, status: int, message: str, path: str) -> None:
        headers = (RETRY_AFTER,) if status == 503 else ()
        await send_whole(send, status, self._error_body(status, message, path), headers=headers)

    async def _receive(self, receive: Receive, body: list[bytes]) -> None:
        """Add what is received to `body`. A long body is counted in parts."""
        more, num_bytes, num_commas = True, 0, 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body.append(message["body"])
            num_bytes += len(body[-1])
            num_commas += body[-1].count(b",")
            self._limits.hold(len(body[-1]))
            self._limits.check_size(num_bytes)
            self._limits.check_elements(num_commas)
            more = message["more_body"]


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body at once, then what follows it."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class _Sender:
    """Sends the answer with the id of the request. is_started: whether its status was sent."""

    def __init__(self, scope: Message, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        self._id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        self._send, self.is_started = send, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", self._id)]
            self.is_started = True
        await self._send(message)


async def send_whole(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = b"application/json",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    own = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of the work. If the client disconnects first, cancels it and raises ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
