"""The endpoint's routes with a model that answers from memory. See tests/live/test_openai.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from endpoint_client import CHAT, HELLO, PROMPTS, TEXTS, events, http
from standins import Echo
from starlette.routing import Route

from smartspec_gateway.guard import ClientGone
from smartspec_gateway.limits import Limits
from smartspec_gateway.openai.apis.requests import Settings
from smartspec_gateway.openai.app import create_app
from smartspec_gateway.openai.errors import ApiError
from smartspec_gateway.openai.model import Piece
from smartspec_gateway.openai.pieces import pieces_of
from smartspec_gateway.workers import Work, Workers


def test_a_chat_becomes_the_models_prompt() -> None:
    model = Echo()
    body = {
        "messages": [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO],
        "stop": "x",
        "seed": -1,
        "n": 2,
        "max_completion_tokens": 9,
        "logit_bias": {"300": 5},
        "tpot_slo_ms": 30,
        "stop_token_ids": [5, 6],
        "speculation_policy": "fixed:2",
    }
    answer = http(model).post(CHAT, json=body).json()
    prompt = "Task: chat\nUser: Hello!\nAssistant: Hi.\nUser: Hello!\nAnswer:"
    first, second = model.asked
    assert first["input_ids"] == second["input_ids"] == PROMPTS.encode(prompt)
    assert (first["seed"], second["seed"]) == (2**64 - 1, 0)
    assert (first["max_tokens"], first["stop_words"]) == (9, ["x"])
    assert first["stop_token_ids"] == [5, 6]
    assert PROMPTS.encode(first["embedding_bias_words"][0]) == [300]
    assert first["embedding_bias_weights"] == [5.0]
    assert (first["tpot_slo_ms"], first["speculation_policy"]) == (30.0, "fixed:2")
    assert answer["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one two"] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 2
    assert answer["usage"] == {
        "prompt_tokens": 22,
        "completion_tokens": 6,
        "total_tokens": 28,
        "prompt_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer["metrics"] == {"speculative_decoding": {}}


def test_streams_have_usage_as_asked_and_end_with_done() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "stream": True, "stream_options": options}
    role, one, two, end, usage, done = events(http().post(CHAT, json=body).text)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert one["choices"][0]["delta"] == {"content": "one"}
    assert two["choices"][0]["delta"] == {"content": " two"}
    assert end["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert usage["metrics"] == {"speculative_decoding": {}}
    assert [found["usage"]["completion_tokens"] for found in (one, two)] == [1, 3]
    assert done == "[DONE]"


def test_several_prompts_and_echo() -> None:
    body = {"prompt": ["a", "b"], "echo": True, "n": 2}
    model = Echo()
    answer = http(model).post(TEXTS, json=body).json()
    assert model.asked[0]["max_tokens"] == 511, "the rest of the context"
    assert [c["text"] for c in answer["choices"]] == ["aone two"] * 2 + ["bone two"] * 2
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 10, "5 of each"
    stream = http().post(TEXTS, json={"prompt": "a", "echo": True, "stream": True})
    assert [one["choices"][0]["text"] for one in events(stream.text)[:-1][:2]] == ["aone", " two"]


def test_the_page_of_the_routes_has_each_route() -> None:
    page = (Path(__file__).parents[2] / "docs/operate/openai.md").read_text(encoding="utf-8")
    found = re.findall(r"`(GET|POST) (/[^`]*)`", page.partition("\n## ")[0])
    app = create_app(Echo(), PROMPTS, Settings("smartspec", Limits(512)))
    routes = {
        (method, route.path.replace("{name:path}", "NAME"))
        for route in app.routes
        if isinstance(route, Route) and "redirect" not in route.path
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert sorted(found) == sorted(routes)


def test_many_prompts_run_some_at_once() -> None:
    class Counting(Echo):
        num_running = most = 0

        async def generate(self, tensors: Any) -> AsyncIterator[Piece]:
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            async for piece in super().generate(tensors):
                await asyncio.sleep(0)
                yield piece
            self.num_running -= 1

    model = Counting()
    answer = http(model).post(TEXTS, json={"prompt": ["x"] * 64, "n": 2})
    assert [one["index"] for one in answer.json()["choices"]] == list(range(128))
    assert model.most == 16
    refused = http(model).post(TEXTS, json={"prompt": ["x"] * 65, "n": 2})
    assert refused.json()["error"]["param"] == "n"


def test_errors_of_the_model() -> None:
    refused = ApiError(400, "prompt: got 9 tokens, must be at most 8 tokens", "prompt")
    for stream in (False, True):
        body = {"messages": HELLO, "stream": stream}
        answer = http(Echo(refused)).post(CHAT, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        assert answer.json()["error"]["message"].startswith("prompt: got 9 tokens")
    full = ApiError(503, "the queue is full", retry_after_s=1)
    answer = http(Echo(full)).post(TEXTS, json={"prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    late = http(Echo(full, num_before=1))
    found = events(late.post(TEXTS, json={"prompt": "x", "stream": True}).text)
    assert found[0]["choices"][0]["text"] == "one"
    assert found[1] == full.body, "no [DONE] after an error"


def test_chunks_have_counts_if_asked() -> None:
    body = {"messages": HELLO, "stream": True, "return_spec_metrics": "detailed"}
    found = events(http().post(CHAT, json=body).text)[1]["choices"][0]["speculation"]
    names = {"num_tokens", "num_steps", "num_drafted", "num_accepted", "proposer", "tokens"}
    assert (found.keys(), found["num_tokens"]) == (names, 1)


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_pages_need_nothing_from_elsewhere(path: str) -> None:
    found = http(api_keys=("key",)).get(path)
    assert found.status_code == 200
    assert "https:" not in found.text
    assert "http:" not in found.text
    assert "default-src 'self'" in found.headers["content-security-policy"]


def test_the_page_of_the_api_has_the_fields_of_each_route() -> None:
    text = http().get("/docs").text
    assert "<h2><code>POST /v1/chat/completions</code></h2>" in text
    assert "<td><code><b>messages</b></code></td><td>array</td>" in text
    assert "<td><code>temperature</code></td><td>number 0..2</td><td>1.0</td>" in text
    assert "/v1/models/{name}" in text


def test_a_client_that_leaves_while_its_body_waits_asks_no_model() -> None:
    """Nor is its body processed."""
    model, was_left = Echo(), list[str]()

    class Busy(Workers):
        async def run(self, work: Work, kind: str, body: bytes) -> Any:
            try:
                await asyncio.sleep(60)
            finally:
                was_left.append(kind)

    limits = Limits(512)
    app = create_app(model, PROMPTS, Settings("smartspec", limits), Busy(limits))  # type: ignore[arg-type]
    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "query_string": b"",
        "headers": headers,
    }
    messages = iter([{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(_: Any) -> None:
        pass

    with pytest.raises(ClientGone):
        asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    assert was_left == [CHAT]
    assert not model.asked


def test_closing_the_pieces_cancels_all_requests() -> None:
    model = Echo()
    model.is_slow = True

    async def run() -> None:
        pieces = pieces_of(model, [{}, {}, {}])
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert model.num_cancelled == 3
