"""Triton's gRPC service, with limits. Messages pass through as bytes; only requests are read, and
get the name by which Triton knows the model.

Served are streamed inference, health, metadata, configuration and statistics. Other methods are
unimplemented. One tensor parameter is enough to end Triton 2.51 (`classification` of an output), so
tensors must have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from smartspec_gateway.limits import (
    KEEP_ALIVE_S,
    MAX_CALLS,
    MAX_ID_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_UNANSWERED,
    RECEIVE_S,
    Limits,
    Refused,
)
from smartspec_gateway.names import Names, name_in
from smartspec_gateway.workers import Workers
from smartspec_py.api.contract import GATEWAY

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
DIRECT = ("grpc.enable_http_proxy", 0)
"""Triton is on this machine, whatever `http_proxy` says."""
STRICT = "triton_grpc_error"
"""Metadata of a stream: Triton ends it with the status of an error, instead of a message with only
its text."""

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
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
UNARY_BYTES = 4096
UNARY_S = 10.0
KIND = "grpc"
"""Of work on a message."""

MAX_TENSORS = 256
"""Of one request, and of its outputs."""

OF_TENSORS = "parameters of tensors (shared memory, classification) are not supported"


class GrpcFront:
    """The server. `start` binds its port."""

    def __init__(self, triton_url: str, limits: Limits, workers: Workers, names: Names) -> None:
        """triton_url: host:port of Triton's gRPC."""
        self._limits, self._workers, self._names = limits, workers, names
        self._num_streams = 0
        self._channel = grpc.aio.insecure_channel(triton_url, options=[*UNLIMITED, DIRECT])
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
                request = self._names.message(request, name_in(request))
                return bytes(await call(request, timeout=UNARY_S))
            except Refused as refused:
                await context.abort(CODES[refused.status], refused.message)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            raise AssertionError("abort raises")

        return answer

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        strict = dict(context.invocation_metadata()).get(STRICT)
        call = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(
            metadata=() if strict is None else ((STRICT, strict),)
        )
        refusals: list[Refused] = []
        unanswered = Unanswered()
        feeding = asyncio.ensure_future(self._feed(requests, call, refusals, unanswered))
        self._num_streams += 1
        try:
            async for response in call:
                unanswered.count_response()
                yield response
        except asyncio.CancelledError:
            if not refusals:
                raise
            await context.abort(CODES[refusals[0].status], refusals[0].message)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        finally:
            self._num_streams -= 1
            feeding.cancel()
            call.cancel()

    async def _feed(
        self,
        requests: AsyncIterator[bytes],
        call: Any,
        refusals: list[Refused],
        unanswered: Unanswered,
    ) -> None:
        """Pass requests on. A request that is refused ends the stream."""
        try:
            async for raw in requests:
                try:
                    self._limits.hold(len(raw))
                    self._limits.check_open()
                    self._limits.check_size(len(raw))
                    name = await self._workers.run(checked, KIND, raw)
                    await call.write(self._names.message(raw, name))
                finally:
                    self._limits.held_bytes -= len(raw)
                unanswered.num += 1
                await unanswered.wait_below(lambda: MAX_UNANSWERED // self._num_streams)
            await call.done_writing()
        except Refused as refused:
            refusals.append(refused)
            call.cancel()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call has ended, and its reader gets the reason


class Unanswered:
    """The requests of one stream that wait for a response.

    Triton hands all requests of a stream to the model at once, in order, before its queue is
    checked. Without a bound, one stream holds up all other clients and fills the memory. Which
    request a response belongs to is not known. Requests with many responses therefore make room for
    more requests than they should, but each response takes the model some time.
    """

    def __init__(self) -> None:
        self.num = 0
        self._has_changed = asyncio.Event()

    def count_response(self) -> None:
        self.num = max(0, self.num - 1)
        self._has_changed.set()

    async def wait_below(self, limit: Callable[[], int]) -> None:
        """Wait for responses while there are `limit` requests or more, and at least one."""
        while self.num >= max(1, limit()):
            self._has_changed.clear()
            await self._has_changed.wait()


def checked(kind: str, raw: bytes, context_len: int) -> str:
    """The model's name. Raises Refused. raw: a ModelInferRequest."""
    try:
        request = service_pb2.ModelInferRequest.FromString(raw)
    except DecodeError:
        raise Refused(400, "request: must be a ModelInferRequest") from None
    if len(request.id.encode()) > MAX_ID_BYTES:
        raise Refused(400, f"id: must be text of at most {MAX_ID_BYTES} bytes")
    if (most := max(len(request.inputs), len(request.outputs))) > MAX_TENSORS:
        raise Refused(400, f"request: got {most} tensors, must have at most {MAX_TENSORS}")
    if any(tensor.parameters for tensor in (*request.inputs, *request.outputs)):
        raise Refused(400, OF_TENSORS)
    if GATEWAY in request.parameters:  # its empty response would count as an answer
        raise Refused(400, f"{GATEWAY}: only the gateway may send it")
    return str(request.model_name)


async def _refuse_infer(request: bytes, context: Any) -> bytes:
    await context.abort(
        grpc.StatusCode.UNIMPLEMENTED, "ModelInfer: the model streams; use ModelStreamInfer"
    )
    raise AssertionError("abort raises")
