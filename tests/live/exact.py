"""The text of many requests at once over real sockets, against each request's own without drafts.

Every case (a prompt, a temperature, penalties) is asked once without speculation, then again and
again under random policies and proposers, many at a time, with priorities and clients that leave in
mid-stream.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from smartspec_bench.workloads import WORKLOADS, generate
from smartspec_py.api.contract import MODEL_NAME

MAX_TOKENS = 48
NUM_PROMPTS = 5
LEAVES = 0.1
"""Share of clients that leave after their first piece of text."""

TEMPERATURES = (0.0, 0.7, 1.0)
PENALTIES: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 40, "top_p": 0.95},
    {"repetition_penalty": 1.2, "min_p": 0.02},
    {"presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 24},
    {
        "embedding_bias_words": [" the"],
        "embedding_bias_weights": [-2.0],
        "bad_words": ["and"],
    },
)
POLICIES = ("none", "fixed:1", "fixed:2", "fixed:4", "goodput")
PROPOSERS = ("draft_model", "prompt_lookup")


@dataclass
class Summary:
    num_requests: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached: int = 0
    num_left: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)


def make_cases(seed: int, num_prompts: int = NUM_PROMPTS) -> list[dict[str, Any]]:
    return [
        {
            "text_input": generate(workload, seed, index).prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": temperature,
            "seed": seed + index,
            "stream": True,
            **PENALTIES[(index + shift) % len(PENALTIES)],
        }
        for shift, workload in enumerate(WORKLOADS)
        for index in range(num_prompts)
        for temperature in TEMPERATURES
    ]


async def _answer(
    http: aiohttp.ClientSession, fields: dict[str, Any], leaves: bool = False
) -> tuple[str, dict[str, Any]]:
    """The whole text, and the last response; empty where the client leaves."""
    text, num_tokens, last = "", 0, {}
    async with http.post(f"/v2/models/{MODEL_NAME}/generate_stream", json=fields) as response:
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            last = json.loads(line.removeprefix(b"data:"))
            if "error" in last:
                raise RuntimeError(f"{fields}: {last['error']}")
            text += last["text_output"]
            num_tokens += last["num_output_tokens"]
            if leaves:
                return text, {}
    return text, last | {"num_all_tokens": num_tokens}


async def run(
    url: str, num_requests: int, seed: int, concurrency: int, num_prompts: int = NUM_PROMPTS
) -> Summary:
    """num_prompts: of each workload."""
    rng = random.Random(seed)
    cases = make_cases(seed, num_prompts)
    summary = Summary()
    free = asyncio.Semaphore(concurrency)

    async def compare(case: dict[str, Any], expected: str) -> None:
        changes = {
            "speculation_policy": rng.choice(POLICIES),
            "proposer": rng.choice(PROPOSERS),
            "request_priority": rng.choice((0, 0, 0, 1)),
        }
        leaves = rng.random() < LEAVES
        async with free:
            text, last = await _answer(http, case | changes, leaves)
        if leaves:
            summary.num_left += 1
            if not expected.startswith(text):
                summary.differences.append({**changes, "expected": expected, "found": text})
            return
        summary.num_requests += 1
        summary.num_tokens += last["num_all_tokens"]
        summary.num_drafted += last["total_draft_tokens"]
        summary.num_accepted += last["total_accepted_draft_tokens"]
        summary.num_cached += last["num_cached_tokens"]
        if text != expected:
            summary.differences.append({**changes, "expected": expected, "found": text})

    plain = {"speculation_policy": "none", "reuse_prefix": False}
    async with aiohttp.ClientSession(f"http://{url}") as http:
        expected = [(await _answer(http, case | plain))[0] for case in cases]
        while summary.num_requests < num_requests:
            count = min(4 * concurrency, num_requests - summary.num_requests)
            chosen = [rng.randrange(len(cases)) for _ in range(count)]
            await asyncio.gather(*(compare(cases[i], expected[i]) for i in chosen))
    return summary
