"""The gateway between a client and a stand-in for Triton: one answer for each request, passed on as
it comes, and an end that is seen where either side breaks off."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from stand_in import EMPTY, Break, Document, StandIn, running_gateway, text

from smartspec_gateway import protocol
from smartspec_launch.address import Address, free_address, responds
from smartspec_launch.gateway import LEAST_FILES, OpenAi, allow_open_files, as_json
from smartspec_launch.interpreter import LaunchError
from smartspec_py.api.contract import GATEWAY

pytestmark = pytest.mark.slow  # half a minute together; they run beside the others

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
GENERATE = "/v2/models/smartspec/generate"
BODY = b'{"text_input": "a", "max_tokens": 1}'
WAIT_S = 10.0
MAX_BODY_BYTES = 1 << 20
PAGE = "http://page.example"


@contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    yield connection
    connection.close()


@contextmanager
def asked(address: Address, route: str = GENERATE) -> Iterator[http.client.HTTPResponse]:
    """The response to a valid request."""
    with connected(address.http_port) as connection:
        connection.request("POST", route, BODY)
        with connection.getresponse() as response:
            yield response


def error_of(response: http.client.HTTPResponse) -> tuple[int, str]:
    return response.status, json.loads(response.read())["error"]


def talk(port: int, sent: bytes) -> bytes:
    """What comes back until the gateway closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(sent)
        received = b""
        while data := client.recv(65_536):
            received += data
    return received


def answered(port: int, sent: bytes) -> tuple[http.client.HTTPResponse, bytes]:
    """The one answer and its body."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(sent)
        response = http.client.HTTPResponse(client)
        response.begin()
        return response, response.read()


def test_a_response_is_the_json_of_triton(triton: StandIn, gateway: Address) -> None:
    """The model gets the checked fields, and answers in the form that the gateway wants."""
    asked_for = []

    def answer(fields: Document) -> Iterator[Document]:
        asked_for.append(fields)
        yield text("é", id="mine", seed=2**64 - 1, output_ids=[1, 2])

    triton.generate = answer
    with asked(gateway) as response:
        assert json.loads(response.read()) == EMPTY | {
            "id": "mine",
            "text_output": "é",
            "seed": 2**64 - 1,
            "output_ids": [1, 2],
        }
    assert asked_for == [json.loads(BODY) | {GATEWAY: ""}]


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


@pytest.mark.parametrize("route", [GENERATE, GENERATE + "_stream"])
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        ("INVALID_ARG: seed: no", 400, "seed: no"),
        ("UNAVAILABLE: the queue\nis full", 503, "the queue\nis full"),
        ("INTERNAL: a: b", 500, "a: b"),
        ("in ensemble 'own', INVALID_ARG: no", 400, "in ensemble 'own', no"),
        ("Stub process is not healthy", 500, "Stub process is not healthy"),
        ("OTHER: no code of the model", 500, "OTHER: no code of the model"),
    ],
)
def test_a_status_is_chosen_by_the_code(
    triton: StandIn, gateway: Address, error: str, status: int, reason: str, route: str
) -> None:
    triton.generate = lambda fields: iter([{"error": error}])
    with asked(gateway, route) as response:
        assert error_of(response) == (status, reason)


def test_an_error_after_the_first_response_is_an_event(triton: StandIn, gateway: Address) -> None:
    """Also where both arrive together."""
    triton.generate = lambda fields: iter([text("a"), {"error": "INTERNAL: no"}])
    with asked(gateway, GENERATE + "_stream") as response:
        first, last = (event.removeprefix(b"data:") for event in response.read().split(b"\n\n")[:2])
    assert json.loads(first)["text_output"] == "a"
    assert json.loads(last) == {"error": "no"}


@pytest.mark.parametrize("model", ["..", "."])
def test_a_model_that_is_no_name_is_not_served(gateway: Address, model: str) -> None:
    with connected(gateway.http_port) as connection:
        connection.request("POST", f"/v2/models/{model}/generate", BODY)
        with connection.getresponse() as response:
            assert error_of(response)[0] == 404


def test_a_long_event_comes_whole(triton: StandIn, gateway: Address) -> None:
    """In many parts, and another one in the last of them."""
    long = "x" * 1_000_000
    triton.generate = lambda fields: iter([text(long), text("b")])
    with asked(gateway, GENERATE + "_stream") as response:
        found = [json.loads(line[5:])["text_output"] for line in response if line.strip()]
    assert found == [long, "b"]


def test_outputs_of_an_ensemble_have_any_name(triton: StandIn, gateway: Address) -> None:
    triton.generate = lambda fields: iter([EMPTY | {"own": 1}])
    with asked(gateway, "/v2/models/own/generate") as response:
        assert json.loads(response.read()) == EMPTY | {"own": 1}


def test_requests_wait_for_a_connection_to_triton(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that may open few files has few."""
    monkeypatch.setattr("smartspec_gateway.__main__.GENERATING", 1)
    monkeypatch.setattr("smartspec_gateway.__main__.connections_for", lambda num_files: 2)
    may_answer, num_asked = threading.Event(), 0

    def answer(fields: Document) -> Iterator[Document]:
        nonlocal num_asked
        num_asked += 1
        assert may_answer.wait(WAIT_S)
        yield text("a", finish_reason="length", num_output_tokens=1, num_input_tokens=1)

    triton.generate = answer
    openai = OpenAi(free_address().http_port, TOKENIZER)
    body = json.dumps({"model": "smartspec", "prompt": "a", "n": 5, "max_tokens": 1}).encode()
    with (
        running_gateway(triton.grpc_port, triton.http_port, openai=openai),
        connected(openai.port) as connection,
    ):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        while num_asked < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        assert num_asked == 2
        may_answer.set()
        with connection.getresponse() as response:
            found = json.loads(response.read())
    assert num_asked == 5, found


def test_a_refusal_of_triton_itself(triton: StandIn, gateway: Address) -> None:
    triton.refusal = 400, "no such version"
    with asked(gateway, "/v2/models/smartspec/versions/7/generate") as response:
        assert error_of(response) == (400, "no such version")


def test_no_triton_is_503() -> None:
    nowhere = free_address()
    with running_gateway(nowhere.grpc_port, nowhere.http_port) as address:
        with asked(address) as response:
            assert "does not answer" in error_of(response)[1]
        assert response.status == 503


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
    client.sendall(_post(BODY).replace(GENERATE.encode(), route.encode()))
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
        client.sendall(_post(BODY).replace(b"/generate", b"/generate_stream"))
        assert triton.has_left.wait(WAIT_S)
    assert num_sent < 3200


def _post(body: bytes, headers: bytes = b"", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n".encode()
    return head + headers + b"\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n".encode()
MANY = b'{"input_ids": [%s1], "text_input": "", "max_tokens": 1}' % (b"1," * 100_000)

REFUSED: list[tuple[str, bytes, int]] = [
    ("body said to be too long", _post(b"", length=MAX_BODY_BYTES + 1), 413),
    ("body too long", _post(b" " * 3_000_000), 413),
    ("chunk too long", CHUNKED + b"\r\n" + chunk(b" " * (MAX_BODY_BYTES + 1)), 413),
    ("many chunks", CHUNKED + b"\r\n" + chunk(b" ") * 600_000, 413),
    ("long chunk extension", CHUNKED + b"\r\n1;" + b"a" * 2_000_000, 431),
    ("many trailers", CHUNKED + b"\r\n0\r\n" + b"X: y\r\n" * 200_000, 431),
    (
        "long length",
        CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: " + b"9" * 6000) + b"\r\n",
        400,
    ),
    ("many headers", _post(BODY, b"X: y\r\n" * 30_000), 431),
    ("zero byte in a header", _post(BODY, b"X: a\x00b\r\n"), 400),
    ("space in the name of a header", _post(BODY, b"X Y: a\r\n"), 400),
    ("bad chunk", CHUNKED + b"\r\n-1\r\n", 400),
    ("two framings", CHUNKED + b"Content-Length: 5\r\n\r\n", 400),
    ("two lengths", _post(BODY, b"Content-Length: 5\r\n"), 400),
    ("other encoding", CHUNKED.replace(b"chunked", b"gzip") + b"\r\n", 501),
    ("long header", _post(BODY, b"X: %s\r\n" % (b"y" * 1_000_000)), 431),
    ("garbage", b"\x16\x03\x01\r\n\r\n", 400),
    ("many elements", _post(MANY), 413),
    ("compressed", _post(BODY, b"Content-Encoding: gzip\r\n"), 415),
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


def test_a_request_during_the_start_is_told_what_the_start_does() -> None:
    lifeline, end = os.pipe()
    os.write(end, b'{"start": "reading weights, 1.2 GB of 3.1 GB"}\n')
    with running_gateway(1, 1, pipe=(lifeline, end), context_len=0) as address:
        response, body = answered(address.http_port, _post(BODY))
    sentence = (
        "the model is starting (reading weights, 1.2 GB of 3.1 GB): send the request again later"
    )
    assert (response.status, json.loads(body)) == (503, {"error": sentence})


def test_refusals_have_the_format_of_the_route(both: Address) -> None:
    sent = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    response, body = answered(both.metrics_port, sent)
    assert response.status == 503
    error = {"type": "overloaded_error", "message": json.loads(body)["error"]["message"]}
    assert json.loads(body) == {"type": "error", "error": error}


READABLE = {
    "elements": (_post(MANY), 413),
    "length": (_post(b"", length=MAX_BODY_BYTES + 1), 413),
    "encoding": (_post(BODY, b"Content-Encoding: gzip\r\n"), 415),
    "starting": (_post(BODY), 503),
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


def test_other_routes_are_answered_by_triton(gateway: Address) -> None:
    """HEAD has no body; an id of the client comes back, and others get a new one."""
    with connected(gateway.http_port) as connection:
        for method, body in (("GET", b"/v2/models/smartspec/config"), ("HEAD", b"")):
            for sent in ("mine-1", "not\tthis"):
                path = "/v2/models/smartspec/config"
                connection.request(method, path, headers={"X-Request-Id": sent})
                with connection.getresponse() as response:
                    assert (response.status, response.read()) == (200, body)
                    found = response.headers["x-request-id"]
                assert (found == sent) == (sent == "mine-1")
                assert found


def test_the_port_of_metrics_serves_them_alone_and_within_limits(gateway: Address) -> None:
    """Triton 2.51 keeps a body of any size in memory, on this port too."""
    long = b"a" * (2 << 20)
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
        for sent in (b"", b"POST /v2 HT", _post(b"{", length=10)):
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


def test_it_ends_with_its_launcher() -> None:
    """Its standard input is a pipe of the launcher, which is closed when the launcher dies."""
    process = subprocess.Popen(command(), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(WAIT_S) == 0


@contextmanager
def own_process(triton: StandIn, openai: OpenAi | None = None) -> Iterator[Any]:
    """A gateway as a process, and its address. Its standard input must be closed by the test."""
    address = replace(
        free_address(),
        triton_grpc_port=triton.grpc_port,
        triton_http_port=triton.http_port,
        triton_metrics_port=triton.http_port,
    )
    given = command(openai, address)
    with subprocess.Popen(given, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"context_len": 512}\n')
        process.stdin.flush()
        deadline = time.monotonic() + WAIT_S
        for url in (f"{address.http_url}/v2", *([openai.url(address)] if openai else [])):
            while not responds(url) and time.monotonic() < deadline:
                time.sleep(0.05)
        try:
            yield process, address
        finally:
            process.kill()


def test_signals_leave_it_to_its_launcher_when_it_ends(triton: StandIn) -> None:
    """A supervisor sends SIGTERM to all processes at once, and maybe again. Streams then end as
    they would alone, and one that breaks off with Triton leaves no line in the log."""
    has_come, is_told = threading.Barrier(3), threading.Event()

    def answer(fields: Document) -> Iterator[Document]:
        yield text("a")
        has_come.wait(WAIT_S)
        assert is_told.wait(WAIT_S)
        if fields["text_input"] == "break":
            raise Break
        yield text("b", finish_reason="length")

    triton.generate = answer
    breaking = BODY.replace(b'"a"', b'"break"')
    with own_process(triton) as (process, address), ExitStack() as open_ones:
        streams = []
        for body in (BODY, breaking):
            connection = open_ones.enter_context(connected(address.http_port))
            connection.request("POST", GENERATE + "_stream", body)
            streams.append(connection)
        has_come.wait(WAIT_S)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
        assert status_of(address, "/v2/health/live") == 200
        is_told.set()
        whole, broken = (each.getresponse() for each in streams)
        assert b'"finish_reason": "length"' in whole.read()
        with pytest.raises(http.client.IncompleteRead):
            broken.read()
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == b""


def test_a_burst_of_connections_waits_until_it_is_accepted(triton: StandIn) -> None:
    """As many as may be open, on each port, while the gateway does not run."""
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    openai = OpenAi(free_address().http_port, TOKENIZER)
    with own_process(triton, openai) as (process, address):
        process.send_signal(signal.SIGSTOP)
        for port in (address.http_port, address.metrics_port, address.grpc_port, openai.port):
            with ExitStack() as burst:
                for _ in range(min(300, most)):
                    place = "127.0.0.1", port
                    burst.enter_context(socket.create_connection(place, 0.5))
        process.send_signal(signal.SIGCONT)


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    openai = OpenAi(1, TOKENIZER, api_key_file=tmp_path / "keys")
    ended = subprocess.run(command(openai), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "has no API key" in ended.stderr


def command(openai: OpenAi | None = None, address: Address | None = None) -> list[str]:
    given = as_json(address or free_address(), openai)
    return [sys.executable, "-m", "smartspec_gateway", given]


@pytest.mark.parametrize("port", ["http_port", "grpc_port"])
def test_idle_connections_leave_files_for_the_launcher(port: str) -> None:
    """More of them than the process may open files. The launcher ends a server that is silent."""
    address = free_address()
    program = ["sh", "-c", f'ulimit -n {LEAST_FILES}; exec "$@"', "sh", *command(address=address)]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        url = f"{address.http_url}/v2/health/live"
        deadline = time.monotonic() + WAIT_S
        while not responds(url) and time.monotonic() < deadline:
            time.sleep(0.05)
        with ExitStack() as idle:
            for _ in range(2 * LEAST_FILES):
                place = "127.0.0.1", getattr(address, port)
                idle.enter_context(socket.create_connection(place, WAIT_S))
            assert responds(url)
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()


def test_few_files_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(LaunchError, match="may open 64 files here, and the server needs 256"):
        allow_open_files()


def test_a_low_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton inherits it; with 64 files it never becomes ready."""
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    allow_open_files()
    assert raised == [(4096, 4096)]


def test_it_loads_no_model_library() -> None:
    program = (
        "import sys; import smartspec_gateway.__main__; "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_draining_gateway_refuses_new_requests_with_503(triton: StandIn) -> None:
    """Requests in flight end, and Triton is still asked whether it is alive."""
    has_come, may_answer = threading.Event(), threading.Event()

    def answer(fields: Document) -> Iterator[Document]:
        has_come.set()
        assert may_answer.wait(WAIT_S)
        yield text("a")

    triton.generate = answer
    pipe = os.pipe()
    with (
        running_gateway(triton.grpc_port, triton.http_port, pipe) as address,
        connected(address.http_port) as early,
    ):
        early.request("POST", GENERATE, BODY)
        assert has_come.wait(WAIT_S)
        os.write(pipe[1], b'{"is_draining": true}\n')
        while status_of(address, "/v2/models/smartspec/ready") == 200:
            threading.Event().wait(0.02)
        with asked(address) as response:
            assert error_of(response)[0] == 503
        assert status_of(address, "/v2/health/live") == 200
        may_answer.set()
        assert early.getresponse().status == 200


def status_of(address: Address, path: str) -> int:
    with connected(address.http_port) as connection:
        connection.request("GET", path)
        return connection.getresponse().status
