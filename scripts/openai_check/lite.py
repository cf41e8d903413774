"""LiteLLM, as a provider with OpenAI's API and as a hosted vLLM. See `sdk` for how it is run."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

import litellm
import pytest

MESSAGES: Any = [{"role": "user", "content": "Hello!"}]


async def check(url: str) -> int:
    num_calls = 0
    for provider in ("openai", "hosted_vllm"):
        asked: Any = {
            "model": f"{provider}/smartspec",
            "api_base": url,
            "api_key": "none",
            "messages": MESSAGES,
            "max_tokens": 12,
            "temperature": 0,
        }
        whole = litellm.completion(**asked)
        text = whole.choices[0].message.content
        assert text
        assert whole.usage.completion_tokens <= 12
        stream = litellm.completion(**asked, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in stream) == text
        found = [
            one.choices[0].delta.content or ""
            async for one in await litellm.acompletion(**asked, stream=True)
        ]
        assert "".join(found) == text
        legacy = litellm.text_completion(
            model="text-completion-openai/smartspec",
            api_base=url,
            api_key="none",
            prompt="a",
            max_tokens=4,
        )
        assert legacy.choices[0].text
        with pytest.raises(litellm.BadRequestError, match="max_tokens"):
            litellm.completion(**asked | {"max_tokens": 10**6})
        num_calls += 5
    return num_calls


if __name__ == "__main__":
    num_calls = asyncio.run(check(sys.argv[1]))
    print(f"litellm {version('litellm')}: {num_calls} calls")
