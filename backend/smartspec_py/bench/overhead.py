"""What Triton, HTTP and the client cost: the same server inside this process and behind them.

A round sends the same requests together first to the one and then to the other, in the other order
in the next round; the ratio of their tokens/s is taken within the round. While one is measured the
other is idle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from smartspec_py.bench.client import BenchError, Client
from smartspec_py.bench.plan import MIXED, Due
from smartspec_py.bench.ratios import Ratio, interval
from smartspec_py.prompts import PROMPT_SEED, Prompt, generated
from smartspec_py.serving.local import generate
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server

SEEDS_A_SIZE = 100


@dataclass(frozen=True)
class Overhead:
    """triton_tps, local_tps: tokens a second of each round. ratio: Triton's over the other's."""

    policy: str
    num_rows: int
    triton_tps: tuple[float, ...]
    local_tps: tuple[float, ...]

    @property
    def ratio(self) -> Ratio | None:
        pairs = zip(self.triton_tps, self.local_tps, strict=True)
        return interval([math.log(triton / local) for triton, local in pairs])

    @property
    def medians(self) -> tuple[float, float]:
        return median(self.triton_tps), median(self.local_tps)


@dataclass(frozen=True)
class Sides:
    client: Client
    server: Server
    max_tokens: int

    async def triton_tps(self, policy: str, prompts: Sequence[Prompt]) -> float:
        """Raises BenchError where a request fails."""
        exchanges = await self.client.open_loop(policy, [Due(0.0, one) for one in prompts])
        for exchange in exchanges:
            if (error := exchange.timing.error) is not None:
                raise BenchError(f"through Triton: {error}")
        return sum(e.num_tokens for e in exchanges) / max(e.chunk_s[-1] for e in exchanges)

    async def local_tps(self, policy: str, prompts: Sequence[Prompt]) -> float:
        requests = [
            GenerateParams(
                text=prompt.text,
                max_tokens=self.max_tokens,
                policy=policy,
                stream=True,
                reuse_prefix=False,
            )
            for prompt in prompts
        ]
        start_s = time.monotonic()
        sinks = generate(self.server, requests)
        for sink in sinks:
            if sink.error is not None:
                raise BenchError(f"in this process: {sink.error[1]}")
        last_s = max(sink.times_s[-1] for sink in sinks)
        return sum(sink.num_tokens for sink in sinks) / (last_s - start_s)


async def measure(
    sides: Sides,
    policies: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    say: Callable[[str], None],
) -> list[Overhead]:
    """A first round of each is sent and not counted."""
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(-1, rounds):
        for num_rows in sizes:
            seed = PROMPT_SEED + SEEDS_A_SIZE * num_rows + number
            prompts = list(islice(generated(MIXED, seed), num_rows))
            for policy in policies:
                say(f"round {number + 1} of {rounds}, {num_rows} at once, {policy}")
                pair = await _pair(sides, policy, prompts, is_triton_first=number % 2 == 0)
                if number >= 0:
                    rates.setdefault((policy, num_rows), []).append(pair)
    return [
        Overhead(policy, num_rows, tuple(t for t, _ in pairs), tuple(local for _, local in pairs))
        for (policy, num_rows), pairs in rates.items()
    ]


async def _pair(
    sides: Sides, policy: str, prompts: Sequence[Prompt], is_triton_first: bool
) -> tuple[float, float]:
    """Triton's and this process's."""
    order: list[Callable[[str, Sequence[Prompt]], Awaitable[float]]]
    order = [sides.triton_tps, sides.local_tps]
    found = [await side(policy, prompts) for side in (order if is_triton_first else order[::-1])]
    first, second = found
    return (first, second) if is_triton_first else (second, first)
