"""The connection to Triton: its generate_stream over HTTP.

For each token, this takes half the processor time of Triton's gRPC in Python, and wakes one thread
instead of three (docs/research/performance.md).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any

import aiohttp

from smartspec_gateway.limits import Refused
from smartspec_py.api.contract import GATEWAY

STATUSES = {"INVALID_ARG": 400, "UNAVAILABLE": 503, "INTERNAL": 500}
"""HTTP status by the code of an error of the model."""

_ERROR_TEXT = re.compile(r"(in ensemble '[^']*', )?(?:([A-Z_]+): )?(.*)", re.DOTALL)
_EVENT_STREAM = "text/event-stream"
_LOST = "Triton ended the connection or does not answer: send the request again later"
HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
CONNECT_S = 5.0


class TritonError(Refused):
    """Triton or the model refused or failed a request. is_broken: the connection to Triton failed,
    so the answer may be incomplete."""

    def __init__(self, status: int, message: str, *, is_broken: bool = False) -> None:
        super().__init__(status, message)
        self.is_broken = is_broken


class Triton:
    """The connections to a Triton server, one for each open request."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """url: of Triton's HTTP port. session: without a bound on its connections."""
        self._session, self._url = session, url

    async def responses(
        self,
        fields: Mapping[str, Any],
        model: str,
        version: str = "",
        outputs: Collection[str] = (),
    ) -> AsyncGenerator[Sequence[bytes], None]:
        """The JSON documents of the responses with outputs, each on one line. Those that arrive
        together come together.

        fields: values by the names of tensors, and perhaps `id`. outputs: those to send; default:
        all. Closing the iterator cancels the request. Raises TritonError.
        """
        url = self._url + _path(model, version) + "/generate_stream"
        body = json.dumps({**fields, GATEWAY: ",".join(outputs)}, ensure_ascii=False).encode()
        # No limit on the time of the whole answer.
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S)
        try:
            async with self._session.post(
                url, data=body, headers=HEADERS, timeout=timeout
            ) as answer:
                if answer.content_type != _EVENT_STREAM:  # Triton's own checks
                    raise TritonError(answer.status, _reason(await answer.read()))
                async for events in _events(answer.content):
                    documents = list(itertools.takewhile(_is_response, events))
                    if found := list(filter(_has_output, documents)):
                        yield found
                    if len(documents) < len(events):
                        raise _of_model(_reason(events[len(documents)]))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TritonError(503, _LOST, is_broken=True) from error

    async def is_ready(self, model: str) -> bool:
        try:
            async with self._session.get(f"{self._url}{_path(model, '')}/ready") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def _path(model: str, version: str) -> str:
    return f"/v2/models/{model}" + f"/versions/{version}" * bool(version)


async def _events(stream: aiohttp.StreamReader) -> AsyncGenerator[list[bytes], None]:
    """The data of events that arrive together, at least one."""
    rest = b""
    async for received in stream.iter_any():
        *events, rest = (rest + received).split(b"\n\n")
        if events:
            yield [event.removeprefix(b"data: ") for event in events]


def _is_response(document: bytes) -> bool:
    return not document.startswith(b'{"error":')


def _has_output(document: bytes) -> bool:
    return b'"text_output":' in document or b'"explanation":' in document


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
