"""A gateway in a thread of this process, and a stand-in for Triton that does what a test says."""

from __future__ import annotations

import asyncio
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from smartspec_gateway.__main__ import serve
from smartspec_launch.address import DIRECT, Address, free_address
from smartspec_launch.gateway import OpenAi

Handler = Callable[[Any, Any], Iterator[Any]]
"""From a ModelInferRequest and the context of the call to the responses."""


class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Triton's gRPC service with `handler`, and Triton's HTTP port, which answers its path."""

    def __init__(self) -> None:
        self.handler: Handler = lambda request, context: iter([text("a")])
        self._grpc = grpc.server(ThreadPoolExecutor(16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._grpc)
        self.grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Http)
        self.http_port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._grpc.stop(0).wait()
        self._http.shutdown()
        self._http.server_close()

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            yield from self.handler(request, context)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == "smartspec")

    def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)


class _Http(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.path.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def text(value: str, **fields: Any) -> Any:
    """A response with this text."""
    answer = service_pb2.ModelInferResponse(model_name="smartspec", model_version="1", **fields)
    answer.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    raw = value.encode()
    answer.raw_output_contents.append(len(raw).to_bytes(4, "little") + raw)
    return service_pb2.ModelStreamInferResponse(infer_response=answer)


@contextmanager
def running_gateway(
    grpc_port: int,
    http_port: int,
    pipe: tuple[int, int] | None = None,
    openai: OpenAi | None = None,
    context_len: int = 512,
) -> Iterator[Address]:
    """Its address. grpc_port, http_port: of Triton. pipe: the lifeline and its other end, for tests
    that write to it. context_len: 0 if the model is not ready."""
    address = replace(
        free_address(),
        triton_grpc_port=grpc_port,
        triton_http_port=http_port,
        triton_metrics_port=http_port,
    )
    lifeline, end = pipe or os.pipe()
    os.write(end, b'{"context_len": %d}\n' % context_len)
    thread = threading.Thread(target=asyncio.run, args=(serve(address, openai, lifeline),))
    thread.start()
    try:
        _wait_until_it_answers(address.http_port)
        yield address
    finally:
        os.close(end)
        thread.join(20)
        assert not thread.is_alive()


def _wait_until_it_answers(port: int) -> None:
    for _ in range(500):
        try:
            with DIRECT.open(f"http://127.0.0.1:{port}/v2", timeout=5.0):
                return
        except OSError as error:
            if hasattr(error, "code"):
                return
            threading.Event().wait(0.02)
    raise AssertionError("the gateway does not answer")
