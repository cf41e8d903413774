"""The one-file clients where something is wrong: one sentence, exit code 1, and no more is sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

CLIENTS = Path(__file__).parents[1] / "clients"
DEAD = "127.0.0.1:9"


def run(client: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CLIENTS / client), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file or directory"),
        ('{"prompt": "a"}\n\nno JSON', "prompts.jsonl, line 3: not JSON"),
        ('{"prompt": 5}', 'line 1: must be an object with the text "prompt"'),
        ('["a"]', 'line 1: must be an object with the text "prompt"'),
        ('{"prompt": "a", "max_tokens": "9"}', "line 1: max_tokens must be an integer"),
        ("\n", "prompts.jsonl: has no prompts"),
        ('{"prompt": "a"}', "ailed to connect"),
    ],
)
def test_a_file_that_cannot_be_sent(tmp_path: Path, content: str | None, sentence: str) -> None:
    """The last file is good: there it is the server that is missing."""
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    done = run("grpc_many.py", str(path), "--url", DEAD)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("client", "url"), [("http_stream.py", f"http://{DEAD}"), ("grpc_stream.py", DEAD)]
)
def test_a_server_that_is_not_there(client: str, url: str) -> None:
    done = run(client, "a", "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip().startswith("error: ")
    assert done.stderr.strip().count("\n") == 0


@pytest.fixture
def dying_server() -> Iterator[str]:
    """The address of a server that is live and breaks off every stream."""

    def die(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        yield b""

    handlers = {
        "ServerLive": grpc.unary_unary_rpc_method_handler(
            lambda request, context: service_pb2.ServerLiveResponse(live=True).SerializeToString()
        ),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(die),
    }
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_nothing_more_is_sent_to_a_server_that_is_gone(tmp_path: Path, dying_server: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' * 5)
    done = run("grpc_many.py", str(path), "--url", dying_server, "--concurrency", "1")
    assert done.returncode == 1
    assert done.stdout.startswith("1 requests, 1 failed, 0 tokens")
    assert done.stderr.splitlines() == [
        "[0] error: the connection broke",
        "error: the server is not reachable: 4 requests were not sent",
    ]
