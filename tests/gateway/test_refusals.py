"""What the gateway refuses by itself: requests that are malformed, too large or too slow, and more
connections than it may open. Each refusal has the format of its port."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from http_client import (
    BODY,
    CHUNKED,
    GENERATE,
    TOKENIZER,
    answered,
    chunk,
    connected,
    error_of,
    post,
    talk,
)
from stand_in import StandIn, running_gateway

from smartspec_gateway import protocol
from smartspec_launch.address import Address, free_address
from smartspec_launch.gateway import OpenAi

pytestmark = pytest.mark.slow  # half a minute together; they run beside the others
MAX_BODY_BYTES = 4 << 20
PAGE = "http://page.example"
MANY = b"," * 1_000_001

REFUSED: list[tuple[str, bytes, int]] = [
    ("body said to be too long", post(b"", length=MAX_BODY_BYTES + 1), 413),
    ("body too long", post(b" " * 10_000_000), 413),
    ("chunk too long", CHUNKED + b"\r\n" + chunk(b" " * (MAX_BODY_BYTES + 1)), 413),
    ("many chunks", CHUNKED + b"\r\n" + chunk(b" ") * 600_000, 413),
    ("long chunk extension", CHUNKED + b"\r\n1;" + b"a" * 2_000_000, 431),
    ("many trailers", CHUNKED + b"\r\n0\r\n" + b"X: y\r\n" * 200_000, 431),
    (
        "long length",
        CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: " + b"9" * 6000) + b"\r\n",
        400,
    ),
    ("many headers", post(BODY, b"X: y\r\n" * 30_000), 431),
    ("zero byte in a header", post(BODY, b"X: a\x00b\r\n"), 400),
    ("space in the name of a header", post(BODY, b"X Y: a\r\n"), 400),
    ("bad chunk", CHUNKED + b"\r\n-1\r\n", 400),
    ("two framings", CHUNKED + b"Content-Length: 5\r\n\r\n", 400),
    ("two lengths", post(BODY, b"Content-Length: 5\r\n"), 400),
    ("other encoding", CHUNKED.replace(b"chunked", b"gzip") + b"\r\n", 501),
    ("long header", post(BODY, b"X: %s\r\n" % (b"y" * 1_000_000)), 431),
    ("garbage", b"\x16\x03\x01\r\n\r\n", 400),
    ("many elements", post(MANY), 413),
    ("compressed", post(BODY, b"Content-Encoding: gzip\r\n"), 415),
]


@pytest.fixture(scope="module")
def both() -> Iterator[Address]:
    """A gateway with the OpenAI routes on its metrics port, before the model is ready."""
    nowhere = free_address()
    openai = OpenAi(nowhere.http_port, TOKENIZER, cors=[PAGE])
    with running_gateway(nowhere.grpc_port, 1, openai=openai, context_len=0) as address:
        yield Address(http_port=address.http_port, metrics_port=nowhere.http_port)


@pytest.mark.parametrize("is_openai", [False, True], ids=["Triton", "OpenAI"])
@pytest.mark.parametrize(
    ("sent", "status"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_passes_a_bound_is_refused(
    both: Address, sent: bytes, status: int, is_openai: bool
) -> None:
    """In the error format of the port. The client that sends it all before it reads gets the answer
    as well."""
    response, body = answered(both.metrics_port if is_openai else both.http_port, sent)
    assert (response.status, response.reason) == (status, HTTPStatus(status).phrase)
    error = json.loads(body)["error"]
    assert isinstance(error, dict) == is_openai
    assert error["message"] if is_openai else error


def test_a_body_that_is_too_long_may_have_an_image(both: Address) -> None:
    """It is not read, so the message tells both."""
    for port in (both.http_port, both.metrics_port):
        _, body = answered(port, post(b"", length=MAX_BODY_BYTES + 1))
        assert b" must be at most 4194304. " in body
        assert b" Images are not supported" in body


def test_refusals_have_the_format_of_the_route(both: Address) -> None:
    sent = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    response, body = answered(both.metrics_port, sent)
    assert response.status == 503
    error = {"type": "overloaded_error", "message": json.loads(body)["error"]["message"]}
    assert json.loads(body) == {"type": "error", "error": error}


READABLE = {
    "elements": (post(MANY), 413),
    "length": (post(b"", length=MAX_BODY_BYTES + 1), 413),
    "encoding": (post(BODY, b"Content-Encoding: gzip\r\n"), 415),
    "starting": (post(BODY), 503),
}


@pytest.mark.parametrize(("sent", "status"), READABLE.values(), ids=READABLE.keys())
def test_pages_of_an_allowed_origin_can_read_refusals(
    both: Address, sent: bytes, status: int
) -> None:
    for origin, may_read in ((PAGE, PAGE), ("http://other.example", None)):
        headers = f"Host: a\r\nOrigin: {origin}\r\n".encode()
        response, _ = answered(both.metrics_port, sent.replace(b"Host: a\r\n", headers))
        assert response.status == status
        assert response.getheader("access-control-allow-origin") == may_read


def test_a_refusal_of_the_application_keeps_the_connection(gateway: Address) -> None:
    encoded = {"Content-Encoding": "gzip"}
    with connected(gateway.http_port) as connection:
        connection.connect()
        sock = connection.sock
        for body, headers, status in ((b"[", {}, 400), (BODY, encoded, 415), (b"[", {}, 400)):
            connection.request("POST", GENERATE, body, headers)
            with connection.getresponse() as response:
                assert error_of(response)[0] == status
            assert connection.sock is sock


def test_the_port_of_metrics_serves_them_alone_and_within_limits(gateway: Address) -> None:
    """Triton 2.51 keeps a body of any size in memory, on this port too."""
    long = b"a" * (MAX_BODY_BYTES + 1)
    for method, path, sent, status in (
        ("GET", "/metrics", b"", 200),
        ("POST", "/metrics", b"", 405),
        ("GET", "/v2/models/smartspec/config", b"", 404),
        ("GET", "/metrics", long, 413),
    ):
        with connected(gateway.metrics_port) as connection:
            connection.request(method, path, sent)
            with connection.getresponse() as response:
                assert response.status == status
                assert response.read() == b"/metrics" or status != 200


def test_a_request_that_does_not_arrive_is_given_up(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all, half a header, half a body; and the second request on a connection."""
    monkeypatch.setattr(protocol, "RECEIVE_S", 0.5)
    refused = b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n"
    with running_gateway(triton.grpc_port, triton.http_port) as address:
        port = address.http_port
        for sent in (b"", b"POST /v2 HT", post(b"{", length=10)):
            assert talk(port, sent).startswith(b"HTTP/1.1 408 ")
        first, second = talk(port, refused + b"GET").split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"404")
        assert second.startswith(b"408")


def test_more_connections_than_allowed_are_told_so(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smartspec_gateway.__main__.connections_for", lambda num_files: 2)
    with running_gateway(triton.grpc_port, triton.http_port) as address:
        place = ("127.0.0.1", address.http_port)
        with socket.create_connection(place) as one, socket.create_connection(place) as two:
            for each in (one, two):
                each.sendall(b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n")
                assert each.recv(100).startswith(b"HTTP/1.1 404")
            assert talk(address.http_port, b"").startswith(b"HTTP/1.1 503 ")


def test_a_refused_body_does_not_hold_up_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Its client stays connected. uvicorn says so if it gives a request up after SHUTDOWN_S."""
    with socket.socket() as client, running_gateway(1, 1) as address:
        client.connect(("127.0.0.1", address.http_port))
        client.sendall(CHUNKED + b"\r\n" + chunk(b" ") * 5000)
        assert client.recv(12) == b"HTTP/1.1 413"
    assert "timeout graceful shutdown exceeded" not in capfd.readouterr().err
