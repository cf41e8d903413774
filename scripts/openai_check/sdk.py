"""The package `openai`: sync, async, streams, errors, timeouts and cancellation.

Run by the interpreter of another environment, so it imports nothing of this repository.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

import openai

MODEL = "smartspec"
MESSAGES: Any = [{"role": "user", "content": "Hello!"}]
LONG: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


def sync(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        assert client.models.list().data[0].id == MODEL
        whole = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0, logprobs=True
        )
        stream = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        legacy = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=4)
        assert [one.index for one in legacy.choices] == [0, 1, 2, 3]


def errors(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        for error, fields in (
            (openai.BadRequestError, {"max_tokens": 10**6}),
            (openai.BadRequestError, {"temperature": 9}),
            (openai.BadRequestError, {"response_format": {"type": "json_object"}}),
            (openai.NotFoundError, {"model": "gpt"}),
        ):
            asked: Any = {"model": MODEL, "messages": MESSAGES, **fields}
            with pytest.raises(error) as found:
                client.chat.completions.create(**asked)
            assert found.value.body["message"]
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.05).completions.create(model=MODEL, prompt="a", **LONG)


async def asynchronous(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16}
        found = await asyncio.gather(
            *(client.chat.completions.create(**asked, seed=seed) for seed in range(12))
        )
        assert all(one.choices[0].finish_reason in ("stop", "length") for one in found)
        for _ in range(8):
            stream = await client.completions.create(model=MODEL, prompt="a", stream=True, **LONG)
            await anext(aiter(stream))
            await stream.close()
        task = asyncio.ensure_future(client.completions.create(model=MODEL, prompt="a", **LONG))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    sync(sys.argv[1])
    errors(sys.argv[1])
    asyncio.run(asynchronous(sys.argv[1]))
    print(f"openai {openai.__version__}: 3 groups")
