"""Measures the cost of the front, Triton, HTTP and the client: the same server with and without
them.

A round sends the same requests first through the front, then to Triton without it, then to a server
in this process. The next round begins with the second of them, and so on. Ratios of tokens/s are
taken within a round. While one is measured, the others are idle.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from smartspec_bench.client import BenchError, Client
from smartspec_bench.plan import MIXED, Due
from smartspec_bench.progress import Progress
from smartspec_bench.prompts import PROMPT_SEED, Prompt, generated
from smartspec_bench.ratios import Ratio, interval
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.local import generate

SEEDS_A_SIZE = 100


@dataclass(frozen=True)
class Round:
    """Tokens per second of each side, and the front's processor time in seconds per token."""

    front_tps: float
    triton_tps: float
    local_tps: float
    front_cpu_s: float


@dataclass(frozen=True)
class Overhead:
    """ratio: Triton's tokens per second over the local server's. front_ratio: the front's over
    Triton's."""

    policy: str
    batch_size: int
    rounds: tuple[Round, ...]

    @property
    def ratio(self) -> Ratio | None:
        return interval([math.log(one.triton_tps / one.local_tps) for one in self.rounds])

    @property
    def front_ratio(self) -> Ratio | None:
        return interval([math.log(one.front_tps / one.triton_tps) for one in self.rounds])

    @property
    def means(self) -> Round:
        """Geometric means, so that their ratios are the means of the ratios. Processor time:
        arithmetic mean."""
        front, triton, local, cpu = zip(*map(astuple, self.rounds), strict=True)
        means = geometric_mean(front), geometric_mean(triton), geometric_mean(local)
        return Round(*means, front_cpu_s=fmean(cpu))


@dataclass(frozen=True)
class Sides:
    """front, triton: clients of the two addresses. front_pid: process ID of the front."""

    front: Client
    triton: Client
    front_pid: int
    server: Server
    max_tokens: int

    async def front_tps(self, policy: str, prompts: Sequence[Prompt]) -> tuple[float, float]:
        """Tokens per second, and the front's processor seconds per token."""
        start_s = cpu_s(self.front_pid)
        tps, num_tokens = await self._tps(self.front, policy, prompts)
        return tps, (cpu_s(self.front_pid) - start_s) / num_tokens

    async def triton_tps(self, policy: str, prompts: Sequence[Prompt]) -> float:
        return (await self._tps(self.triton, policy, prompts))[0]

    @staticmethod
    async def _tps(client: Client, policy: str, prompts: Sequence[Prompt]) -> tuple[float, int]:
        """Tokens per second, and number of tokens. Raises BenchError if a request fails."""
        exchanges = await client.open_loop(policy, [Due(0.0, one) for one in prompts])
        for exchange in exchanges:
            if (error := exchange.timing.error) is not None:
                raise BenchError(f"through Triton: {error}")
        num_tokens = sum(e.num_tokens for e in exchanges)
        return num_tokens / max(e.chunk_s[-1] for e in exchanges), num_tokens

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
    progress: Progress,
) -> list[Overhead]:
    """The first round of each is a warm-up and is not counted."""
    found: dict[tuple[str, int], list[Round]] = {}
    for number in range(-1, rounds):
        for batch_size in sizes:
            seed = PROMPT_SEED + SEEDS_A_SIZE * batch_size + number
            prompts = list(islice(generated(MIXED, seed), batch_size))
            for policy in policies:
                progress.update(f"round {number + 1} of {rounds}, {batch_size} at once, {policy}")
                one = await _round(sides, policy, prompts, number)
                progress.advance()
                if number >= 0:
                    found.setdefault((policy, batch_size), []).append(one)
    return [Overhead(policy, rows, tuple(each)) for (policy, rows), each in found.items()]


async def _round(sides: Sides, policy: str, prompts: Sequence[Prompt], number: int) -> Round:
    """number: says which side is first."""
    values: dict[str, Any] = {}
    names = ("front_tps", "triton_tps", "local_tps")
    for place in range(len(names)):
        name = names[(number + place) % len(names)]
        values[name] = await getattr(sides, name)(policy, prompts)
    values["front_tps"], cpu = values["front_tps"]
    return Round(**values, front_cpu_s=cpu)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
