"""Generates text with the served model, over gRPC."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from smartspec_openai.errors import ApiError

NUMPY_TYPES: Mapping[str, Any] = {
    "BYTES": np.object_,
    "INT32": np.int32,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
}

REFUSED = re.compile(r"^(\w+): (got|there|must|both)")
"""How the model begins a message about a field."""

FIELDS = {"text_input": "prompt", "stop_words": "stop", "embedding_bias_words": "logit_bias"}
"""Tensors with other names than the fields that they come from."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text. finish_reason: empty until the last piece, then that of the model.

    num_prompt, metrics: on the last piece only. metrics: JSON, if asked for.
    num_steps, num_drafted, num_accepted: of the request so far.
    """

    text: str
    num_tokens: int
    finish_reason: str = ""
    num_prompt: int = 0
    metrics: str | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class Model(Protocol):
    """The served model."""

    def generate(self, tensors: Mapping[str, tuple[str, Any]]) -> AsyncIterator[Piece]:
        """tensors: type and value by name; a list has shape [1, n]. Closing the iterator cancels
        the request. Raises ApiError."""
        ...

    async def is_ready(self) -> bool: ...

    async def close(self) -> None: ...


class TritonModel:
    """A model of a Triton server."""

    def __init__(self, url: str, name: str) -> None:
        """url: host:port of gRPC."""
        self._client = tritonclient.grpc.aio.InferenceServerClient(url)
        self._name = name

    async def generate(self, tensors: Mapping[str, tuple[str, Any]]) -> AsyncIterator[Piece]:
        inputs = [_tensor(name, *given) for name, given in tensors.items()]

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": self._name, "inputs": inputs}

        responses = self._client.stream_infer(requests())
        is_over = False
        try:
            # To the stream's own end: Triton 2.51 may keep a request that is cancelled there.
            async for result, error in responses:
                if error is not None:
                    raise _refusal(str(error.message()))
                if result.get_response().outputs:
                    piece = _piece(result)
                    is_over = bool(piece.finish_reason)
                    yield piece
            if not is_over:
                raise ApiError(503, "the server ended the request: send it again later")
        except (grpc.RpcError, InferenceServerException) as error:
            raise ApiError(503, "the model is not available: send it again later") from error
        finally:
            responses.cancel()

    async def is_ready(self) -> bool:
        with contextlib.suppress(grpc.RpcError, InferenceServerException):
            return bool(await self._client.is_model_ready(self._name))
        return False

    async def close(self) -> None:
        await self._client.close()


def _tensor(name: str, kind: str, value: Any) -> Any:
    values = np.array([value if isinstance(value, list) else [value]], dtype=NUMPY_TYPES[kind])
    found = tritonclient.grpc.InferInput(name, list(values.shape), kind)
    found.set_data_from_numpy(values)
    return found


def _piece(result: Any) -> Piece:
    values = {one.name: result.as_numpy(one.name).item() for one in result.get_response().outputs}
    metrics = values.get("metrics")
    return Piece(
        values["text_output"].decode(),
        values.get("num_output_tokens", 0),
        values["finish_reason"].decode(),
        values.get("num_input_tokens", 0),
        metrics.decode() if metrics else None,
        values.get("num_steps", 0),
        values.get("total_draft_tokens", 0),
        values.get("total_accepted_draft_tokens", 0),
    )


def _refusal(message: str) -> ApiError:
    found = REFUSED.match(message)
    if found is None:
        return ApiError(503, message, retry_after_s=1)
    name = FIELDS.get(found[1], found[1])
    return ApiError(400, name + message[len(found[1]) :], name)
