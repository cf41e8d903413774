"""The gRPC port: what passes, what is refused, and the ends of streams."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from stand_in import StandIn, running_gateway, tensor
from tritonclient.grpc import service_pb2, service_pb2_grpc

from smartspec_gateway import grpc_front
from smartspec_launch.address import Address
from smartspec_py.api.contract import GATEWAY

WAIT_S = 60.0
Code = grpc.StatusCode


@pytest.fixture
def stub(gateway: Address) -> Iterator[Any]:
    with grpc.insecure_channel(gateway.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(**fields: Any) -> Any:
    return service_pb2.ModelInferRequest(model_name="smartspec", **fields)


def code_of(call: Any, *, streams: bool = True) -> tuple[Code, str]:
    """How the call ends."""
    try:
        list(call) if streams else call.result()
    except grpc.RpcError as error:
        return error.code(), error.details()
    return Code.OK, ""


@pytest.mark.parametrize(
    "begin", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"], ids=["silent", "HTTP/2"]
)
def test_idle_connections_are_closed(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    """One that sends nothing, and one that says it speaks HTTP/2. Others need their places."""
    monkeypatch.setattr(grpc_front, "RECEIVE_S", 0.5)
    monkeypatch.setattr(grpc_front, "KEEP_ALIVE_S", 0.5)
    with running_gateway(triton.grpc_port, triton.http_port) as address:
        place = ("127.0.0.1", address.grpc_port)
        with socket.create_connection(place, WAIT_S) as idle:
            idle.sendall(begin)
            while data := idle.recv(1 << 16):
                if b"\x07\0\0\0\0\0" in data:  # GOAWAY
                    break


def test_requests_and_responses_pass_unchanged(triton: StandIn, stub: Any) -> None:
    """Several requests on one stream, and what this version does not know."""
    requests, metadata = [], []

    def answer(asked: Any, context: Any) -> Iterator[Any]:
        requests.append(asked)
        metadata.append(dict(context.invocation_metadata()).get("triton_grpc_error"))
        yield tensor("é", id=asked.id)

    triton.handler = answer
    sent = [request(id=number, raw_input_contents=[b"\xff"]) for number in ("1", "2")]
    found = list(stub.ModelStreamInfer(iter(sent), metadata=[("triton_grpc_error", "true")]))
    assert requests == sent
    assert found == [tensor("é", id="1"), tensor("é", id="2")]
    assert metadata == ["true", "true"]
    assert stub.ServerLive(service_pb2.ServerLiveRequest()).live


def test_a_stream_passes_few_requests_before_their_responses(
    triton: StandIn, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at most, here; a response makes room for one more."""
    monkeypatch.setattr(grpc_front, "MAX_UNANSWERED", 3)
    taken: queue.Queue[str] = queue.Queue()
    may_answer = threading.Event()

    def take(asked: Any, context: Any) -> Iterator[Any]:
        taken.put(asked.id)
        if asked.id == "2":
            may_answer.wait(WAIT_S)
            yield tensor("a")

    triton.handler = take
    call = stub.ModelStreamInfer(request(id=str(number)) for number in range(10))
    assert [taken.get(timeout=WAIT_S) for _ in range(3)] == ["0", "1", "2"]
    may_answer.set()
    assert taken.get(timeout=WAIT_S) == "3"
    with pytest.raises(queue.Empty):
        taken.get(timeout=0.3)
    call.cancel()


CLASSIFIED = {"name": "a", "parameters": {"classification": {"int64_param": 2}}}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"id": "x" * 256}, Code.OK),
        ({"id": "x" * 257}, Code.INVALID_ARGUMENT),
        ({"outputs": [CLASSIFIED]}, Code.INVALID_ARGUMENT),
        ({"inputs": [CLASSIFIED]}, Code.INVALID_ARGUMENT),
        ({"parameters": {GATEWAY: {"string_param": ""}}}, Code.INVALID_ARGUMENT),
        ({"raw_input_contents": [bytes(9 << 20)]}, Code.RESOURCE_EXHAUSTED),
    ],
)
def test_what_could_end_triton_never_reaches_it(
    triton: StandIn, stub: Any, fields: dict[str, Any], code: Code
) -> None:
    requests = []

    def answer(asked: Any, context: Any) -> Iterator[Any]:
        requests.append(asked)
        yield tensor("a")

    triton.handler = answer
    assert code_of(stub.ModelStreamInfer(iter([request(**fields)])))[0] is code
    assert bool(requests) == (code is Code.OK)


def test_other_methods_are_unimplemented(stub: Any) -> None:
    for call in (
        stub.RepositoryIndex.future(service_pb2.RepositoryIndexRequest()),
        stub.SystemSharedMemoryStatus.future(service_pb2.SystemSharedMemoryStatusRequest()),
        stub.ModelInfer.future(request()),
    ):
        assert code_of(call, streams=False)[0] is Code.UNIMPLEMENTED


def test_an_error_of_triton_passes_with_its_code(triton: StandIn, stub: Any) -> None:
    def refuse(asked: Any, context: Any) -> Iterator[Any]:
        context.abort(Code.UNAVAILABLE, "the queue is full")
        yield

    triton.handler = refuse
    found = code_of(stub.ModelStreamInfer(iter([request()])))
    assert found == (Code.UNAVAILABLE, "the queue is full")


def test_a_client_that_cancels_cancels_in_triton(triton: StandIn, stub: Any) -> None:
    has_ended = threading.Event()

    def answer(asked: Any, context: Any) -> Iterator[Any]:
        context.add_callback(has_ended.set)
        yield tensor("a")
        assert has_ended.wait(WAIT_S)

    triton.handler = answer
    call = stub.ModelStreamInfer(iter([request()]))
    next(call)
    call.cancel()
    assert has_ended.wait(WAIT_S)


def test_a_draining_gateway_refuses_new_streams(triton: StandIn) -> None:
    pipe = os.pipe()
    with (
        running_gateway(triton.grpc_port, triton.http_port, pipe) as address,
        grpc.insecure_channel(address.grpc_url) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = service_pb2.ModelReadyRequest(name="smartspec")
        assert stub.ModelReady(asked).ready
        os.write(pipe[1], b'{"is_draining": true}\n')
        for _ in range(500):
            found, _ = code_of(stub.ModelStreamInfer(iter([request()])))
            if found is Code.UNAVAILABLE:
                break
            threading.Event().wait(0.02)
        assert code_of(stub.ModelReady.future(asked), streams=False)[0] is Code.UNAVAILABLE
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
