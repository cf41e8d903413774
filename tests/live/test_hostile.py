"""Hostile HTTP against a real Triton behind the gateway: each connection gets the answers that it
should, and the server then serves on.

Without the gateway Triton 2.51 ends with SIGSEGV at 500,000 levels and at 600,000 chunks, and with
SIGABRT at the weight.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as triton
from servers import fake_config, serving
from tritonclient.utils import InferenceServerException
from wire import generate

from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import LimitsConfig

pytestmark = pytest.mark.triton

GENERATE = "/v2/models/smartspec/generate"
FIELDS = {"text_input": "Question:", "max_tokens": 2}
VALID = json.dumps(FIELDS).encode()


def head(*headers: str, path: str = GENERATE, close: str = "close") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Connection: {close}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def whole(body: bytes = VALID, *headers: str, **more: str) -> bytes:
    return head(f"Content-Length: {len(body)}", *headers, **more) + body


def with_fields(**more: Any) -> bytes:
    return whole(json.dumps(FIELDS | more).encode())


CHUNKED = head("Transfer-Encoding: chunked")


def chunked(chunks: Sequence[bytes], end: bytes = b"0\r\n\r\n", extension: bytes = b"") -> bytes:
    framed = [b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks]
    return CHUNKED + b"".join(framed) + end


CASES: dict[str, tuple[bytes, list[int]]] = {
    "8 MB": (with_fields(text_input="x" * 8_000_000), [413]),
    "8 MB of an unknown field": (with_fields(unknown="x" * 8_000_000), [413]),
    "500,000 levels": (whole(b"[" * 500_000 + b"]" * 500_000), [400]),
    "600,000 chunks": (chunked([b" "] * 600_000), [413]),
    "weight": (whole(VALID, "Accept-Encoding: gzip;q=1e999"), [200]),
    "chunks of one byte": (chunked([VALID[i : i + 1] for i in range(len(VALID))]), [200]),
    "chunk extension": (chunked([VALID], extension=b";a=b"), [200]),
    "2 MB of chunk extension": (chunked([VALID], extension=b";" + b"a" * 2_000_000), [431]),
    "chunk longer than announced": (CHUNKED + b"3\r\n" + VALID + b"\r\n0\r\n\r\n", [400]),
    "200,000 trailers": (chunked([VALID], b"0\r\n" + b"X: y\r\n" * 200_000 + b"\r\n"), [431]),
    "length and chunks": (
        head(f"Content-Length: {len(VALID)}", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        [400],
    ),
    "length of 6,000 digits": (head(f"Content-Length: {'9' * 6000}"), [400]),
    "3,000 headers": (whole(VALID, *(f"X-{i}: {'y' * 100}" for i in range(3000))), [431]),
    "zero byte in a header": (whole(VALID, "X: a\x00b"), [400]),
    "space in a header's name": (whole(VALID, "X Y: a"), [400]),
    "path of 10,000 bytes": (whole(path="/" + "a" * 10_000), [404]),
    "unload": (whole(b"{}", path="/v2/repository/models/smartspec/unload"), [404]),
    "shared memory": (whole(b"{}", path="/v2/systemsharedmemory/region/x/register"), [404]),
    "two requests in one packet": (whole(close="keep-alive") + whole(), [200, 200]),
    "gzip bomb": (whole(gzip.compress(b" " * 10_000_000), "Content-Encoding: gzip"), [415]),
    "announced petabyte": (head(f"Content-Length: {10**15}") + b"x" * 1000, [413]),
    "infinite number": (with_fields(temperature=float("inf")), [400]),
    "50,000 unknown members": (with_fields(**{f"k{i}": i for i in range(50_000)}), [400]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_request_gets_its_answers(front_server: TritonServer, name: str) -> None:
    sent, expected = CASES[name]
    for data, statuses in ((sent, expected), (whole(), [200])):
        received = talk(front_server, data)
        found = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", received)]
        assert found == statuses, received[:300]
        document = json.loads(received.rpartition(b"\r\n\r\n")[2])
        assert ("finish_reason" if statuses[-1] == 200 else "error") in document
    assert front_server.poll() is None


def talk(server: TritonServer, sent: bytes) -> bytes:
    """What comes back until the server closes."""
    place = (server.address.reach, server.address.http_port)
    with socket.create_connection(place, timeout=60) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent)  # the answer may have arrived earlier
        return b"".join(iter(lambda: client.recv(65_536), b""))


def test_tritons_http_client_works_and_is_kept_from_the_administration(
    front_server: TritonServer,
) -> None:
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
    assert generate(front_server, **FIELDS)["num_output_tokens"] == 2


def test_a_stream_ends_with_an_error_when_triton_dies(tmp_path: Path) -> None:
    """And whoever comes then is told that nobody answers."""
    limits = LimitsConfig(max_context_len=4096)
    with serving(fake_config(step_s=0.01, limits=limits), tmp_path) as server:
        place = (server.address.reach, server.address.http_port)
        connection = http.client.HTTPConnection(*place, timeout=30)
        body = json.dumps(FIELDS | {"max_tokens": 3000, "stream": True, "num_draft_tokens": 0})
        connection.request("POST", GENERATE + "_stream", body)
        with connection.getresponse() as response:
            assert response.readline().startswith(b"data:")
            os.kill(server.pid, signal.SIGKILL)
            try:
                rest = response.read()
            except http.client.IncompleteRead as error:
                rest = error.partial
        last = rest.rstrip().rpartition(b"data:")[2]
        assert json.loads(last)["error"]
        connection.close()
        connection.request("POST", GENERATE, VALID)
        with connection.getresponse() as response:
            assert response.status == 503
        connection.close()
        deadline = time.monotonic() + 10.0
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.poll() == 128 + signal.SIGKILL
