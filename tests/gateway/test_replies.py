"""Replies that come past Triton: whose they are, their order, and the ends of requests."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from stand_in import StandIn, running_gateway, text

from smartspec_launch.address import Address
from smartspec_py.serving.replies import KEY_PARAMETER, ReplyChannel

WAIT_S = 10.0
GENERATE_STREAM = "/v2/models/%s/generate_stream"
BODY = b'{"text_input": "a", "max_tokens": 1, "id": "mine"}'


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def backend(pair: tuple[socket.socket, socket.socket]) -> socket.socket:
    """The backend's end. The gateway of `served` has the other one."""
    return pair[0]


@pytest.fixture
def served(triton: StandIn, pair: tuple[socket.socket, socket.socket]) -> Iterator[Address]:
    fd = pair[1].detach()
    with running_gateway(triton.grpc_port, triton.http_port, replies_fd=fd) as address:
        yield address


def ask(address: Address, model: str = "smartspec") -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", address.http_port, timeout=WAIT_S)
    connection.request("POST", GENERATE_STREAM % model, BODY)
    return connection


def events_of(connection: http.client.HTTPConnection) -> list[dict[str, Any]]:
    with connection.getresponse() as response:
        lines = response.read().decode().split("\n\n")[:-1]
    connection.close()
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def key_of(request: Any) -> str:
    key: str = request.parameters[KEY_PARAMETER].string_param
    return key


def line(key: str, **outputs: Any) -> bytes:
    return f"{key} {json.dumps(outputs)}\n".encode()


def test_all_replies_come_before_the_end(
    triton: StandIn, backend: socket.socket, served: Address
) -> None:
    """Triton ends each request at once after its replies were written."""

    def answer(request: Any, context: Any) -> Iterator[Any]:
        backend.sendall(b"".join(line(key_of(request), n=n) for n in range(2000)))
        return iter(())

    triton.handler = answer
    head = {"id": "mine", "model_name": "smartspec", "model_version": "1"}
    for _ in range(20):
        assert events_of(ask(served)) == [{**head, "n": n} for n in range(2000)]


def test_each_request_gets_its_own_replies(
    triton: StandIn, backend: socket.socket, served: Address
) -> None:
    """Also where a line comes in parts. Replies to nobody are dropped."""
    keys: list[str] = []
    both = threading.Barrier(2)

    def answer(request: Any, context: Any) -> Iterator[Any]:
        number = len(keys)
        keys.append(key_of(request))
        both.wait(WAIT_S)
        if number == 0:
            lines = line(keys[0], n=0) + line("nobody", n=2) + line(keys[1], n=1)
            for byte in lines:
                backend.sendall(bytes([byte]))
        both.wait(WAIT_S)
        return iter(())

    triton.handler = answer
    first, second = ask(served), ask(served)
    assert sorted(found["n"] for one in (first, second) for found in events_of(one)) == [0, 1]
    assert len(set(keys)) == 2


def test_an_error_comes_after_the_replies(
    triton: StandIn, backend: socket.socket, served: Address
) -> None:
    def answer(request: Any, context: Any) -> Iterator[Any]:
        backend.sendall(line(key_of(request), n=0))
        context.abort(grpc.StatusCode.INTERNAL, "no more")
        yield

    triton.handler = answer
    first, last = events_of(ask(served))
    assert first["n"] == 0
    assert last == {"error": "no more"}


def test_replies_of_an_alias_come_from_triton(triton: StandIn, served: Address) -> None:
    """It is an ensemble, which passes no parameters on."""
    parameters = []

    def answer(request: Any, context: Any) -> Iterator[Any]:
        parameters.append(dict(request.parameters))
        yield text("a")

    triton.handler = answer
    [event] = events_of(ask(served, "ensemble"))
    assert event["text_output"] == "a"
    assert parameters == [{}]


def test_the_backend_learns_that_a_client_has_left(
    triton: StandIn, backend: socket.socket, served: Address
) -> None:
    """Not of a client that has its whole answer."""
    may_end = threading.Event()
    channel = ReplyChannel(backend.detach())
    keys: list[str] = []

    def answer(request: Any, context: Any) -> Iterator[Any]:
        keys.append(key_of(request))
        channel.open(keys[-1])
        channel.send(keys[-1], '{"n": 0}')
        if len(keys) == 2:
            context.add_callback(may_end.set)
            may_end.wait(WAIT_S)
        return iter(())

    triton.handler = answer
    assert [event["n"] for event in events_of(ask(served))] == [0]
    leaving = ask(served)
    leaving.getresponse().readline()
    leaving.close()
    assert may_end.wait(WAIT_S)
    while not channel.has_left(keys[1]):
        threading.Event().wait(0.01)
    assert not channel.has_left(keys[0])
    channel.end()
