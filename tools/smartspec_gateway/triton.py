"""The connection to Triton over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from smartspec_gateway.limits import Refused

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


class TritonError(Refused):
    """Triton or the model refused or failed a request. is_broken: the connection to Triton failed,
    so the answer may be incomplete."""

    def __init__(self, status: int, message: str, *, is_broken: bool = False) -> None:
        super().__init__(status, message)
        self.is_broken = is_broken


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
        # The model's own errors may come while the channel connects again.
        is_lost = self._channel.get_state() is not grpc.ChannelConnectivity.READY
        if is_lost and error.code() is grpc.StatusCode.UNAVAILABLE:
            message = "Triton ended the connection or does not answer: send the request again later"
            return TritonError(503, message, is_broken=True)
        return TritonError(STATUSES.get(error.code(), 500), error.details() or error.code().name)
