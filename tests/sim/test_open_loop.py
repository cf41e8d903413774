"""The open-loop runner: its account on a clock made of sleeps, and once over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from smartspec_bench.open_loop import TOO_MANY_OUT, Bounds, OpenLoop
from smartspec_bench.prompts import Prompt, PromptFileError, generated, read_prompts
from smartspec_bench.streams import (
    NO_FINISH,
    TIMED_OUT,
    Exchange,
    HttpStreams,
    StreamError,
    UnreachableError,
)
from smartspec_sim.latency import summarise
from smartspec_sim.record import read_record

BOUNDS = Bounds(max_requests=100, max_s=100.0, timeout_s=30.0)


class Script:
    """Answers by a script: what each prompt's stream does."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.gate = asyncio.Event()

    async def stream(self, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        self.sent.append(fields)
        match fields["text_input"]:
            case "refused":
                raise StreamError("HTTP 503: full")
            case "dead":
                raise UnreachableError("connection refused")
            case "cut":
                yield {"num_output_tokens": 1}
            case "silent":
                await asyncio.Event().wait()
            case "held":
                await self.gate.wait()
                yield {"num_output_tokens": 1, "finish_reason": "stop"}
            case _:
                yield {"num_output_tokens": 2, "num_input_tokens": 0, "finish_reason": ""}
                yield {"num_output_tokens": 1, "num_input_tokens": 7, "finish_reason": "length"}


class Ticks:
    """A clock that only the schedule's sleeps move; other tasks run while it does."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        self.now_s += seconds


def send(
    times: list[float], texts: list[str], bounds: Bounds = BOUNDS
) -> tuple[list[Exchange], Script, list[int]]:
    """The exchanges, what was sent, and the order in which they ended."""
    ended: list[int] = []

    async def run() -> tuple[list[Exchange], Script]:
        script, ticks = Script(), Ticks()
        loop = OpenLoop(
            script, bounds, {"max_tokens": 5, "stream": True}, now=ticks.now, sleep=ticks.sleep
        )
        prompts = iter([Prompt(text, 9 if text == "long" else None) for text in texts])
        exchanges = await loop.run(times, prompts, lambda exchange: ended.append(exchange.index))
        return exchanges, script

    return *asyncio.run(run()), ended


def test_requests_leave_at_their_absolute_times() -> None:
    exchanges, script, ended = send([0.5, 1.0, 4.0], ["a", "long", "b"])
    assert [exchange.scheduled_s for exchange in exchanges] == [0.5, 1.0, 4.0]
    assert [exchange.sent_s for exchange in exchanges] == pytest.approx([0.5, 1.0, 4.0])
    assert [fields["max_tokens"] for fields in script.sent] == [5, 9, 5]
    assert ended == [0, 1, 2]
    assert exchanges[0].chunk_tokens == [2, 1]
    assert (exchanges[0].num_tokens, exchanges[0].num_input_tokens) == (3, 7)


def test_nothing_is_sent_to_a_server_that_is_gone() -> None:
    """What was out before ends in its own way."""
    exchanges, script, ended = send([1.0, 2.0, 3.0, 4.0], ["a", "dead", "b", "c"])
    assert [fields["text_input"] for fields in script.sent] == ["a", "dead"]
    assert [exchange.error for exchange in exchanges] == [None, "connection refused"]
    assert ended == [0, 1]


def test_those_that_are_late_leave_at_once_and_are_charged_for_it() -> None:
    """The third is due before the second's time has come round: times need not be kept exactly for
    latencies to be right, which count from the schedule."""
    exchange = Exchange(0, scheduled_s=1.0, sent_s=1.5)
    exchange.take({"num_output_tokens": 1}, 2.0)
    exchange.take({"num_output_tokens": 3, "finish_reason": "length"}, 3.5)
    found = summarise([exchange.timing])
    assert found["ttft_ms"]["mean"] == pytest.approx(1000)
    assert found["from_sent"]["ttft_ms"]["mean"] == pytest.approx(500)
    assert found["tpot_ms"]["mean"] == pytest.approx(500)
    assert found["send_lag_ms"]["p99"] == pytest.approx(500)


def test_what_fails_is_counted_and_nothing_else_is_held_up() -> None:
    bounds = Bounds(100, 100.0, timeout_s=0.05)
    texts = ["refused", "cut", "silent", "fine"]
    exchanges, _, ended = send([0.1, 0.2, 0.3, 0.4], texts, bounds)
    errors = ["HTTP 503: full", NO_FINISH, TIMED_OUT, None]
    assert [exchange.error for exchange in exchanges] == errors
    assert sorted(ended) == [0, 1, 2, 3]
    found = summarise([exchange.timing for exchange in exchanges])
    assert (found["num_finished"], found["num_failed"]) == (1, 3)


def test_bounds_in_number_in_time_and_at_once() -> None:
    assert len(send([1, 2, 3], ["a"] * 3, Bounds(2, 100))[0]) == 2
    assert len(send([1, 2, 3], ["a"] * 3, Bounds(9, 2.5))[0]) == 2
    exchanges, script, _ = send([1, 2, 3], ["silent"] * 3, Bounds(9, 9, 2, timeout_s=0.05))
    assert [exchange.error for exchange in exchanges] == [TIMED_OUT, TIMED_OUT, TOO_MANY_OUT]
    assert len(script.sent) == 2
    assert exchanges[2].sent_s is None


def test_acceptance_is_the_conditional_one() -> None:
    """Steps of 4, 2 and 1 drafts keep 4, 1 and 0: 5 of 7 trials, as the last two stopped short."""
    document = {"per_step_drafted": [4, 2, 1], "per_step_accepted": [4, 1, 0]}
    exchange = Exchange(0, 0.0)
    exchange.last = {"metrics": json.dumps({"speculative_decoding": document})}
    assert exchange.accept_prob == pytest.approx(5 / 7)
    assert Exchange(0, 0.0).accept_prob is None


def test_the_servers_own_times_are_recorded_where_it_sent_them() -> None:
    exchange = Exchange(0, 0.0)
    assert "server_s" not in exchange.record()
    times = {"arrival": 1, "first_scheduled": 2, "first_token": 3, "last_token": 4}
    exchange.last = {f"{name}_time_ns": 500_000_000 * n for name, n in times.items()}
    expected = {"arrival": 0.5, "first_scheduled": 1.0, "first_token": 1.5, "last_token": 2.0}
    assert exchange.record()["server_s"] == pytest.approx(expected)
    exchange.last = {**exchange.last, "first_token_time_ns": 0}
    assert "server_s" not in exchange.record()


def test_over_http_and_back_as_a_record(tmp_path: Path) -> None:
    """A server that answers two of three; what is recorded can be simulated."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["text_input"] == "bad":
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
                loop = OpenLoop(streams, BOUNDS, {"stream": True})
                texts = map(Prompt, ["good", "bad", "good", "breaks"])
                return await loop.run([0.0, 0.01, 0.02, 0.03], texts)
        finally:
            await runner.cleanup()

    exchanges = asyncio.run(run())
    errors = [exchange.error for exchange in exchanges]
    assert errors == [None, 'HTTP 400: {"error": "no such prompt"}', None, "broken"]
    good = exchanges[2]
    assert (good.chunk_tokens, good.num_input_tokens) == ([2, 2, 2], 4)
    assert good.sent_s is not None
    assert good.scheduled_s <= good.sent_s <= good.chunk_s[0] <= good.chunk_s[-1]
    path = tmp_path / "load.jsonl"
    path.write_text("".join(json.dumps(exchange.record()) + "\n" for exchange in exchanges[::2]))
    requests = read_record(path, accept=0.5)
    assert [(request.prompt_len, request.output_len) for request in requests] == [(4, 6)] * 2
    assert [request.arrival_s for request in requests] == [0.0, 0.02]


def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    async def run() -> list[Exchange]:
        async with HttpStreams("http://127.0.0.1:9") as streams:
            return await OpenLoop(streams, BOUNDS, {}).run([0.0, 0.0], repeat(Prompt("a")))

    exchanges = asyncio.run(run())
    assert all("Connect" in (exchange.error or "") for exchange in exchanges)
    assert len(exchanges) == 2


def test_prompts_of_files(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"text_input": "b", "kind": "k"}\n')
    assert read_prompts(own) == [Prompt("a", 3), Prompt("b", None, "k")]
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    shared = tmp_path / "shared.json"
    shared.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[1:]}]))
    assert read_prompts(shared) == [Prompt("hi", kind="sharegpt")]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "holds no prompt"),
        ("{", "line 1: Expecting"),
        ('{"prompt": ""}', "line 1: prompt: got"),
        ('{"prompt": "a"}\n{"text": "a"}', "line 2: unknown key"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: got 0"),
        ('[{"conversations": []}]', "holds no prompt"),
    ],
)
def test_prompt_files_that_are_none(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=word):
        read_prompts(path)


def test_generated_prompts_are_the_workloads_in_turn() -> None:
    kinds = [prompt.kind for prompt, _ in zip(generated("mixed"), range(5), strict=False)]
    assert kinds == ["chat", "sql", "summarize", "qa", "chat"]
