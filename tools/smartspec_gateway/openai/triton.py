"""Generates text with the served model, over gRPC.

Requests and responses are protobuf messages, without the classes of `tritonclient` around them:
those read every tensor of every response, and the endpoint needs a few.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from smartspec_gateway.openai.errors import ApiError

FORMATS = {"INT32": "i", "FP32": "f", "UINT64": "Q", "BOOL": "?"}
"""Types of tensors, and their formats for `struct`."""

FIELD = re.compile(r"^(\w+): ")
"""How the model begins a message about a field."""

FIELDS = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "stop_words": "stop",
    "embedding_bias_words": "logit_bias",
    "return_token_log_probs": "logprobs",
    "return_prompt_log_probs": "echo",
}
"""Tensors with other names than the fields that they come from."""

ALWAYS = ("text_output", "finish_reason", "num_output_tokens", "num_input_tokens")
IF_ASKED = {
    "return_output_ids": ("output_ids",),
    "return_token_log_probs": ("token_log_probs",),
    "return_spec_metrics": (
        "metrics",
        "num_steps",
        "total_draft_tokens",
        "total_accepted_draft_tokens",
        "drafter",
    ),
}
"""Outputs to request, by input. Triton drops the others before it sends a response."""

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

STRICT = ("triton_grpc_error", "true")
"""Metadata of a stream: Triton ends it with the status of an error, instead of a message with only
its text."""

STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 413,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
}
"""HTTP status by code; 500 for others."""

Tensors = Mapping[str, tuple[str, Any]]
"""Type and value by name. A list has shape [1, n]."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text. finish_reason: empty until the last piece, then that of the model.

    num_prompt, metrics: on the last piece only. metrics: JSON, if asked for.
    num_steps, num_drafted, num_accepted: of the request so far. drafter: of its latest drafts.
    tokens: of this piece, if asked for. log_probs: see `token_log_probs`, if asked for.
    """

    text: str
    num_tokens: int
    finish_reason: str = ""
    num_prompt: int = 0
    metrics: str | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafter: str = ""
    tokens: Sequence[int] = ()
    log_probs: Mapping[str, Any] | None = None


class Model(Protocol):
    """The served model."""

    def generate(self, tensors: Tensors) -> AsyncIterator[Piece]:
        """Closing the iterator cancels the request. Raises ApiError."""
        ...

    async def is_ready(self) -> bool: ...

    async def close(self) -> None: ...


class TritonError(Exception):
    """Triton or the model refused or failed a request.

    status: of HTTP. is_broken: the connection to Triton failed, so the answer may be incomplete.
    """

    def __init__(self, status: int, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.is_broken = status, message, is_broken


class Triton:
    """The connection to a Triton server."""

    def __init__(self, url: str) -> None:
        """url: host:port of gRPC."""
        self._channel = grpc.aio.insecure_channel(url, options=UNLIMITED)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def responses(self, request: Any) -> AsyncGenerator[Any, None]:
        """The responses of a ModelInferRequest that have outputs.

        Closing the iterator cancels the request. Raises TritonError.
        """
        stream = self._stub.ModelStreamInfer(metadata=(STRICT,))
        try:
            await stream.write(request)
            await stream.done_writing()
            # To the stream's own end: Triton 2.51 may keep a request that is cancelled there.
            async for message in stream:
                if message.error_message:
                    # Only Triton's own checks come without a status: the model did not see it.
                    is_served = await self.is_ready(request.model_name, request.model_version)
                    raise TritonError(400 if is_served else 404, message.error_message)
                if message.infer_response.outputs:
                    yield message.infer_response
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        finally:
            stream.cancel()

    async def is_ready(self, model: str, version: str = "") -> bool:
        asked = service_pb2.ModelReadyRequest(name=model, version=version)
        with contextlib.suppress(grpc.RpcError):
            return bool((await self._stub.ModelReady(asked)).ready)
        return False

    async def close(self) -> None:
        await self._channel.close()

    def _error(self, error: grpc.aio.AioRpcError) -> TritonError:
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            message = "Triton ended the connection or does not answer: send the request again later"
            return TritonError(503, message, is_broken=True)
        return TritonError(STATUSES.get(error.code(), 500), error.details() or error.code().name)


class TritonModel:
    """A model of a Triton server."""

    def __init__(self, triton: Triton, name: str) -> None:
        self._triton, self._name = triton, name

    async def generate(self, tensors: Tensors) -> AsyncIterator[Piece]:
        is_over = False
        try:
            responses = self._triton.responses(_request(self._name, tensors))
            async with contextlib.aclosing(responses):
                async for response in responses:
                    piece = _piece(response)
                    is_over = bool(piece.finish_reason)
                    yield piece
        except TritonError as error:
            raise _refusal(error) from error
        if not is_over:
            raise ApiError(503, "the server ended the request: send it again later")

    async def is_ready(self) -> bool:
        return await self._triton.is_ready(self._name)

    async def close(self) -> None:
        await self._triton.close()


def _request(name: str, tensors: Tensors) -> Any:
    request = service_pb2.ModelInferRequest(model_name=name)
    for tensor, (kind, value) in tensors.items():
        values = value if isinstance(value, list) else [value]
        request.inputs.add(name=tensor, datatype=kind, shape=[1, len(values)])
        if kind == "BYTES":
            raw = b"".join(struct.pack("<I", len(each)) + each for each in values)
        else:
            raw = struct.pack(f"<{len(values)}{FORMATS[kind]}", *values)
        request.raw_input_contents.append(raw)
    wanted = [name for asked in IF_ASKED if asked in tensors for name in IF_ASKED[asked]]
    for output in (*ALWAYS, *wanted):
        request.outputs.add(name=output)
    return request


def _text(raw: bytes) -> str:
    """A BYTES tensor of one element, which follows its length in four bytes."""
    return raw[4:].decode()


def _int(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _ints(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}i", raw)


READ: Mapping[str, tuple[str, Callable[[bytes], Any]]] = {
    "text_output": ("text", _text),
    "finish_reason": ("finish_reason", _text),
    "num_output_tokens": ("num_tokens", _int),
    "num_input_tokens": ("num_prompt", _int),
    "metrics": ("metrics", _text),
    "num_steps": ("num_steps", _int),
    "total_draft_tokens": ("num_drafted", _int),
    "total_accepted_draft_tokens": ("num_accepted", _int),
    "drafter": ("drafter", _text),
    "output_ids": ("tokens", _ints),
    "token_log_probs": ("log_probs", lambda raw: json.loads(_text(raw))),
}
"""For each output: the field of `Piece`, and how its bytes are read."""


def _piece(response: Any) -> Piece:
    values = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        field, read = READ[output.name]
        values[field] = read(raw)
    return Piece(**values)


def _refusal(error: TritonError) -> ApiError:
    found = FIELD.match(error.message) if error.status == 400 else None
    if found is None:
        return ApiError(error.status, error.message, None, 1 if error.status == 503 else None)
    name = FIELDS.get(found[1], found[1])
    text = error.message[len(found[1]) :].replace("text_input has", "the prompt has")
    return ApiError(400, name + text, name)
