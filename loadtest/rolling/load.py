"""Clients that keep a number of streams in flight, and check the text of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import aiohttp
from tokenizers import Tokenizer

from rolling.servers import TOKENIZER
from smartspec_bench.streams import StreamError, outputs_of
from smartspec_py.api.contract import MODEL_NAME
from smartspec_py.core.types import SamplingParams
from smartspec_py.serving.model_files import load_tokenizer, num_token_ids
from smartspec_testing.fake_engine import text_key, token_at

BEFORE = "before"
"""The first phase."""

PROMPT = "Question:"
TOKENS = (20, 80)
"""Fewest and most tokens of a request."""

MAX_REQUESTS = 20_000
FULL = 0.9
"""Share of the streams. Some clients are always between two requests."""

WAIT_S = 300.0
POLL_S = 0.05
SOME_S = 0.5
"""Wait of a client after a refused or failed request. A refusal at once must not make a busy
loop."""


@dataclass
class Answer:
    """One request and its response. seed: its name, which defines the text.

    sent_in, ended_in: phases. server: the one that answered, from a header of HAProxy.
    num_last: last responses, which must be 1. drafted: tokens that were drafted.
    """

    seed: int
    max_tokens: int
    sent_in: str
    ended_in: str = ""
    server: str = ""
    status: int | None = None
    text: str = ""
    num_tokens: int = 0
    num_last: int = 0
    drafted: int = 0
    error: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        self.text += event["text_output"]
        self.num_tokens += event["num_output_tokens"]
        self.drafted = event["total_draft_tokens"]
        self.num_last += bool(event["finish_reason"])


class Texts:
    """The texts that the fake engine must generate for a seed; see `smartspec_testing`."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer = load_tokenizer("engine.tokenizer", TOKENIZER)
        self._vocab_size = num_token_ids(self._tokenizer)
        self._prompt = self._tokenizer.encode(PROMPT).ids

    def expected(self, seed: int, num_tokens: int) -> str:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        key, start = text_key(self._prompt, sampling), len(self._prompt)
        tokens = [token_at(key, start + i, self._vocab_size) for i in range(num_tokens)]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class Load:
    """Clients in `async with`. At its end, they send no more, and all responses are awaited."""

    def __init__(self, url: str, num_streams: int) -> None:
        self.num_streams = num_streams
        self.phase = BEFORE
        self.answers: list[Answer] = []
        self.num_answered = 0
        self._url = f"{url}/v2/models/{MODEL_NAME}/generate_stream"
        self._open: dict[int, Answer] = {}
        self._seeds = count(1)
        self._is_over = False
        self._rng = random.Random(1)
        self._session: aiohttp.ClientSession
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._clients = [asyncio.create_task(self._client()) for _ in range(self.num_streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self._clients)
        await self._session.close()

    def open_at(self, server: str) -> list[int]:
        """Seeds of the streams that this server has begun and not ended."""
        return [seed for seed, answer in self._open.items() if answer.server == server]

    async def until_full(self) -> None:
        """Until FULL of the streams are in flight at the same time, each with a response."""
        num = FULL * self.num_streams
        await self._until(lambda: sum(bool(one.server) for one in self._open.values()) >= num)

    async def until_answered(self, number: int) -> None:
        await self._until(lambda: self.num_answered >= number)

    async def until_serving(self, server: str, share: float = 0.25) -> None:
        """Until this server has this share of the streams."""
        await self._until(lambda: len(self.open_at(server)) >= share * self.num_streams)

    async def until_ended(self, seeds: list[int]) -> None:
        await self._until(lambda: not self._open.keys() & set(seeds))

    async def _until(self, is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_done():
                await asyncio.sleep(POLL_S)

    async def _client(self) -> None:
        while not self._is_over and len(self.answers) < MAX_REQUESTS:
            answer = Answer(next(self._seeds), self._rng.randint(*TOKENS), self.phase)
            self.answers.append(answer)
            self._open[answer.seed] = answer
            try:
                await self._ask(answer)
            except (StreamError, aiohttp.ClientError, OSError) as error:
                answer.error = f"{type(error).__name__}: {error}"
            if answer.error is None and answer.num_last == 0:
                answer.error = "the stream ended without a last response"
            answer.ended_in = self.phase
            del self._open[answer.seed]
            if answer.error is None:
                self.num_answered += 1
            else:
                await asyncio.sleep(SOME_S)

    async def _ask(self, answer: Answer) -> None:
        fields = {"text_input": PROMPT, "max_tokens": answer.max_tokens, "stream": True}
        fields |= {"temperature": 1.0, "seed": answer.seed}
        async with self._session.post(self._url, json=fields) as response:
            answer.status = response.status
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {await response.text():.200}")
            answer.server = response.headers.get("x-server", "?")
            async for line in response.content:
                if line.startswith(b"data:"):
                    answer.take(dict(outputs_of(line.removeprefix(b"data:"))))
