"""Generates text with the served model, over gRPC.

Requests and responses are protobuf messages, without the classes of `tritonclient` around them:
those read every tensor of every response, and the endpoint needs a few.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from smartspec_openai.errors import ApiError

FORMATS = {"INT32": "i", "FP32": "f", "UINT64": "Q", "BOOL": "?"}
"""Types of tensors, and their formats for `struct`."""

REFUSED = re.compile(r"^(\w+): (got|there|must|both)")
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


class TritonModel:
    """A model of a Triton server."""

    def __init__(self, url: str, name: str) -> None:
        """url: host:port of gRPC."""
        self._channel = grpc.aio.insecure_channel(url, options=UNLIMITED)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._name = name

    async def generate(self, tensors: Tensors) -> AsyncIterator[Piece]:
        request = _request(self._name, tensors)
        stream = self._stub.ModelStreamInfer()
        is_over = False
        try:
            await stream.write(request)
            await stream.done_writing()
            # To the stream's own end: Triton 2.51 may keep a request that is cancelled there.
            async for message in stream:
                if message.error_message:
                    raise _refusal(message.error_message)
                if message.infer_response.outputs:
                    piece = _piece(message.infer_response)
                    is_over = bool(piece.finish_reason)
                    yield piece
            if not is_over:
                raise ApiError(503, "the server ended the request: send it again later")
        except grpc.RpcError as error:
            raise ApiError(503, "the model is not available: send it again later") from error
        finally:
            stream.cancel()

    async def is_ready(self) -> bool:
        asked = service_pb2.ModelReadyRequest(name=self._name)
        with contextlib.suppress(grpc.RpcError):
            return bool((await self._stub.ModelReady(asked)).ready)
        return False

    async def close(self) -> None:
        await self._channel.close()


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


def _refusal(message: str) -> ApiError:
    found = REFUSED.match(message)
    if found is None:
        return ApiError(503, message, retry_after_s=1)
    name = FIELDS.get(found[1], found[1])
    text = message[len(found[1]) :].replace("text_input has", "the prompt has")
    return ApiError(400, name + text, name)
