"""Events pass one by one, and an end is seen where either side breaks off."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from http_client import BODY, GENERATE, WAIT_S, asked, error_of, post
from stand_in import Break, Document, StandIn, running_gateway, text

from smartspec_gateway import protocol
from smartspec_launch.address import Address

pytestmark = pytest.mark.slow  # half a minute together; they run beside the others


def test_events_come_one_by_one(triton: StandIn, gateway: Address) -> None:
    """The second event leaves Triton when the client has read the first. No character in an event
    is a line end for any client."""
    is_read = threading.Event()

    def answer(fields: Document) -> Iterator[Document]:
        yield text("a\u2028\x85")
        assert is_read.wait(WAIT_S)
        yield text("b")

    triton.generate = answer
    with asked(gateway, GENERATE + "_stream") as response:
        first = response.readline() + response.readline()
        assert len(first.decode().splitlines()) == 2
        assert json.loads(first.removeprefix(b"data:"))["text_output"] == "a\u2028\x85"
        is_read.set()
        last = response.read()
    assert json.loads(last.removeprefix(b"data:"))["text_output"] == "b"


@pytest.mark.parametrize("is_early", [False, True])
def test_a_stream_that_breaks_off_is_no_complete_one(
    triton: StandIn, gateway: Address, is_early: bool
) -> None:
    """Before its first response it is refused."""

    def answer(fields: Document) -> Iterator[Document]:
        if not is_early:
            yield text("a")
        raise Break

    triton.generate = answer
    with asked(gateway, GENERATE + "_stream") as response:
        if is_early:
            status, reason = error_of(response)
            assert status == 503
        else:
            with pytest.raises(http.client.IncompleteRead) as caught:
                response.read()
            last = caught.value.partial.rstrip().rpartition(b"data:")[2]
            reason = json.loads(last)["error"]
    assert "Triton ended the connection" in reason


def test_an_error_after_the_first_response_is_an_event(triton: StandIn, gateway: Address) -> None:
    """Also where both arrive together."""
    triton.generate = lambda fields: iter([text("a"), {"error": "INTERNAL: no"}])
    with asked(gateway, GENERATE + "_stream") as response:
        first, last = (event.removeprefix(b"data:") for event in response.read().split(b"\n\n")[:2])
    assert json.loads(first)["text_output"] == "a"
    assert json.loads(last) == {"error": "no"}


def test_a_long_event_comes_whole(triton: StandIn, gateway: Address) -> None:
    """In many parts, and another one in the last of them."""
    long = "x" * 1_000_000
    triton.generate = lambda fields: iter([text(long), text("b")])
    with asked(gateway, GENERATE + "_stream") as response:
        found = [json.loads(line[5:])["text_output"] for line in response if line.strip()]
    assert found == [long, "b"]


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_cancels_its_request(
    triton: StandIn, gateway: Address, streams: bool
) -> None:
    """In the middle of a stream, and while nothing has come yet."""
    has_come = threading.Event()

    def answer(fields: Document) -> Iterator[Document | None]:
        if streams:
            yield text("a")
        has_come.set()
        while True:
            yield None

    triton.generate = answer
    route = GENERATE + "_stream" * streams
    client = socket.create_connection(("127.0.0.1", gateway.http_port), timeout=WAIT_S)
    client.sendall(post(BODY).replace(GENERATE.encode(), route.encode()))
    assert has_come.wait(WAIT_S)
    if streams:
        assert client.recv(1)
    assert not triton.has_left.is_set()
    client.close()
    assert triton.has_left.wait(WAIT_S)


def test_a_client_that_does_not_read_fills_no_memory(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's writes stop after what the sockets and buffers hold; later it is cut off."""
    monkeypatch.setattr(protocol, "SEND_S", 1.0)
    num_sent = 0

    def answer(fields: Document) -> Iterator[Document]:
        nonlocal num_sent
        while num_sent < 10_000:
            num_sent += 1
            yield text("x" * 10_000)

    triton.generate = answer
    with (
        running_gateway(triton.grpc_port, triton.http_port) as address,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(("127.0.0.1", address.http_port))
        client.sendall(post(BODY).replace(b"/generate", b"/generate_stream"))
        assert triton.has_left.wait(WAIT_S)
    assert num_sent < 3200
