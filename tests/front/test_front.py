"""The front between a client and a stand-in for Triton: one answer for each request, passed on as
it comes, and an end that is seen where either side breaks off."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest
from stand_in import MAX_BODY_BYTES, StandIn, running_front

from smartspec_launch.address import free_address
from smartspec_launch.front import protocol
from smartspec_py.serving.inbox import Inbox
from smartspec_py.serving.request import RequestError

GENERATE = "/v2/models/smartspec/generate"
BODY = b'{"text_input": "a", "max_tokens": 1}'
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"text_output": "a"}\n\n'
WAIT_S = 10.0


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    yield connection
    connection.close()


@contextmanager
def asked(port: int) -> Iterator[http.client.HTTPResponse]:
    """The response to a valid request."""
    with connected(port) as connection:
        connection.request("POST", GENERATE, BODY)
        with connection.getresponse() as response:
            yield response


def error_of(response: http.client.HTTPResponse) -> tuple[int, str]:
    return response.status, json.loads(response.read())["error"]


def talk(port: int, sent: bytes) -> bytes:
    """What comes back until the front closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(sent)
        received = b""
        while data := client.recv(65_536):
            received += data
    return received


def test_a_request_and_its_response_pass_unchanged(triton: StandIn, front: int) -> None:
    """The body comes in one piece, without what belongs to the connection of the client."""
    requests = []

    def answer(connection: socket.socket, request: bytes) -> None:
        requests.append(request)
        connection.sendall(
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
            b"Content-Encoding: gzip\r\nX-Own: 1\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x00\x01"
        )

    triton.handler = answer
    headers = {"Transfer-Encoding": "chunked", "X-Own": "2", "Connection": "X-Other"}
    chunks = iter([BODY[:3], BODY[3:]])
    with connected(front) as connection:
        connection.request("POST", GENERATE, chunks, headers, encode_chunked=True)
        with connection.getresponse() as response:
            assert (response.status, response.read()) == (400, b"\x1f\x8b\x00\x01")
    assert response.headers.items() == [
        ("Content-Type", "application/json"),
        ("Content-Encoding", "gzip"),
        ("X-Own", "1"),
        ("Content-Length", "4"),
    ]
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert body == BODY
    lines = head.lower().split(b"\r\n")
    assert lines[0] == f"post {GENERATE} http/1.1".encode()
    assert b"content-length: 36" in lines
    assert b"x-own: 2" in lines
    assert not [line for line in lines if line.startswith((b"transfer-enc", b"connection"))]


def test_events_come_one_by_one(triton: StandIn, front: int) -> None:
    """The second event leaves Triton when the client has read the first."""
    is_read = threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(STREAM_HEAD + chunk(EVENT))
        assert is_read.wait(WAIT_S)
        connection.sendall(chunk(EVENT) + b"0\r\n\r\n")

    triton.handler = answer
    with asked(front) as response:
        assert response.readline() + response.readline() == EVENT
        is_read.set()
        assert response.read() == EVENT


def test_a_stream_that_breaks_off_is_no_complete_one(triton: StandIn, front: int) -> None:
    triton.handler = lambda connection, _: connection.sendall(STREAM_HEAD + chunk(EVENT))
    with asked(front) as response, pytest.raises(http.client.IncompleteRead) as caught:
        response.read()
    first, _, last = caught.value.partial.partition(b"\n\n")
    assert first + b"\n\n" == EVENT
    assert "Triton ended the connection" in json.loads(last.removeprefix(b"data:"))["error"]


def test_an_event_that_breaks_off_is_not_mended(triton: StandIn, front: int) -> None:
    triton.handler = lambda connection, _: connection.sendall(STREAM_HEAD + chunk(EVENT[:9]))
    with asked(front) as response, pytest.raises(http.client.IncompleteRead) as caught:
        response.read()
    assert caught.value.partial == EVENT[:9]


def test_no_answer_of_triton_is_502(triton: StandIn, front: int) -> None:
    with asked(front) as response:
        status, message = error_of(response)
    assert status == 502
    assert "Triton ended the connection" in message


def test_no_triton_is_503() -> None:
    with (
        running_front(f"http://127.0.0.1:{free_address().http_port}") as port,
        asked(port) as response,
    ):
        status, message = error_of(response)
    assert status == 503
    assert "Triton does not answer" in message


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_the_connection_to_triton(
    triton: StandIn, front: int, streams: bool
) -> None:
    """In the middle of a stream, and while nothing has come yet."""
    has_come, has_ended = threading.Event(), threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        if streams:
            connection.sendall(STREAM_HEAD + chunk(EVENT))
        has_come.set()
        assert connection.recv(1) == b""
        has_ended.set()

    triton.handler = answer
    client = socket.create_connection(("127.0.0.1", front), timeout=WAIT_S)
    client.sendall(_post(BODY))
    assert has_come.wait(WAIT_S)
    if streams:
        assert client.recv(1)
    client.close()
    assert has_ended.wait(WAIT_S)


def test_a_client_that_does_not_read_fills_no_memory(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's writes stop after what the sockets and two buffers hold; later it is cut off."""
    monkeypatch.setattr(protocol, "SEND_S", 1.0)
    num_sent, has_ended = 0, threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        nonlocal num_sent
        connection.sendall(STREAM_HEAD)
        try:
            for _ in range(10_000):
                connection.sendall(chunk(EVENT * 400))
                num_sent += 400 * len(EVENT)
        except OSError:
            has_ended.set()

    triton.handler = answer
    with running_front(triton.url) as port, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(("127.0.0.1", port))
        client.sendall(_post(BODY))
        assert has_ended.wait(WAIT_S)
    assert num_sent < 32 << 20


def _post(body: bytes, headers: bytes = b"", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n".encode()
    return head + headers + b"\r\n" + body


CHUNKED = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n".encode()

REFUSED: list[tuple[str, bytes, int]] = [
    ("body said to be too long", _post(b"", length=MAX_BODY_BYTES + 1), 413),
    ("body too long", _post(b" " * 3_000_000), 413),
    ("chunk too long", CHUNKED + b"\r\n" + chunk(b" " * (MAX_BODY_BYTES + 1)), 413),
    ("many chunks", CHUNKED + b"\r\n" + chunk(b" ") * 600_000, 413),
    ("bad chunk", CHUNKED + b"\r\n-1\r\n", 400),
    ("two framings", CHUNKED + b"Content-Length: 5\r\n\r\n", 400),
    ("two lengths", _post(BODY, b"Content-Length: 5\r\n"), 400),
    ("other encoding", CHUNKED.replace(b"chunked", b"gzip") + b"\r\n", 501),
    ("long header", _post(BODY, b"X: %s\r\n" % (b"y" * 1_000_000)), 431),
    ("garbage", b"\x16\x03\x01\r\n\r\n", 400),
    ("other version", b"GET /v2 HTTP/3.0\r\n\r\n", 505),
]


@pytest.mark.parametrize(
    ("sent", "status"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_passes_a_bound_is_answered_once_and_closed(
    front: int, sent: bytes, status: int
) -> None:
    """The client that sends it all before it reads gets the answer as well."""
    head, _, body = talk(front, sent).partition(b"\r\n\r\n")
    phrase = HTTPStatus(status).phrase
    assert head.startswith(f"HTTP/1.1 {status} {phrase}\r\n".encode())
    assert list(json.loads(body)) == ["error"]


def test_a_refusal_of_the_application_keeps_the_connection(triton: StandIn, front: int) -> None:
    encoded = {"Content-Encoding": "gzip"}
    with connected(front) as connection:
        connection.connect()
        sock = connection.sock
        for body, headers, status in ((b"[", {}, 400), (BODY, encoded, 415), (b"[", {}, 400)):
            connection.request("POST", GENERATE, body, headers)
            with connection.getresponse() as response:
                assert error_of(response)[0] == status
            assert connection.sock is sock


def test_a_request_that_does_not_arrive_is_given_up(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all, half a header, half a body; and the second request on a connection."""
    monkeypatch.setattr(protocol, "RECEIVE_S", 0.5)
    refused = b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n"
    with running_front(triton.url) as port:
        for sent in (b"", b"POST /v2 HT", _post(b"{", length=10)):
            assert talk(port, sent).startswith(b"HTTP/1.1 408 ")
        first, second = talk(port, refused + b"GET").split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"404")
        assert second.startswith(b"408")


def test_more_connections_than_allowed_are_told_so(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_front(triton.url) as port:
        monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 2)
        address = ("127.0.0.1", port)
        with socket.create_connection(address) as one, socket.create_connection(address) as two:
            for each in (one, two):
                each.sendall(b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n")
                assert each.recv(100).startswith(b"HTTP/1.1 404")
            assert talk(port, b"").startswith(b"HTTP/1.1 503 ")


def test_it_ends_with_its_launcher() -> None:
    """Its standard input is a pipe of the launcher, which is closed when the launcher dies."""
    port = free_address().http_port
    command = [sys.executable, "-m", "smartspec_launch.front", f"--port={port}"]
    command.append("--triton=http://127.0.0.1:1")
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(WAIT_S) == 0


def test_it_loads_no_model_library() -> None:
    program = (
        "import sys; import smartspec_launch.front.__main__; "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def draining(port: int, pipe: tuple[int, int]) -> None:
    """Return when the front drains, as `Companion.drain` tells it."""
    os.write(pipe[1], b"drain\n")
    for _ in range(500):
        with connected(port) as connection:
            connection.request("GET", "/v2/models/smartspec/ready")
            if connection.getresponse().status == 503:
                return
        threading.Event().wait(0.02)
    raise AssertionError("the front does not drain")


def ok(connection: socket.socket, request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def test_a_draining_front_refuses_new_requests_with_503(triton: StandIn) -> None:
    """Triton would say 404. It is still asked whether it is alive."""
    triton.handler = ok
    pipe = os.pipe()
    with running_front(triton.url, pipe) as port:
        draining(port, pipe)
        with asked(port) as response:
            assert error_of(response) == (
                503,
                "the server is shutting down: send the request to another server",
            )
        with connected(port) as connection:
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().status == 200


@pytest.mark.parametrize(
    ("status", "expected"), [("404 Not Found", 503), ("400 Bad", 503), ("200 OK", 200)]
)
def test_a_request_on_its_way_when_the_drain_begins(
    triton: StandIn, status: str, expected: int
) -> None:
    """Triton's refusal becomes 503, its answer passes."""
    has_come, may_answer = threading.Event(), threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        if request.startswith(b"GET"):
            ok(connection, request)
            return
        has_come.set()
        assert may_answer.wait(WAIT_S)
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    triton.handler = answer
    pipe = os.pipe()
    with running_front(triton.url, pipe) as port, connected(port) as connection:
        connection.request("POST", GENERATE, BODY)
        assert has_come.wait(WAIT_S)
        draining(port, pipe)
        may_answer.set()
        assert connection.getresponse().status == expected


def full() -> str:
    """The backend's message."""
    with pytest.raises(RequestError) as caught:
        Inbox(0).check_open()
    return str(caught.value)


FULL = b'{"error":"%s"}' % full().encode()
OTHER = b'{"error":"seed: the queue is full"}'


@pytest.mark.parametrize(
    ("body", "status"),
    [(FULL, 503), (b"data: " + FULL + b"\n\n", 503), (OTHER, 400), (b"", 400)],
    ids=["full", "full, as an event", "another", "empty"],
)
def test_a_full_queue_becomes_503(triton: StandIn, front: int, body: bytes, status: int) -> None:
    """Triton answers 400 to every error of a model. The message stays the same."""
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    triton.handler = lambda connection, _: connection.sendall(head + body)
    with asked(front) as response:
        assert response.status == status
        received = response.read()
    assert json.loads(received) == json.loads(FULL) if status == 503 else received == body
