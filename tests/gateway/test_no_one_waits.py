"""The largest body of each route, beside a stream and a health check."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from stand_in import Document, StandIn, running_gateway, text
from tritonclient.grpc import service_pb2, service_pb2_grpc

from smartspec_gateway import workers
from smartspec_gateway.limits import Refused
from smartspec_launch.address import Address, free_address
from smartspec_launch.gateway import OpenAi

pytestmark = pytest.mark.slow

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
MODEL = "/v2/models/smartspec"
WAIT_S = 20.0
TEXT = "[" * 8_000_000
"""For a context of 131,072 tokens."""

MESSAGES = [{"role": "user", "content": TEXT}]
TOKENS = [300] * 131_000
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 128}),
    ("/v1/completions", {"prompt": TOKENS, "n": 128}),
    ("/v1/responses", {"input": TEXT}),
    ("/v1/responses/input_tokens", {"input": TEXT}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    ("/detokenize", {"tokens": TOKENS}),
    (f"{MODEL}/generate", {"text_input": TEXT, "max_tokens": 1}),
    (f"{MODEL}/generate_stream", {"input_ids": TOKENS, "max_tokens": 1}),
]


class Held:
    """In the place of the worker processes: work ends when it may, with a refusal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_come, self.may_end = threading.Semaphore(0), threading.Event()

        async def run(process: Any, kind: str, body: bytes, context_len: int) -> None:
            self.has_come.release()
            while not self.may_end.is_set():
                await asyncio.sleep(0.01)
            raise Refused(400, "held")

        monkeypatch.setattr(workers._Process, "run", run)


class Stream:
    """A stream whose words Triton sends when the test says so."""

    def __init__(self, triton: StandIn) -> None:
        self._words: queue.Queue[str] = queue.Queue()

        def answer(fields: Document) -> Iterator[Document]:
            while word := self._words.get(timeout=3 * WAIT_S):
                yield text(word)

        triton.generate = answer

    def open(self, address: Address) -> None:
        self._connection = connection(address.http_port)
        self._connection.request(
            "POST", f"{MODEL}/generate_stream", b'{"text_input":"a","max_tokens":1}'
        )
        self._words.put("first")
        self._response = self._connection.getresponse()
        self._read()

    def advance(self) -> str:
        self._words.put("next")
        return self._read()

    def close(self) -> None:
        self._words.put("")
        self._response.read()
        self._connection.close()

    def _read(self) -> str:
        line = self._response.readline() + self._response.readline()
        return str(json.loads(line.removeprefix(b"data:"))["text_output"])


def connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)


def is_live(address: Address) -> bool:
    asked = connection(address.http_port)
    asked.request("GET", "/v2/health/live")
    status = asked.getresponse().status
    asked.close()
    return status == 200


def test_no_large_body_keeps_others_waiting(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the work on it has not ended, a stream goes on and the health check is answered."""
    held, stream = Held(monkeypatch), Stream(triton)
    openai = OpenAi(free_address().http_port, TOKENIZER)
    ports = triton.grpc_port, triton.http_port
    with running_gateway(*ports, openai=openai, context_len=131_072) as address:
        stream.open(address)
        for path, body in ROUTES:
            held.may_end.clear()
            asked = connection(address.http_port if path.startswith(MODEL) else openai.port)
            sent = json.dumps(body).encode()
            asked.request("POST", path, sent, {"Content-Type": "application/json"})
            assert held.has_come.acquire(timeout=WAIT_S), path
            assert (stream.advance(), is_live(address)) == ("next", True), path
            held.may_end.set()
            answer = asked.getresponse()
            assert (answer.status, b"held" in answer.read()) == (400, True), path
            asked.close()
        stream.close()


def test_no_large_message_of_grpc_keeps_others_waiting(
    triton: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, stream = Held(monkeypatch), Stream(triton)
    request = service_pb2.ModelInferRequest(model_name="smartspec")
    request.inputs.add(name="text_input").contents.bytes_contents.append(TEXT.encode())
    with running_gateway(triton.grpc_port, triton.http_port, context_len=131_072) as address:
        stream.open(address)
        with grpc.insecure_channel(address.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = stub.ModelStreamInfer(iter([request]))
            assert held.has_come.acquire(timeout=WAIT_S)
            assert (stream.advance(), is_live(address)) == ("next", True)
            held.may_end.set()
            with pytest.raises(grpc.RpcError) as raised:
                next(answers)
        assert raised.value.details() == "held"
        stream.close()
