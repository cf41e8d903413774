"""The gateway as a process of its launcher: start, signals, draining, its end, and open files."""

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_client import (
    BODY,
    GENERATE,
    TOKENIZER,
    WAIT_S,
    answered,
    asked,
    connected,
    error_of,
    post,
    status_of,
)
from stand_in import Break, Document, StandIn, running_gateway, text, wait_for

from smartspec_launch.address import Address, free_address, responds
from smartspec_launch.gateway import LEAST_FILES, OpenAi, allow_open_files, as_json
from smartspec_launch.interpreter import LaunchError

pytestmark = pytest.mark.slow  # half a minute together; they run beside the others


def test_a_request_during_the_start_is_told_what_the_start_does() -> None:
    lifeline, end = os.pipe()
    os.write(end, b'{"start": "reading weights, 1.2 GB of 3.1 GB"}\n')
    with running_gateway(1, 1, pipe=(lifeline, end), context_len=0) as address:
        response, body = answered(address.http_port, post(BODY))
    sentence = (
        "the model is starting (reading weights, 1.2 GB of 3.1 GB): send the request again later"
    )
    assert (response.status, json.loads(body)) == (503, {"error": sentence})


def test_it_ends_with_its_launcher() -> None:
    """Its standard input is a pipe of the launcher, which is closed when the launcher dies."""
    process = subprocess.Popen(command(), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    try:
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()


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
        for url in (f"{address.http_url}/v2", *([openai.url(address)] if openai else [])):
            wait_for(url)
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
    """More of them than the process may open files. The launcher ends a server that is silent. They
    are opened beside each other: one that finds the queue full tries again after a second."""
    address = free_address()
    program = ["sh", "-c", f'ulimit -n {LEAST_FILES}; exec "$@"', "sh", *command(address=address)]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        url = f"{address.http_url}/v2/health/live"
        wait_for(url)
        places = [("127.0.0.1", getattr(address, port))] * (LEAST_FILES + 40)
        with ExitStack() as idle, ThreadPoolExecutor(100) as pool:
            for each in pool.map(lambda place: socket.create_connection(place, WAIT_S), places):
                idle.enter_context(each)
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
