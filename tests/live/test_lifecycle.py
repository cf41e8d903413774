"""What happens to requests when clients leave, the queue is full, or the loop dies."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from scrape import scrape_when
from servers import fake_config, serving
from tritonclient.utils import InferenceServerException
from wire import generate, generate_stream, grpc_inputs, grpc_stream, post

from smartspec_launch.address import free_address
from smartspec_launch.files import PACKAGE_FOLDER
from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import LimitsConfig

pytestmark = pytest.mark.triton

HEALTH_CHECK = Path(__file__).parents[2] / "deploy" / "image" / "healthcheck.py"

LONG = {"text_input": "Question:", "max_tokens": 3000, "num_draft_tokens": 0}
SHORT = {"text_input": "Question:", "max_tokens": 2}
"""3000 steps of 10 ms are 30 s; whoever gets the only row sooner has seen it freed."""


def wait_until_free(server: TritonServer) -> None:
    """Until a short request gets through."""
    start = time.monotonic()
    while post(server, SHORT, "generate")[0] != 200:
        assert time.monotonic() - start < 20, "the row was not freed"
        time.sleep(0.02)


def open_http_stream(server: TritonServer) -> socket.socket:
    """A stream whose first event has come."""
    address = server.address
    body = json.dumps({**LONG, "stream": True}).encode()
    head = (
        "POST /v2/models/smartspec/generate_stream HTTP/1.1\r\nHost: test\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client = socket.create_connection((address.reach, address.http_port), timeout=20)
    client.sendall(head.encode() + body)
    while b"data:" not in client.recv(4096):
        pass
    return client


def test_http_client_that_leaves_frees_its_row(narrow_server: TritonServer) -> None:
    open_http_stream(narrow_server).close()
    wait_until_free(narrow_server)


def test_a_full_queue_refuses_at_once(narrow_server: TritonServer) -> None:
    """One runs, one waits, and the third is refused before the first is done; the health check is
    answered all the same. gRPC carries UNAVAILABLE, and HTTP 503."""
    with ThreadPoolExecutor() as pool, open_http_stream(narrow_server):
        both = [pool.submit(post, narrow_server, SHORT, "generate") for _ in range(2)]
        refused, waiting = wait(both, timeout=20, return_when=FIRST_COMPLETED)
        status, body = refused.pop().result()
        assert status == 503
        assert "queue is full" in body
        with pytest.raises(InferenceServerException, match="queue is full") as raised:
            list(grpc_stream(narrow_server, grpc_inputs(SHORT), {"triton_grpc_error": "true"}))
        assert raised.value.status() == "StatusCode.UNAVAILABLE"
        result = check_health(narrow_server)
        assert result.returncode == 0, result.stderr
        inputs = grpc_inputs({**SHORT, "health_check": True})
        [response] = list(grpc_stream(narrow_server, inputs))
        assert response.as_numpy("text_output").item() == b""
    assert waiting.pop().result(timeout=60)[0] == 200, "the one that waited is served"


def test_a_stream_that_waits_has_its_headers(narrow_server: TritonServer) -> None:
    """The only row is taken for 30 s, and the headers come within 20 s."""
    address = narrow_server.address
    with open_http_stream(narrow_server):
        connection = http.client.HTTPConnection(address.reach, address.http_port, timeout=20)
        connection.request("POST", "/v2/models/smartspec/generate_stream", json.dumps(SHORT))
        assert connection.getresponse().status == 200
        connection.close()
    wait_until_free(narrow_server)


def wait_until_running(server: TritonServer) -> None:
    running = "smartspec_num_requests_running"
    assert scrape_when(server, lambda found: found.get(running) > 0).get(running) > 0


def check_health(server: TritonServer) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HEALTH_CHECK), server.address.http_url]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_deadline_ends_a_stream_with_what_it_has(narrow_server: TritonServer) -> None:
    responses = generate_stream(narrow_server, **LONG, deadline_ms=2000)
    assert responses[-1]["finish_reason"] == "deadline"
    assert 0 < sum(r["num_output_tokens"] for r in responses) < LONG["max_tokens"]
    wait_until_free(narrow_server)


@pytest.fixture
def dying_server(tmp_path: Path) -> Iterator[TritonServer]:
    """Its loop ends in the 20th step that has work."""
    config = fake_config(step_s=0.01, fail_at_step=20)
    with serving(config, tmp_path) as server:
        yield server


def test_when_the_loop_dies_requests_fail_and_readiness_goes_off(
    dying_server: TritonServer,
) -> None:
    assert generate(dying_server, **SHORT)["num_output_tokens"] == 2
    fields = {"text_input": "Question:", "max_tokens": 100, "num_draft_tokens": 0}
    status, body = post(dying_server, fields, "generate")
    assert status >= 400
    assert "failed at step 20" in body
    deadline = time.monotonic() + 60
    while dying_server.is_model_ready():
        assert time.monotonic() < deadline, "the model still says that it is ready"
        time.sleep(0.05)
    assert post(dying_server, SHORT, "generate")[0] >= 400
    assert check_health(dying_server).returncode == 1


def test_stop_lets_streams_finish_and_does_not_wait_for_idle_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of four seconds ends by itself; a connection that says nothing is cut once Triton
    has given it its time, here 2 s. A supervisor sends SIGTERM to the gateway, too."""
    monkeypatch.setattr("smartspec_launch.triton_server.EXIT_TIMEOUT_S", 2.0)
    config = fake_config(step_s=0.01, limits=LimitsConfig(max_context_len=4096))
    server = TritonServer(config, tmp_path, free_address())
    with server:
        server.wait_ready()
        idle = socket.create_connection((server.address.reach, server.address.http_port))
        with idle, ThreadPoolExecutor() as pool:
            fields = {"text_input": "Question:", "max_tokens": 400, "num_draft_tokens": 0}
            stream = pool.submit(generate_stream, server, **fields)
            wait_until_running(server)
            assert server._gateway is not None
            server._gateway._process.terminate()
            assert server.stop() == 0
            responses = stream.result(timeout=60)
    assert responses[-1]["finish_reason"] == "length"
    assert sum(response["num_output_tokens"] for response in responses) == 400


def test_a_sigterm_to_all_processes_of_triton_cuts_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd sends it to all. Eight streams of four seconds; Triton itself would wait one."""
    monkeypatch.setattr("smartspec_launch.triton_server.EXIT_TIMEOUT_S", 1.0)
    config = fake_config(step_s=0.01, limits=LimitsConfig(max_context_len=4096))
    with TritonServer(config, tmp_path, free_address()) as server:
        server.wait_ready()
        with ThreadPoolExecutor(8) as pool:
            fields = {"text_input": "Question:", "max_tokens": 400, "num_draft_tokens": 0}
            each = [pool.submit(generate_stream, server, **fields) for _ in range(8)]
            running = "smartspec_num_requests_running"
            assert scrape_when(server, lambda found: found.get(running) == 8).get(running) == 8
            os.killpg(server.pid, signal.SIGTERM)
            assert server.stop() == 0
            ends = [stream.result(timeout=60)[-1] for stream in each]
    assert [end["finish_reason"] for end in ends] == ["length"] * 8


def test_stop_ends_what_outlives_the_grace_with_a_last_response(tmp_path: Path) -> None:
    """30 s of tokens, 1 s of grace: the stream ends as cancelled, with its text; whoever has no
    token yet gets an error."""
    limits = LimitsConfig(max_sequences=1, max_context_len=4096, drain_s=1.0)
    server = TritonServer(fake_config(step_s=0.01, limits=limits), tmp_path, free_address())
    with server, ThreadPoolExecutor() as pool:
        server.wait_ready()
        stream = pool.submit(generate_stream, server, **LONG)
        wait_until_running(server)
        waiting = pool.submit(post, server, SHORT, "generate")
        waits = "smartspec_num_requests_waiting"
        assert scrape_when(server, lambda found: found.get(waits) == 1).get(waits) == 1
        stopping = pool.submit(server.stop)
        assert stopping.result(timeout=60) == 0
        responses = stream.result(timeout=60)
        status, body = waiting.result(timeout=60)
    assert responses[-1]["finish_reason"] == "cancelled"
    assert status >= 400
    assert "shutting down" in body


def test_tritons_python_process_does_not_crash_at_its_end(tmp_path: Path) -> None:
    """Python's fault handler writes a crash to the log; Triton's exit status does not show it.

    Short beats end the link's thread in time. While it waits, it holds the model, so that nothing
    is destroyed. The launcher would kill Triton before this end, so the test ends it, without
    connections of the gateway, for which it would wait.
    """
    backend = tmp_path / "backend"
    shutil.copytree(PACKAGE_FOLDER, backend, ignore=shutil.ignore_patterns("__pycache__"))
    with (backend / "model.py").open("a") as model:
        model.write("import faulthandler\nfaulthandler.enable()\n")
        model.write("from smartspec_py.serving import link\nlink.BEAT_S = 0.01\n")
    server = TritonServer(fake_config(), tmp_path / "run", free_address(), backend_folder=backend)
    with server:
        server.wait_ready()
        time.sleep(0.5)  # the first values of the metrics
        server._gateway.stop()
        os.kill(server.pid, signal.SIGINT)
        assert server._process is not None
        server._process.wait(60)
    log = server.log_path.read_text()
    assert "successfully unloaded" in log
    assert "Segmentation fault" not in log
