"""The connection to Triton: its generate_stream over HTTP.

For each token, this takes half the processor time of Triton's gRPC in Python, and wakes one thread
instead of three (docs/research/performance.md).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Self

import aiohttp

from smartspec_gateway.limits import Refused

STATUSES = {"INVALID_ARG": 400, "UNAVAILABLE": 503, "INTERNAL": 500}
"""HTTP status by the code of an error of the model."""

_ERROR_TEXT = re.compile(r"(in ensemble '[^']*', )?(?:([A-Z_]+): )?(.*)", re.DOTALL)
METADATA = {
    "id",
    "model_name",
    "model_version",
    "sequence_id",
    "sequence_start",
    "sequence_end",
}
"""What Triton adds to the outputs of a response, the last three for an ensemble."""

NUM_EMPTY = 2
"""Empty responses that GATEWAY asks for. After the last one, the request is accepted."""

IDLE_S = 4.0
"""After this time without a response, an iterator tells that the request is still open."""

_END = b"\n\n"
_EVENT_STREAM = "text/event-stream"
_LOST = "Triton ended the connection or does not answer: send the request again later"
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
CONNECT_S = 5.0
CONNECT = aiohttp.ClientTimeout(sock_connect=CONNECT_S)
"""Without a limit for the whole answer."""

READY = aiohttp.ClientTimeout(total=CONNECT_S)


class TritonError(Refused):
    """Triton or the model refused or failed a request. is_broken: the connection to Triton failed,
    so the answer may be incomplete."""

    def __init__(self, status: int, message: str, *, is_broken: bool = False) -> None:
        super().__init__(status, message)
        self.is_broken = is_broken


class Triton:
    """The connections to a Triton server, one for each open request. Use within `async with`."""

    def __init__(self, url: str, max_connections: int) -> None:
        """url: of Triton's HTTP port. A request beyond max_connections waits for one."""
        self._url, self._max_connections = url, max_connections

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections),
            timeout=CONNECT,
            headers=HEADERS,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def responses(
        self, body: bytes, model: str, version: str = ""
    ) -> AsyncGenerator[Sequence[bytes], None]:
        """The JSON documents of the responses with outputs, each on one line. Those that arrive
        together come together. An empty sequence comes when the request is accepted, and after each
        IDLE_S without a response.

        body: see `fields.body_of`. Closing the iterator cancels the request. Raises TritonError.
        """
        url = self._url + _path(model, version) + "/generate_stream"
        try:
            async with self._session.post(url, data=body) as answer:
                if answer.content_type != _EVENT_STREAM:  # Triton's own checks
                    raise TritonError(answer.status, _reason(await answer.read()))
                num_awaited = NUM_EMPTY
                async for events in _events(answer.content):
                    documents = list(itertools.takewhile(_is_response, events))
                    num_empty = len([*itertools.takewhile(_is_empty, documents[:num_awaited])])
                    found = documents[num_empty:]
                    num_awaited = 0 if found else num_awaited - num_empty
                    if not num_awaited:
                        yield found
                    if len(documents) < len(events):
                        raise _of_model(_reason(events[len(documents)]))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TritonError(503, _LOST, is_broken=True) from error

    async def is_ready(self, model: str) -> bool:
        url = f"{self._url}{_path(model, '')}/ready"
        try:
            async with self._session.get(url, timeout=READY) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def _path(model: str, version: str) -> str:
    return f"/v2/models/{model}" + f"/versions/{version}" * bool(version)


async def _events(stream: aiohttp.StreamReader) -> AsyncGenerator[list[bytes], None]:
    """The data of events that arrive together; none after each IDLE_S in which nothing arrived."""
    parts = [b""]
    while not stream.at_eof():
        try:
            async with asyncio.timeout(IDLE_S):
                received = await stream.readany()
        except TimeoutError:
            yield []
            continue
        is_end = _END in parts[-1][-1:] + received
        parts.append(received)
        if is_end:  # only then joined: an event may come in many parts
            *events, rest = b"".join(parts).split(_END)
            parts = [rest]
            yield [event.removeprefix(b"data: ") for event in events]


def _is_response(document: bytes) -> bool:
    return not document.startswith(b'{"error":')


def _is_empty(document: bytes) -> bool:
    """Whether it has no outputs, as those that GATEWAY asks for."""
    return bool(json.loads(document).keys() <= METADATA)


def _reason(document: bytes) -> str:
    """The text of an error of Triton."""
    try:
        return str(json.loads(document)["error"])
    except (ValueError, KeyError, TypeError):
        return document.decode("utf-8", "replace")


def _of_model(text: str) -> TritonError:
    """An error that came instead of a response. Without a code, it is Triton's own: the model
    failed."""
    found = _ERROR_TEXT.fullmatch(text)
    assert found is not None
    place, code, message = found.groups(default="")
    if code not in STATUSES:
        return TritonError(500, text)
    return TritonError(STATUSES[code], place + message)
