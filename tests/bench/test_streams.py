"""The benchmarks' client over HTTP, and what it records."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from smartspec_bench.live import Load, through
from smartspec_bench.prompts import Prompt
from smartspec_bench.streams import Exchange, HttpStreams

LOAD = Load(sizes=(1,), workload="mixed", rounds=1, max_tokens=6)


def test_acceptance_is_the_conditional_one() -> None:
    """Steps of 4, 2 and 1 drafts keep 4, 1 and 0: 5 of 7 trials, as the last two stopped short."""
    document = {"per_step_drafted": [4, 2, 1], "per_step_accepted": [4, 1, 0]}
    exchange = Exchange(0, 0.0)
    exchange.last = {"metrics": json.dumps({"speculative_decoding": document})}
    assert exchange.accept_prob == pytest.approx(5 / 7)
    assert Exchange(0, 0.0).accept_prob is None


EVENTS: list[dict[str, Any]] = [
    *[{"text_output": "x", "num_output_tokens": 2, "num_input_tokens": 0}] * 2,
    {"text_output": "x", "num_output_tokens": 2, "num_input_tokens": 4, "finish_reason": "length"},
]
OF_PROMPT = {"good": EVENTS, "breaks": [EVENTS[0], {"error": "broken"}, EVENTS[2]]}


class Server:
    """Refuses a prompt that is not in OF_PROMPT. most_open: requests at once."""

    num_open = most_open = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0.01)
        self.num_open -= 1
        events = OF_PROMPT.get((await request.json())["text_input"])
        if events is None:
            return web.json_response({"error": "no such prompt"}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        return response


def test_streams_over_http() -> None:
    """Two whole answers, a refusal, and an error in a stream, two at once; then a server that is
    not there."""
    server, app = Server(), web.Application()
    app.router.add_post("/v2/models/smartspec/generate_stream", server.answer)

    async def run() -> list[Exchange]:
        async with TestServer(app) as http, HttpStreams(str(http.make_url("/"))[:-1]) as streams:
            prompts = [Prompt(text) for text in ("good", "bad", "good", "breaks")]
            found = await through(streams, LOAD)("goodput", prompts, 2)
        async with HttpStreams("http://127.0.0.1:9") as streams:
            return [*found, *await through(streams, LOAD)("none", [Prompt("a")], 1)]

    exchanges = asyncio.run(run())
    *errors, gone = [exchange.error for exchange in exchanges]
    assert "Connect" in (gone or "")
    assert errors == [None, 'HTTP 400: {"error": "no such prompt"}', None, "broken"]
    assert server.most_open == 2
    good = exchanges[2]
    assert (good.chunk_tokens, good.num_input_tokens) == ([2, 2, 2], 4)
    assert good.scheduled_s <= good.chunk_s[0] <= good.chunk_s[-1]
