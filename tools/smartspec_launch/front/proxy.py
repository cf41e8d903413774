"""The ASGI application: checks a request, forwards it and streams the response to the client.

Every request gets one answer: Triton's, a refusal by `limits`, or 502 or 503 if Triton fails. A
broken stream ends with an error event and without the end of chunked encoding, so that no client
takes it for complete. When a client disconnects, the connection to Triton is closed at once. This
cancels the request in the backend.

While the server drains, new requests and readiness checks get 503, so that a load balancer sends
them to another server. Triton itself answers 404 then, which clients and load balancers take for a
wrong URL.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from smartspec_launch.front.fields import check_fields
from smartspec_launch.front.limits import (
    MAX_HELD_BYTES,
    check_encoding,
    check_json,
    check_route,
    error_body,
    forwarded,
    returned,
)
from smartspec_launch.front.refused import Refused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DRAINING = Refused(503, "the server is shutting down: send the request to another server")
FULL = b'{"error":"the queue is full'
"""Beginning of Triton's answer if the backend's queue is full (serving/inbox.py)."""

UNLOADED = (400, 404)
"""Triton's answers for a model that is being unloaded."""


class ClientGone(Exception):
    """The client has disconnected and does not wait for the answer."""


@dataclass
class Progress:
    """The part of the response that the client has received."""

    is_started: bool = False
    is_stream: bool = False
    is_between_events: bool = True


class Proxy:
    """The ASGI application. session: connections to Triton at triton_url, for all requests."""

    def __init__(self, triton_url: str, session: aiohttp.ClientSession) -> None:
        self._triton_url = triton_url
        self._session = session
        self._held_bytes = 0
        self.is_draining = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            check_route(scope["method"], scope["raw_path"])
            check_encoding(scope["headers"])
            await self._receive(receive, body)
            if scope["method"] == "POST":
                check_fields(check_json(body, scope["raw_path"]))
            self._refuse_if_draining(scope)
            await _until_gone(receive, self._forward(scope, bytes(body), send))
        except Refused as refused:
            await _answer(send, refused.status, refused.message)
        except ClientGone:
            pass
        finally:
            self._held_bytes -= len(body)

    async def _receive(self, receive: Receive, body: bytearray) -> None:
        """Read the request body into `body`. Its bytes count towards MAX_HELD_BYTES."""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message["body"]
            self._held_bytes += len(message["body"])
            if self._held_bytes > MAX_HELD_BYTES:
                raise Refused(
                    503, f"bodies of all requests together exceed {MAX_HELD_BYTES} bytes: try later"
                )
            more = message["more_body"]

    def _refuse_if_draining(self, scope: Message) -> None:
        if self.is_draining and (
            scope["method"] == "POST" or scope["raw_path"].endswith(b"/ready")
        ):
            raise DRAINING

    async def _forward(self, scope: Message, body: bytes, send: Send) -> None:
        progress = Progress()
        try:
            async with self._session.request(
                scope["method"],
                self._triton_url + scope["raw_path"].decode("ascii"),
                data=body or None,
                headers=forwarded(scope["headers"]),
                allow_redirects=False,
            ) as response:
                if response.status in UNLOADED:
                    self._refuse_if_draining(scope)  # the drain began after the first check
                if response.status == 400:
                    _refuse_if_full(await response.read())
                await _pass_on(response, send, progress)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
            raise Refused(503, "Triton does not answer: it is starting or has ended") from None
        except (aiohttp.ClientError, OSError) as error:
            reason = f"Triton ended the connection: {type(error).__name__}"
            if not progress.is_started:
                raise Refused(502, reason) from None
            if progress.is_stream and progress.is_between_events:
                await _send(send, b"data: " + error_body(reason) + b"\n\n", more_body=True)
            # The response is not complete, and uvicorn therefore closes the connection.


async def _pass_on(response: aiohttp.ClientResponse, send: Send, progress: Progress) -> None:
    progress.is_stream = response.content_type == "text/event-stream"
    await send(
        {
            "type": "http.response.start",
            "status": response.status,
            "headers": returned(response.raw_headers),
        }
    )
    progress.is_started = True
    async for data in _parts(response):
        await _send(send, data, more_body=True)
        progress.is_between_events = data.endswith(b"\n\n")
    await _send(send, b"", more_body=False)


async def _parts(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    if response.status == 400:  # read already
        yield await response.read()
        return
    async for data in response.content.iter_any():
        yield data


def _refuse_if_full(body: bytes) -> None:
    """Triton 2.51 answers 400 to every error of a model. Load balancers and clients must see that a
    full queue is temporary. body: JSON, or an event with it."""
    message = body.strip().removeprefix(b"data:").lstrip()
    if message.startswith(FULL):
        raise Refused(503, json.loads(message)["error"])


async def _send(send: Send, data: bytes, *, more_body: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more_body})


async def _until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work. Raises ClientGone if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, message: str) -> None:
    body = error_body(message)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _send(send, body, more_body=False)
