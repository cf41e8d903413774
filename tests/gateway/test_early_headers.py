"""A stream begins when the model has accepted its request, and shows that it is open while the
prompt is read. A refusal before that has a status; a failure after it is an event."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from http_client import BODY, GENERATE, TOKENIZER, WAIT_S
from stand_in import EMPTY, Document, StandIn, running_gateway, text

import openai
from smartspec_gateway.triton import IDLE_S
from smartspec_launch.address import Address, free_address
from smartspec_launch.gateway import OpenAi

pytestmark = pytest.mark.slow  # they start gateways; they run beside the others

ROOT = Path(__file__).parents[2]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LAST = text("word", finish_reason="length", num_output_tokens=1, num_input_tokens=1)
FULL = {"error": "UNAVAILABLE: the queue is full"}
CHATS, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    MESSAGES: {"model": "smartspec", "messages": HELLO, "max_tokens": 5},
}


class Reading:
    """Accepts each request, and reads its prompt until `is_read` is set."""

    def __init__(self, last: Document = LAST) -> None:
        self.is_read = threading.Event()
        self._last = last

    def __call__(self, fields: Document) -> Iterator[Document | None]:
        yield EMPTY
        while not self.is_read.is_set():
            yield None
        yield self._last


@pytest.fixture
def port(triton: StandIn) -> Iterator[int]:
    """Of a gateway's OpenAI routes."""
    served = OpenAi(free_address().http_port, TOKENIZER)
    with running_gateway(triton.grpc_port, triton.http_port, openai=served):
        yield served.port


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short silence is a long one."""
    monkeypatch.setattr("smartspec_gateway.triton.IDLE_S", 0.02)


def posted(port: int, path: str, **changed: Any) -> http.client.HTTPResponse:
    """The response to a stream when its headers have come."""
    body = json.dumps({**BODIES[path], "stream": True, **changed}).encode()
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", path, body, headers)
    return connection.getresponse()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.usefixtures("is_impatient")
def test_headers_come_before_the_prompt_is_read_and_comments_follow(
    triton: StandIn, port: int, path: str
) -> None:
    """The first token leaves Triton when the client has read three signs of life."""
    triton.generate = reading = Reading()
    sign = b"event: ping\n" if path == MESSAGES else b": the request is open\n"
    with posted(port, path) as response:
        assert (response.status, response.headers["content-type"][:17]) == (
            200,
            "text/event-stream",
        )
        num_signs = 0
        while num_signs < 3:
            line = response.readline()
            assert line
            assert b"word" not in line
            num_signs += line == sign
        reading.is_read.set()
        assert b"word" in response.read()


@pytest.mark.parametrize("path", BODIES)
def test_a_refusal_has_a_status(triton: StandIn, port: int, path: str) -> None:
    triton.generate = lambda fields: iter([FULL])
    with posted(port, path) as response:
        assert response.status == 503
        assert "the queue is full" in json.loads(response.read())["error"]["message"]


def test_a_refusal_of_one_of_several_choices_has_a_status(triton: StandIn, port: int) -> None:
    """Although the others are accepted before it."""
    num_accepted = threading.Semaphore(0)

    def answer(fields: Document) -> Iterator[Document | None]:
        if fields["seed"] == 7:
            assert all(num_accepted.acquire(timeout=WAIT_S) for _ in range(2))
            yield FULL
        yield EMPTY
        num_accepted.release()
        while True:
            yield None

    triton.generate = answer
    with posted(port, CHATS, n=3, seed=6) as response:
        assert response.status == 503


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHATS, b'data: {"error":{"message":"deadline_ms: 5 ms passed'),
        ("/v1/completions", b'data: {"error":{"message":"deadline_ms: 5 ms passed'),
        ("/v1/responses", b'event: response.failed\ndata: {"type":"response.failed"'),
        (MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'),
    ],
)
def test_a_failure_after_the_headers_is_an_event(
    triton: StandIn, port: int, path: str, event: bytes
) -> None:
    late = {"error": "UNAVAILABLE: deadline_ms: 5 ms passed before the first token"}
    triton.generate = reading = Reading(late)
    with posted(port, path) as response:
        assert response.status == 200
        reading.is_read.set()
        assert event in response.read()


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_while_its_prompt_is_read_cancels(
    triton: StandIn, port: int, path: str
) -> None:
    triton.generate = Reading()
    response = posted(port, path)
    assert response.status == 200
    assert not triton.has_left.is_set()
    response.close()
    assert triton.has_left.wait(WAIT_S)


def test_a_stream_of_triton_has_early_headers_too(triton: StandIn, gateway: Address) -> None:
    """Without comments: its events are Triton's own."""
    triton.generate = reading = Reading()
    head = f"POST {GENERATE}_stream HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.http_port), timeout=WAIT_S) as client:
        client.sendall(head.encode() + BODY)
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == 200
        reading.is_read.set()
        assert response.read() == b"data: %s\n\n" % json.dumps(LAST).encode()


def told_by_chat(client: openai.OpenAI) -> Iterator[str]:
    for chunk in client.chat.completions.create(model="smartspec", messages=HELLO, stream=True):
        yield from (one.delta.content or "" for one in chunk.choices)


def told_by_completion(client: openai.OpenAI) -> Iterator[str]:
    for chunk in client.completions.create(model="smartspec", prompt="hello", stream=True):
        yield from (one.text for one in chunk.choices)


def told_by_response(client: openai.OpenAI) -> Iterator[str]:
    for event in client.responses.create(model="smartspec", input="hello", stream=True):
        yield event.delta if event.type == "response.output_text.delta" else ""


@pytest.mark.parametrize("told", [told_by_chat, told_by_completion, told_by_response])
@pytest.mark.usefixtures("is_impatient")
def test_the_openai_package_skips_comments(
    triton: StandIn, port: int, told: Callable[[openai.OpenAI], Iterator[str]]
) -> None:
    """About ten of them."""
    url = f"http://127.0.0.1:{port}/v1"
    triton.generate = slow_model
    with openai.OpenAI(base_url=url, api_key="-", timeout=WAIT_S, max_retries=0) as client:
        assert "".join(told(client)) == "word"


@pytest.mark.usefixtures("is_impatient")
def test_the_anthropic_package_skips_pings(triton: StandIn, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    triton.generate = slow_model
    with (
        anthropic.Anthropic(base_url=url, api_key="-", timeout=WAIT_S, max_retries=0) as client,
        client.messages.stream(model="smartspec", messages=HELLO, max_tokens=5) as stream,
    ):
        assert "".join(stream.text_stream) == "word"


def test_a_stream_is_never_silent_for_5_s() -> None:
    """The page names the time."""
    page = (ROOT / "docs" / "start" / "write-a-client.md").read_text(encoding="utf-8")
    assert IDLE_S < 5.0
    assert f"every {IDLE_S:g} s" in page


def slow_model(fields: Document) -> Iterator[Document | None]:
    """Its prompt takes about ten times IDLE_S."""
    yield EMPTY
    yield from [None] * 20
    yield LAST
