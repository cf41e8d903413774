"""The benchmarks' client over HTTP, what it records, and prompts of files."""

from __future__ import annotations

import asyncio
import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
from aiohttp import web
from servers import TINY

from smartspec_bench.live import Load, through
from smartspec_bench.prompts import Prompt, PromptFileError, chat_template, generated, read_prompts
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
    """Two whole answers, a refusal, and an error in a stream; then a server that is not there."""

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
                prompts = [Prompt(text) for text in ("good", "bad", "good", "breaks")]
                found = await through(streams, LOAD)("goodput", prompts)
            async with HttpStreams("http://127.0.0.1:9") as streams:
                return [*found, *await through(streams, LOAD)("none", [Prompt("a")])]
        finally:
            await runner.cleanup()

    exchanges = asyncio.run(run())
    *errors, gone = [exchange.error for exchange in exchanges]
    assert "Connect" in (gone or "")
    assert errors == [None, 'HTTP 400: {"error": "no such prompt"}', None, "broken"]
    good = exchanges[2]
    assert (good.chunk_tokens, good.num_input_tokens) == ([2, 2, 2], 4)
    assert good.scheduled_s <= good.chunk_s[0] <= good.chunk_s[-1]


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
        ('[{"conversations": [{"value": "hi"}]}]', "entry 1: 'from'"),
    ],
)
def test_prompt_files_that_are_none(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=word):
        read_prompts(path)


@pytest.mark.parametrize("workload", ["mixed", "tiny"])
def test_generated_prompts_are_the_workloads_in_turn(workload: str) -> None:
    kinds = [prompt.kind for prompt in islice(generated(workload), 5)]
    assert kinds == ["chat", "sql", "summarize", "qa", "chat"]


def test_every_text_is_used_before_one_is_used_again() -> None:
    found = [prompt.text for prompt in islice(generated("qa"), 80)]
    assert len(set(found[:40])) == 40
    assert sorted(found[:40]) == sorted(found[40:])
    assert found[:40] != found[40:]
    assert found[:40] != [prompt.text for prompt in islice(generated("qa", seed=2), 40)]


def test_the_chat_template_of_a_model(tmp_path: Path) -> None:
    """A directory with a template, the same without it, and one without a tokenizer."""
    shutil.copy(TINY / "target" / "tokenizer.json", tmp_path)
    assert chat_template(tmp_path)("hi") == chat_template(None)("hi") == "hi"
    (tmp_path / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    template = chat_template(tmp_path)
    assert template("hi") == "<hi>"
    assert all(one.text.startswith("<") for one in islice(generated("mixed", 1, template), 8))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        chat_template(TINY)


@pytest.mark.parametrize("own", [[], [Prompt(c) for c in "abc"]])
def test_a_round_continues_where_the_one_before_ended(own: list[Prompt]) -> None:
    load = Load(sizes=(2,), workload="sql", rounds=2, max_tokens=6, own=own)
    found = [prompt for number in (-1, 0, 1) for prompt in load.prompts(number, 2)]
    assert found == (own * 2 if own else list(islice(generated("sql"), 6)))
