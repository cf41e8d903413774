"""Another API is one file and one entry in `ROUTES`: here, one that answers in lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import endpoint_client
import pytest
from httpx2 import Client

from smartspec_gateway.openai.apis import routes
from smartspec_gateway.openai.apis.chat_schema import ChatRequest
from smartspec_gateway.openai.apis.choices import Choice, Prepared, text_of
from smartspec_gateway.openai.apis.requests import Requests
from smartspec_gateway.openai.apis.route import Route
from smartspec_gateway.openai.apis.schema import OPEN, OpenBody, Sampling
from smartspec_gateway.openai.apis.validation import validated
from smartspec_gateway.openai.apis.writer import Count, Event, Writer
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.logprobs import TokenBytes
from smartspec_gateway.openai.model import Piece

NAMES = {"messages": "question"}


class PlainRequest(Sampling, OpenBody):
    model_config = OPEN
    route = "/v1/plain"
    names = NAMES
    question: str


def prepared(requests: Requests, asked: PlainRequest) -> Prepared:
    messages = [{"role": "user", "content": asked.question}]
    chat = validated(ChatRequest, {"messages": messages, "stream": asked.stream})
    return requests.of_chat(chat, ignored=asked.ignored)


class PlainWriter(Writer):
    def __init__(self, found: Prepared, token_bytes: TokenBytes, count: Count) -> None:
        super().__init__(found, [Choice.of(found.wanted)], count)

    def _of_piece(self, number: int, piece: Piece) -> Iterator[Event]:
        _, parts = self._add(number, piece).take()
        yield {"type": "line", "text": text_of(parts)}

    async def _last_events(self) -> list[Event]:
        return [{"type": "end"}]

    async def _document(self) -> dict[str, Any]:
        return {"num_tokens": self._num_tokens}

    def _failed(self, error: ApiError) -> list[Event]:
        return [{"type": "failed", **plain_error(error)}]


def plain_error(error: ApiError) -> dict[str, Any]:
    return {"why": error.message}


ROUTE = Route(PlainRequest.route, PlainRequest, prepared, PlainWriter, plain_error)


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(routes, "ROUTES", (*routes.ROUTES, ROUTE))
    return endpoint_client.http()


def test_it_is_served_and_described(http: Client) -> None:
    asked = {"question": "Hello!", "new": 1}
    answer = http.post("/v1/plain", json=asked)
    assert (answer.json(), answer.headers["x-ignored-fields"]) == ({"num_tokens": 3}, "new")
    stream = http.post("/v1/plain", json={**asked, "stream": True}).text
    assert stream.startswith('event: line\ndata: {"type":"line","text":"one"}\n\n')
    assert stream.endswith('event: end\ndata: {"type":"end"}\n\n')
    assert "post" in http.get("/openapi.json").json()["paths"]["/v1/plain"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "question: must be given"),
        ({"question": "a " * 600}, "question: got 610 tokens, must be at most 511 tokens"),
        ({"messages": []}, "messages: unknown; did you mean question?"),
    ],
)
def test_its_errors_have_its_format_and_its_names(
    http: Client, body: dict[str, Any], why: str
) -> None:
    answer = http.post("/v1/plain", json=body)
    assert answer.status_code == 400
    assert answer.json()["why"].startswith(why)
