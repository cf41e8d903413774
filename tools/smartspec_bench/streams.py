"""The benchmarks' client: sends a request over HTTP or gRPC, and records the result.

A transport's `stream` yields each response as a dict by output name. The single-file clients in
clients/ show users how to do the same.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from smartspec_py.api.contract import INPUTS, MODEL_NAME
from smartspec_py.api.tensor_spec import NUMPY_TYPES
from smartspec_py.faults import cut
from smartspec_py.serving.messages import Progress
from smartspec_sim.latency import RequestTiming

TIMED_OUT = "no last response in time"
NO_FINISH = "the stream ended without a last response"
NO_TOKEN = (
    "no token was generated: the model ends the text at once, as it may where the prompt lacks its "
    "chat template: see --model"
)
ANSWER_S = 600.0
"""How long a request may take."""

GENERATE_PATH = f"/v2/models/{MODEL_NAME}/generate_stream"

COUNTS = ("num_steps", "total_draft_tokens", "total_accepted_draft_tokens")
"""Outputs of the last response that results use."""


def counts_of(done: Progress) -> dict[str, int]:
    """The outputs of COUNTS, of a request that was served without Triton."""
    counts = (done.num_steps, done.num_drafted, done.num_accepted)
    return dict(zip(COUNTS, counts, strict=True))


@dataclass
class Exchange:
    """One request and its result. Times are seconds from the start of the load. chunk_s,
    chunk_tokens: arrival time and number of tokens of each response with tokens. text: of all
    responses. last: the outputs of the last response."""

    index: int
    scheduled_s: float
    kind: str = ""
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    num_input_tokens: int = 0
    text: str = ""
    last: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.chunk_tokens)

    def take(self, response: Mapping[str, Any], now_s: float) -> None:
        """Add the outputs of a response that arrived at now_s."""
        num_tokens = int(response.get("num_output_tokens", 0))
        self.num_input_tokens += int(response.get("num_input_tokens", 0))
        if num_tokens:
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(num_tokens)
        self.text += response.get("text_output", "")
        self.last = response

    @property
    def timing(self) -> RequestTiming:
        if not self.chunk_s:
            return RequestTiming(self.scheduled_s, error=self.error or NO_TOKEN)
        first_s, last_s = self.chunk_s[0], self.chunk_s[-1]
        return RequestTiming(self.scheduled_s, first_s, last_s, self.num_tokens, self.error)

    @property
    def accept_prob(self) -> float | None:
        """Probability that a draft is accepted if those before it were. Needs the detailed metrics
        of the response: accepted drafts, divided by these plus the steps that rejected one."""
        document = json.loads(self.last.get("metrics") or "{}").get("speculative_decoding", {})
        if "per_step_drafted" not in document:
            return None
        steps = list(zip(document["per_step_accepted"], document["per_step_drafted"], strict=True))
        num_accepted = sum(accepted for accepted, _ in steps)
        num_rejected = sum(accepted < drafted for accepted, drafted in steps)
        num_trials = num_accepted + num_rejected
        return num_accepted / num_trials if num_trials else None

    @property
    def counts(self) -> dict[str, int]:
        """The tokens of the answer, and the outputs of COUNTS."""
        counts = {name: int(self.last.get(name, 0)) for name in COUNTS}
        return {"num_output_tokens": self.num_tokens, **counts}

    def record(self) -> dict[str, Any]:
        """The line of the JSONL file; `simulate --record` reads it."""
        record: dict[str, Any] = {
            "index": self.index,
            "kind": self.kind,
            "scheduled_s": self.scheduled_s,
            "chunk_s": self.chunk_s,
            "chunk_tokens": self.chunk_tokens,
            "num_input_tokens": self.num_input_tokens,
            "finish_reason": self.last.get("finish_reason", ""),
            **self.counts,
            "error": self.error,
        }
        if (prob := self.accept_prob) is not None:
            record["accept_prob"] = prob
        return record


class Transport(Protocol):
    def stream(self, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The responses of one request; fields: inputs by name. Raises StreamError."""
        ...


class StreamError(RuntimeError):
    """The server refused or failed the request."""


class HttpStreams:
    """Server-sent events of `generate_stream`. Use within `async with`."""

    name = "HTTP"

    def __init__(self, http_url: str, path: str = GENERATE_PATH) -> None:
        self._url = http_url.rstrip("/") + path
        self._session: Any = None

    async def __aenter__(self) -> Self:
        import aiohttp

        # No bound on connections: a request that waited for one would no longer be open loop.
        # One for each request: llama.cpp's server may close one that has answered.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def stream(self, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        async for event in self.events(fields):
            yield event

    async def events(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The data of each event. Raises StreamError."""
        import aiohttp

        try:
            async with self._session.post(self._url, json=dict(body)) as response:
                if response.status != 200:
                    reason = (await response.text()).strip()
                    raise StreamError(f"HTTP {response.status}: {cut(reason, 300)}")
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield outputs_of(data)
        except (aiohttp.ClientError, OSError) as error:
            reason = " ".join(str(error).split())  # some have several lines
            raise StreamError(f"{type(error).__name__}: {reason}") from error


def outputs_of(data: bytes) -> Mapping[str, Any]:
    """Raise the error of a stream whose status was 200."""
    try:
        found: dict[str, Any] = json.loads(data)
    except ValueError:
        raise StreamError(f"an event is no JSON: {data[:100]!r}") from None
    if "error" in found:
        raise StreamError(str(found["error"]))
    return found


class GrpcStreams:
    """ModelStreamInfer, with one stream per request on one connection. Use within `async with`."""

    name = "gRPC"

    def __init__(self, grpc_url: str) -> None:
        """grpc_url: HOST:PORT."""
        self._url = grpc_url
        self._client: Any = None

    async def __aenter__(self) -> Self:
        import tritonclient.grpc.aio as triton

        self._client = triton.InferenceServerClient(self._url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def stream(self, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        from tritonclient.utils import InferenceServerException

        async def requests() -> AsyncIterator[Mapping[str, Any]]:
            yield {"model_name": MODEL_NAME, "inputs": _tensors(fields)}

        try:
            async for result, error in self._client.stream_infer(requests()):
                if error is not None:
                    raise StreamError(str(error))
                yield {one.name: _value(result, one.name) for one in result.get_response().outputs}
        except InferenceServerException as error:
            raise StreamError(str(error)) from error


def _tensors(fields: Mapping[str, Any]) -> list[Any]:
    import tritonclient.grpc as triton

    tensors = []
    for spec in INPUTS:
        if spec.name in fields:
            value = fields[spec.name]
            dtype = np.object_ if spec.dtype == "STRING" else NUMPY_TYPES[spec.dtype]
            array: Any = np.array([value if isinstance(value, (list, tuple)) else [value]], dtype)
            triton_type = spec.dtype.replace("STRING", "BYTES")
            tensors.append(triton.InferInput(spec.name, array.shape, triton_type))
            tensors[-1].set_data_from_numpy(array)
    return tensors


def _value(result: Any, name: str) -> Any:
    """One element as a bare value, like Triton's JSON."""
    array = result.as_numpy(name)
    values = [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
    return values[0] if len(values) == 1 else values


Heard = Callable[[Mapping[str, Any]], object]
"""Told of each response."""


async def answer(
    exchange: Exchange,
    transport: Transport,
    fields: Mapping[str, Any],
    now_s: Callable[[], float],
    heard: Heard = lambda response: None,
) -> None:
    """Send a request and record its result in the exchange, errors included. now_s: seconds from
    the start of the load."""
    try:
        async with asyncio.timeout(ANSWER_S):
            async for response in transport.stream(fields):
                exchange.take(response, now_s())
                heard(response)
        if not exchange.last.get("finish_reason"):
            exchange.error = NO_FINISH
    except TimeoutError:
        exchange.error = TIMED_OUT
    except StreamError as error:
        exchange.error = str(error)


async def ask(
    transport: Transport, fields: Mapping[str, Any], heard: Heard = lambda response: None
) -> Exchange:
    """One answer, whole. Raises StreamError."""
    exchange = Exchange(0, 0.0)
    await answer(exchange, transport, fields, seconds_from_now(), heard=heard)
    if exchange.error is not None:
        raise StreamError(exchange.error)
    return exchange


def seconds_from_now() -> Callable[[], float]:
    """A clock that begins at 0."""
    start_s = time.monotonic()
    return lambda: time.monotonic() - start_s
