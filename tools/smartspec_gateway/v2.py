"""Triton's HTTP routes and its metrics. Their answers are Triton's own; requests to generate are
written again, from the fields that were checked.

A broken stream ends with an error event and without the end of chunked encoding, so that no client
takes it for complete. When a client disconnects, its request is cancelled at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Sequence

import aiohttp

from smartspec_gateway.fields import body_of, request_of
from smartspec_gateway.guard import Message, Receive, Send, send_whole, triton_error, until_gone
from smartspec_gateway.limits import Refused
from smartspec_gateway.names import Names
from smartspec_gateway.triton import Triton, TritonError
from smartspec_gateway.workers import Workers
from smartspec_py.faults import cut

_MODEL = r"/v2/models/(?P<model>(?!\.\.?/)[\w.-]{1,256})(?:/versions/(?P<version>\d{1,18}))?"
_FORWARDED = re.compile(
    rf"/v2(?:/health/(?:live|ready))?|{_MODEL}(?:/(?:ready|config|stats))?", re.ASCII
)
_GENERATE = re.compile(rf"{_MODEL}/(?P<route>generate|generate_stream)", re.ASCII)
_INFER = re.compile(rf"{_MODEL}/infer", re.ASCII)

LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}
"""Escaped in events, because some clients end a line at them."""


KINDS = ("generate", "generate_stream")
"""Of work on a body: its route."""


class Metrics:
    """The ASGI application of the port of metrics. url: of Triton's metrics.

    Triton's own port does not bound the size of a request. Without free files, it writes a line of
    log for each try to accept a connection, which fills the disk.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["raw_path"].decode("ascii", "replace")
        if path != "/metrics":
            raise Refused(404, f"{cut(path)}: not served; available is GET /metrics")
        _check_method(method, "GET")
        await _forward(self._session, self._url, send)


class V2:
    """The ASGI application. session, http_url: for Triton's HTTP port."""

    def __init__(
        self,
        triton: Triton,
        session: aiohttp.ClientSession,
        http_url: str,
        workers: Workers,
        names: Names,
    ) -> None:
        self._triton, self._session, self._http_url = triton, session, http_url
        self._workers, self._names = workers, names

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["raw_path"].decode("ascii", "replace")
        path = self._names.path(path)
        found = _GENERATE.fullmatch(path)
        _check_route(method, path, found is not None)
        if found is None:
            await _forward(self._session, self._http_url + path, send)
            return
        body = (await receive())["body"]
        await until_gone(receive, self._generate(found, body, send))

    async def _generate(self, found: re.Match[str], body: bytes, send: Send) -> None:
        streams = found["route"] == "generate_stream"
        try:
            sent = await self._workers.run(request, found["route"], body)
        except Refused:
            if await self._is_unknown(found["model"]):
                raise self._names.unknown(found["model"]) from None
            raise
        answers = self._triton.responses(sent, found["model"], found["version"] or "")
        try:
            async with contextlib.aclosing(answers) as responses:
                if streams:
                    await _stream(responses, send)
                    return
                documents = [document async for some in responses for document in some]
        except TritonError as error:
            if error.status == 404:
                raise self._names.unknown(found["model"]) from None
            raise
        if not documents:
            raise Refused(500, "the model sent no response")
        await send_whole(send, 200, documents[0])

    async def _is_unknown(self, model: str) -> bool:
        """Whether Triton has no model of this name. Its own names and those of --alias are not
        known here."""
        try:
            async with self._session.get(f"{self._http_url}/v2/models/{model}") as response:
                return response.status == 404
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def request(kind: str, body: bytes, context_len: int) -> bytes:
    """The body for Triton. Raises Refused."""
    return body_of(request_of(body, may_stream=kind == "generate_stream"))


async def _stream(responses: AsyncIterator[Sequence[bytes]], send: Send) -> None:
    is_started = False
    try:
        async for documents in responses:
            if not is_started:
                await send(_event_stream())
                is_started = True
            if documents:
                await _send_events(send, documents)
    except TritonError as error:
        if not is_started:
            raise
        await _send_events(send, [triton_error(error.status, error.message)])
        if error.is_broken:
            return  # uvicorn closes the connection of an incomplete response
    if not is_started:
        await send(_event_stream())
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _forward(session: aiohttp.ClientSession, url: str, send: Send) -> None:
    try:
        async with session.get(url) as response:
            content_type = response.headers.get("content-type", "application/json")
            await send_whole(send, response.status, await response.read(), content_type.encode())
    except (aiohttp.ClientError, OSError, TimeoutError):
        raise Refused(503, "Triton does not answer: it is starting or has ended") from None


def _check_method(method: str, allowed: str) -> None:
    if method != allowed:
        raise Refused(405, f"{method}: the method must be {allowed} for this path")


def _check_route(method: str, path: str, is_generate: bool) -> None:
    if is_generate or _FORWARDED.fullmatch(path):
        _check_method(method, "POST" if is_generate else "GET")
        return
    if _INFER.fullmatch(path):
        raise Refused(501, "infer: the model streams; use generate, generate_stream or gRPC")
    raise Refused(
        404,
        f"{cut(path)}: not served; available are GET /v2, /v2/health/live, /v2/health/ready and "
        "/v2/models/NAME with /ready, /config and /stats, and POST /v2/models/NAME/generate and "
        "/generate_stream",
    )


def _event_stream() -> Message:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _send_events(send: Send, documents: Sequence[bytes]) -> None:
    body = b"".join(b"data: %s\n\n" % document for document in documents)
    for end, escaped in LINE_ENDS.items():
        body = body.replace(end, escaped)
    await send({"type": "http.response.body", "body": body, "more_body": True})
