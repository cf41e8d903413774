"""The benchmarks' client over HTTP, and what it records."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

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


def test_streams_over_http() -> None:
    """Two whole answers, a refusal, and an error in a stream, two at once; then a server that is
    not there."""
    num_open = most_open = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await asyncio.sleep(0.01)
        body = await request.json()
        if body["text_input"] == "bad":
            num_open -= 1
            return web.json_response({"error": "no such prompt"}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(3):
            event = {
                "text_output": "x",
                "num_output_tokens": 2,
                "num_input_tokens": 4 if number == 2 else 0,
                "finish_reason": "length" if number == 2 else "",
            }
            if body["text_input"] == "breaks" and number == 1:
                event = {"error": "broken"}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        num_open -= 1
        return response

    async def run() -> list[Exchange]:
        app = web.Application()
        app.router.add_post("/v2/models/smartspec/generate_stream", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with HttpStreams(f"http://127.0.0.1:{port}") as streams:
                prompts = [Prompt(text) for text in ("good", "bad", "good", "breaks")]
                found = await through(streams, LOAD)("goodput", prompts, 2)
            async with HttpStreams("http://127.0.0.1:9") as streams:
                return [*found, *await through(streams, LOAD)("none", [Prompt("a")], 1)]
        finally:
            await runner.cleanup()

    exchanges = asyncio.run(run())
    *errors, gone = [exchange.error for exchange in exchanges]
    assert "Connect" in (gone or "")
    assert errors == [None, 'HTTP 400: {"error": "no such prompt"}', None, "broken"]
    assert most_open == 2
    good = exchanges[2]
    assert (good.chunk_tokens, good.num_input_tokens) == ([2, 2, 2], 4)
    assert good.scheduled_s <= good.chunk_s[0] <= good.chunk_s[-1]
