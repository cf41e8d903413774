"""A gateway in a thread of this process, and a stand-in for Triton that does what a test says."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from smartspec_gateway.__main__ import serve
from smartspec_launch.address import Address, free_address, responds
from smartspec_launch.gateway import OpenAi

Handler = Callable[[Any, Any], Iterator[Any]]
"""From a ModelInferRequest and the context of the call to the responses."""

Document = dict[str, Any]
Generate = Callable[[Document], Iterator[Document | None]]
"""From the fields of a request to the documents of its responses; None: nothing yet."""

EMPTY: Document = {"model_name": "smartspec", "model_version": "1"}
"""The first response, see `api.contract.GATEWAY`."""


class Break(Exception):
    """Raised by a handler: Triton dies."""


class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Triton's gRPC service with `handler`; its HTTP port, which answers a GET with the path and
    generates with `generate`. refusal: status and text of Triton's own, for all of them.
    has_left: when the gateway has cancelled a request."""

    def __init__(self) -> None:
        self.handler: Handler = lambda request, context: iter([tensor("a")])
        self.generate: Generate = lambda fields: iter([text("a")])
        self.refusal: tuple[int, str] | None = None
        self.has_left = threading.Event()
        self._grpc = grpc.server(ThreadPoolExecutor(16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._grpc)
        self.grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        handler = type("Handler", (_Http,), {"stand_in": self})
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
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
    stand_in: StandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.stand_in.refusal is not None:
            return self._refuse(*self.stand_in.refusal)
        return self._answer(200, self.path.encode())

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.stand_in.refusal is not None:
            return self._refuse(*self.stand_in.refusal)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for document in chain([EMPTY], self.stand_in.generate(fields)):
                if document is not None:
                    self._chunk(b"data: %s\n\n" % json.dumps(document, ensure_ascii=False).encode())
                if select.select([self.connection], [], [], 0.01 * (document is None))[0]:
                    raise ConnectionResetError
            self._chunk(b"")
        except Break:
            self.close_connection = True
        except ConnectionError:
            self.close_connection = True
            self.stand_in.has_left.set()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _refuse(self, status: int, reason: str) -> None:
        self._answer(status, json.dumps({"error": reason}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def text(value: str, **fields: Any) -> Document:
    """A response with this text."""
    return EMPTY | {"text_output": value} | fields


def tensor(value: str, **fields: Any) -> Any:
    """The same over gRPC."""
    answer = service_pb2.ModelInferResponse(model_name="smartspec", model_version="1", **fields)
    answer.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    raw = value.encode()
    answer.raw_output_contents.append(len(raw).to_bytes(4, "little") + raw)
    return service_pb2.ModelStreamInferResponse(infer_response=answer)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 30.0
    while not responds(url):
        assert time.monotonic() < deadline, f"{url} does not answer"
        time.sleep(0.02)


@contextmanager
def running_gateway(
    grpc_port: int,
    http_port: int,
    pipe: tuple[int, int] | None = None,
    openai: OpenAi | None = None,
    context_len: int = 512,
    names: Sequence[str] = (),
) -> Iterator[Address]:
    """Its address. grpc_port, http_port: of Triton. pipe: the lifeline and its other end, for tests
    that write to it. context_len: 0 if the model is not ready. names: of the model."""
    address = replace(
        free_address(),
        triton_grpc_port=grpc_port,
        triton_http_port=http_port,
        triton_metrics_port=http_port,
    )
    lifeline, end = pipe or os.pipe()
    os.write(end, b'{"context_len": %d}\n' % context_len)
    thread = threading.Thread(target=asyncio.run, args=(serve(address, openai, lifeline, names),))
    thread.start()
    try:
        wait_for(f"http://127.0.0.1:{address.http_port}/v2")
        yield address
    finally:
        os.close(end)
        thread.join(20)
        assert not thread.is_alive()
