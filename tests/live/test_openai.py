"""The OpenAI-compatible endpoint in front of a real Triton, asked by the packages `openai` and
`anthropic`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import pytest
from scrape import scrape_when
from servers import TINY
from tokenizers import Tokenizer
from wire import generate

import openai
from smartspec_launch.triton_server import TritonServer
from smartspec_py.api.contract import MODEL_NAME

pytestmark = pytest.mark.triton

RUNNING = "smartspec_num_requests_running"
MESSAGES = [{"role": "user", "content": "The simple museum is beautiful. What should we do?"}]
PROMPT = "Task: chat\nUser: The simple museum is beautiful. What should we do?\nAnswer:"


@pytest.fixture(scope="module")
def url(local_server: TritonServer) -> str:
    assert local_server.openai is not None
    return local_server.openai.url(local_server.address)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_the_text_is_that_of_triton(local_server: TritonServer, client: openai.OpenAI) -> None:
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}):
        expected = generate(local_server, text_input=PROMPT, max_tokens=24, **sampling)
        completion = client.completions.create(
            model=MODEL_NAME, prompt=PROMPT, max_tokens=24, **sampling
        )
        chat = client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=24, **sampling
        )
        stream = client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=24, stream=True, **sampling
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert completion.choices[0].text == expected["text_output"]
        assert chat.choices[0].message.content == expected["text_output"]
        assert streamed == expected["text_output"]
        assert chat.choices[0].finish_reason == expected["finish_reason"]
        assert chat.usage.completion_tokens == expected["num_output_tokens"]
        assert chat.usage.prompt_tokens == expected["num_input_tokens"]


def test_responses_have_the_text_of_chats(client: openai.OpenAI) -> None:
    """Of a repeated prompt, all tokens but the last are in the prefix cache."""
    chat = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=24, temperature=0
    )
    asked = {"model": MODEL_NAME, "input": MESSAGES, "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    for found in (whole, last.response):
        assert found.output_text == chat.choices[0].message.content
        assert (found.status == "incomplete") == (chat.choices[0].finish_reason == "length")
        assert found.usage.output_tokens == chat.usage.completion_tokens
        assert found.usage.input_tokens == chat.usage.prompt_tokens
        assert found.usage.input_tokens_details.cached_tokens == found.usage.input_tokens - 1


def test_messages_have_the_text_of_chats(url: str, client: openai.OpenAI) -> None:
    """The stop sequence that ended the text is named."""
    chat = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=24, temperature=0
    )
    text = chat.choices[0].message.content
    word = text.split()[2]
    asked = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 24}
    asked |= {"extra_body": {"temperature": 0}}
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=60) as other:
        whole = other.messages.create(**asked)
        stopped = other.messages.create(**asked, stop_sequences=["zzz", word])
        with other.messages.stream(**asked, stop_sequences=["zzz", word]) as stream:
            streamed = stream.get_final_message()
        counted = other.messages.count_tokens(model=MODEL_NAME, messages=MESSAGES)
    assert whole.content[0].text == text
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.usage.input_tokens == 1, "the others are in the prefix cache"
    assert whole.usage.cache_read_input_tokens == chat.usage.prompt_tokens - 1
    assert counted.input_tokens == chat.usage.prompt_tokens
    for found in (stopped, streamed):
        assert found.content[0].text == text[: text.index(word)]
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)


def test_several_choices_and_stop(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, n=3, seed=1, max_tokens=12, temperature=1.5
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in found.choices}) > 1
    plain = client.completions.create(model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=24)
    text = plain.choices[0].text
    word = text.split()[2]
    stopped = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=24, stop=[word]
    )
    assert stopped.choices[0].text == text[: text.index(word)]
    assert stopped.choices[0].finish_reason == "stop"


def test_own_fields(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        extra_body={"speculation_policy": "fixed:2", "return_spec_metrics": "summary"},
    )
    assert found.metrics["speculative_decoding"]["num_draft_tokens"] > 0


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens: got 5000, must be") as raised:
        client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=5000)
    assert (raised.value.param, raised.value.code) == ("max_tokens", "context_length_exceeded")
    long = [{"role": "user", "content": "museum " * 3000}]
    with pytest.raises(openai.BadRequestError, match=r"messages: got .* tokens"):
        client.chat.completions.create(model=MODEL_NAME, messages=long)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt=PROMPT)
    assert client.models.list().data[0] == client.models.retrieve(MODEL_NAME)


def test_log_probabilities(client: openai.OpenAI) -> None:
    """Those of a text are the same while it is generated, with drafts, and as part of a prompt."""
    asked = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 12}
    fixed = {"extra_body": {"speculation_policy": "fixed:2"}}
    chat = client.chat.completions.create(
        **asked, **fixed, messages=MESSAGES, logprobs=True, top_logprobs=2
    ).choices[0]
    entries = chat.logprobs.content
    assert b"".join(bytes(one.bytes) for one in entries).decode() == chat.message.content
    assert all(one.top_logprobs[0].token == one.token for one in entries)
    tokens = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json")).encode(PROMPT).ids
    echoed = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT + chat.message.content, echo=True, logprobs=1, max_tokens=1
    ).choices[0]
    found = echoed.logprobs
    assert "".join(found.tokens) == echoed.text
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert [
        echoed.text[at:][: len(t)] for at, t in zip(found.text_offset, found.tokens, strict=True)
    ] == found.tokens
    num = len(entries)
    assert found.token_logprobs[-num - 1 : -1] == pytest.approx(
        [one.logprob for one in entries], abs=1e-3
    )
    by_tokens = client.completions.create(**asked, prompt=tokens, logprobs=0).choices[0]
    assert by_tokens.text == chat.message.content
    assert by_tokens.logprobs.token_logprobs == pytest.approx(
        [one.logprob for one in entries], abs=1e-3
    )


def test_a_disconnect_ends_the_requests(local_server: TritonServer, url: str) -> None:
    """Streamed or not: rows are free for others, and nothing is left running."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked = {"model": MODEL_NAME, "prompt": PROMPT, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(**asked, max_tokens=450, stream=True)
            await anext(stream)
            await stream.close()
            whole = asyncio.ensure_future(client.completions.create(**asked, max_tokens=450, n=3))
            while not scrape_when(local_server, lambda found: True).get(RUNNING):
                await asyncio.sleep(0.02)
            whole.cancel()

    asyncio.run(run())
    assert scrape_when(local_server, lambda found: not found.get(RUNNING)).get(RUNNING) == 0
