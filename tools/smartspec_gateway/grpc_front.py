"""Triton's gRPC service, with limits. Messages pass through as bytes; only requests are read.

Served are streamed inference, health, metadata, configuration and statistics. Other methods are
unimplemented. One tensor parameter is enough to end Triton 2.51 (`classification` of an output), so
tensors must have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from smartspec_gateway.limits import (
    KEEP_ALIVE_S,
    MAX_CALLS,
    MAX_ID_BYTES,
    MAX_MESSAGE_BYTES,
    RECEIVE_S,
    Limits,
    Refused,
)
from smartspec_gateway.triton import STRICT, UNLIMITED

SERVICE = "inference.GRPCInferenceService"
UNARY = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
)
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
UNARY_BYTES = 4096
UNARY_S = 10.0
OF_TENSORS = "parameters of tensors (shared memory, classification) are not supported"


class GrpcFront:
    """The server. `start` binds its port."""

    def __init__(self, triton_url: str, limits: Limits) -> None:
        """triton_url: host:port of Triton's gRPC."""
        self._limits = limits
        self._channel = grpc.aio.insecure_channel(triton_url, options=UNLIMITED)
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=MAX_CALLS,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_allowed_incoming_connections", limits.max_connections),
                # Otherwise idle clients keep their connections, and others get none.
                ("grpc.max_connection_idle_ms", round(1e3 * KEEP_ALIVE_S)),
                ("grpc.server_handshake_timeout_ms", round(1e3 * RECEIVE_S)),
            ],
        )
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._unary(name)) for name in UNARY}
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(_refuse_infer)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )

    async def start(self, host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        self._server.add_insecure_port(f"{shown}:{port}")
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
        await self._channel.close()

    def _unary(self, name: str) -> Any:
        call = self._channel.unary_unary(f"/{SERVICE}/{name}")

        async def answer(request: bytes, context: Any) -> bytes:
            try:
                if name.endswith("Ready"):
                    self._limits.check_open()
                if len(request) > UNARY_BYTES:
                    raise Refused(413, f"must be at most {UNARY_BYTES} bytes")
                return bytes(await call(request, timeout=UNARY_S))
            except Refused as refused:
                await context.abort(CODES[refused.status], refused.message)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            raise AssertionError("abort raises")

        return answer

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        strict = dict(context.invocation_metadata()).get(STRICT[0])
        call = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(
            metadata=() if strict is None else ((STRICT[0], strict),)
        )
        refusals: list[Refused] = []
        feeding = asyncio.ensure_future(self._feed(requests, call, refusals))
        try:
            async for response in call:
                yield response
        except asyncio.CancelledError:
            if not refusals:
                raise
            await context.abort(CODES[refusals[0].status], refusals[0].message)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        finally:
            feeding.cancel()
            call.cancel()

    async def _feed(
        self, requests: AsyncIterator[bytes], call: Any, refusals: list[Refused]
    ) -> None:
        """Pass requests on. A request that is refused ends the stream."""
        try:
            async for raw in requests:
                try:
                    self._limits.hold(len(raw))
                    self._limits.check_open()
                    self._limits.check_size(len(raw))
                    check_request(raw)
                    await call.write(raw)
                finally:
                    self._limits.held_bytes -= len(raw)
            await call.done_writing()
        except Refused as refused:
            refusals.append(refused)
            call.cancel()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call has ended, and its reader gets the reason


def check_request(raw: bytes) -> None:
    """Raises Refused. raw: a ModelInferRequest."""
    try:
        request = service_pb2.ModelInferRequest.FromString(raw)
    except DecodeError:
        raise Refused(400, "request: must be a ModelInferRequest") from None
    if len(request.id.encode()) > MAX_ID_BYTES:
        raise Refused(400, f"id: must be text of at most {MAX_ID_BYTES} bytes")
    if any(tensor.parameters for tensor in (*request.inputs, *request.outputs)):
        raise Refused(400, OF_TENSORS)


async def _refuse_infer(request: bytes, context: Any) -> bytes:
    await context.abort(
        grpc.StatusCode.UNIMPLEMENTED, "ModelInfer: the model streams; use ModelStreamInfer"
    )
    raise AssertionError("abort raises")
