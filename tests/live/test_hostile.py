"""Hostile HTTP against a real Triton behind the front.

Without the front Triton 2.51 ends with SIGSEGV at 500,000 levels and at 600,000 chunks, and with
SIGABRT at the weight.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from pathlib import Path

import pytest
import tritonclient.http as triton
from raw_http import (
    GENERATE,
    OK,
    STREAM,
    TOO_LARGE,
    Case,
    carry_out,
    chunked,
    fields,
    normal_request,
    request,
)
from servers import fake_config, serving
from tritonclient.utils import InferenceServerException
from wire import generate

from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import LimitsConfig

pytestmark = pytest.mark.triton


def address_of(server: TritonServer) -> tuple[str, int]:
    return server.address.reach, server.address.http_port


DEEP = b'{"text_input": %s1%s, "max_tokens": 2}' % (b"[" * 500_000, b"]" * 500_000)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (request(json.dumps(fields(text_input="x" * 8_000_000)).encode()), TOO_LARGE),
        (request(json.dumps(fields(unknown="x" * 8_000_000)).encode()), TOO_LARGE),
        (request(DEEP), frozenset({400})),
        (chunked([b" "] * 600_000), TOO_LARGE),
        (request(headers=[("Accept-Encoding", "gzip;q=1e999")]), OK),
    ],
    ids=["8 MB", "8 MB of an unknown field", "500,000 deep", "600,000 chunks", "weight"],
)
def test_what_ends_triton_itself_is_answered(
    front_server: TritonServer, sent: bytes, expected: frozenset[int]
) -> None:
    address = address_of(front_server)
    assert carry_out(Case("", [sent], [expected]), address) == ""
    assert normal_request(address) == ""
    assert front_server.poll() is None


def test_clients_of_triton_work_through_the_front(front_server: TritonServer) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{front_server.address.http_port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("smartspec")
        assert client.get_server_metadata()["name"] == "triton"
        assert client.get_model_metadata("smartspec")["name"] == "smartspec"
        assert client.get_model_config("smartspec")["backend"] == "smartspec_py"
        assert client.get_inference_statistics("smartspec")["model_stats"]
        with pytest.raises(InferenceServerException, match="not served"):
            client.unload_model("smartspec")
        with pytest.raises(InferenceServerException, match="not served"):
            client.register_system_shared_memory("a", "/a", 8)
    assert generate(front_server, **fields())["num_output_tokens"] == 2


def test_a_stream_ends_with_an_error_when_triton_dies(tmp_path: Path) -> None:
    """And whoever comes then is told that nobody answers."""
    limits = LimitsConfig(max_context_len=4096)
    with serving(fake_config(step_s=0.01, limits=limits), tmp_path) as server:
        connection = http.client.HTTPConnection(*address_of(server), timeout=30)
        body = json.dumps(fields(max_tokens=3000, stream=True, num_draft_tokens=0))
        connection.request("POST", STREAM, body)
        with connection.getresponse() as response:
            assert response.readline().startswith(b"data:")
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(http.client.IncompleteRead) as caught:
                response.read()
        last = caught.value.partial.rstrip().rpartition(b"data:")[2]
        assert "Triton ended the connection" in json.loads(last)["error"]
        connection.close()
        connection.request("POST", GENERATE, json.dumps(fields()))
        with connection.getresponse() as response:
            assert response.status == 503
        connection.close()
        deadline = time.monotonic() + 10.0
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.poll() == 128 + signal.SIGKILL
