"""Streams of one request over both transports, as the commands need them.

A transport's `stream` yields each response as a dict by output name, STRING as str. It raises
StreamError with the server's own message. The one-file clients of clients/ show the same to users.
"""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from smartspec_launch.address import DIRECT, Address
from smartspec_py.api.contract import INPUTS, MODEL_NAME

TIMEOUT_S = 60.0
_DTYPES: dict[str, tuple[str, type]] = {
    "STRING": ("BYTES", np.object_),
    "INT32": ("INT32", np.int32),
    "UINT64": ("UINT64", np.uint64),
    "FP32": ("FP32", np.float32),
    "BOOL": ("BOOL", np.bool_),
}


class StreamError(RuntimeError):
    """The server refused or failed the request, or fell silent."""


class Transport(Protocol):
    """fields: inputs by name; scalars only."""

    name: str

    def stream(self, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]: ...


class HttpTransport:
    """Server-sent events of `generate_stream`."""

    name = "HTTP"

    def __init__(self, address: Address) -> None:
        self._url = f"{address.http_url}/v2/models/{MODEL_NAME}/generate_stream"

    def stream(self, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(fields).encode(), headers)
        is_over = False
        try:
            with DIRECT.open(request, timeout=TIMEOUT_S) as lines:
                for line in lines:
                    if line.startswith(b"data:"):
                        response = self._response(json.loads(line.removeprefix(b"data:")))
                        is_over = bool(response.get("finish_reason"))
                        yield response
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace").strip()
            raise StreamError(f"HTTP {error.code}: {reason}") from error
        except OSError as error:
            raise StreamError(str(error)) from error
        if not is_over:  # urllib tells nothing of a body that breaks off
            raise StreamError("the connection ended before the last response")

    @staticmethod
    def _response(event: dict[str, Any]) -> dict[str, Any]:
        if "error" in event:
            raise StreamError(event["error"])
        return event


class GrpcTransport:
    """ModelStreamInfer, one stream a request on one connection. Use as a context manager."""

    name = "gRPC"

    def __init__(self, address: Address) -> None:
        import tritonclient.grpc as triton

        self._client = triton.InferenceServerClient(address.grpc_url)

    def __enter__(self) -> GrpcTransport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()

    def stream(self, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        is_over = False
        self._client.start_stream(lambda result, error: responses.put((result, error)))
        try:
            self._client.async_stream_infer(
                MODEL_NAME, grpc_inputs(fields), enable_empty_final_response=True
            )
            while not is_over:
                result, error = self._next(responses)
                if error is not None:
                    raise StreamError(error.message())
                response = result.get_response()
                is_over = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield {item.name: _python(result, item.name) for item in response.outputs}
        finally:
            # Only what is not over: Triton 2.51 may keep a request that is cancelled at its end.
            self._client.stop_stream(cancel_requests=not is_over)

    @staticmethod
    def _next(responses: queue.Queue[tuple[Any, Any]]) -> tuple[Any, Any]:
        try:
            return responses.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise StreamError(f"no response for {TIMEOUT_S:.0f} s") from None


def grpc_inputs(fields: Mapping[str, Any]) -> list[Any]:
    """The fields as tritonclient's InferInput, by the types of the contract; shape [1, 1]."""
    import tritonclient.grpc as triton

    dtypes = {tensor.name: tensor.dtype for tensor in INPUTS}
    inputs = []
    for name, value in fields.items():
        wire, numpy_type = _DTYPES[dtypes[name]]
        item = triton.InferInput(name, [1, 1], wire)
        encoded = value.encode() if isinstance(value, str) else value
        item.set_data_from_numpy(np.array([[encoded]], dtype=numpy_type))
        inputs.append(item)
    return inputs


def _python(result: Any, name: str) -> Any:
    value = result.as_numpy(name).item()
    return value.decode() if isinstance(value, bytes) else value
