"""Compares policies on a running server: the same prompts for each, in turns.

A round sends the same requests under one policy after the other, in an order that rotates with the
round. So many are open at once: the next one follows when one ends, until the round has no more.
Results are ratios within a round, because the speed of a shared machine changes. With a server in
this process beside it, the ratio of both is the cost of Triton and HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from uuid import uuid4

from smartspec_bench.prompts import Prompt, Template, generated, plain
from smartspec_bench.results import Recorder, check_answered, phase_of
from smartspec_bench.streams import Exchange, Transport, answer, counts_of, seconds_from_now
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.local import generate

AT_ONCE = "at once"
"""Shape of the phases; their load is the number of requests."""

IN_PROCESS = ", in process"
"""Suffix of the policies of the server in this process."""

PER_PLACE = 3
"""Requests of a round for each of those that are open at once. With one, the number of open
requests would fall from the start."""

Serve = Callable[[str, Sequence[Prompt], int], Awaitable[list[Exchange]]]
"""Serves requests under a policy, so many at once."""


@dataclass(frozen=True)
class Load:
    """sizes: numbers of open requests. own: prompts instead of those of the workload. template:
    see `prompts.generated`. reuses: whether requests use prefixes and texts of earlier ones. Each
    policy is a new tenant in each round."""

    sizes: Sequence[int]
    workload: str
    rounds: int
    max_tokens: int
    temperature: float = 0.0
    own: Sequence[Prompt] = ()
    template: Template = plain
    reuses: bool = False

    def prompts(self, number: int, count: int) -> list[Prompt]:
        """The requests of a round. Each round continues where the one before has ended."""
        prompts = cycle(self.own) if self.own else generated(self.workload, template=self.template)
        return list(islice(prompts, (number + 1) * count, (number + 2) * count))


def through(transport: Transport, load: Load) -> Serve:
    """Requests to the running server."""

    async def serve(policy: str, prompts: Sequence[Prompt], at_once: int) -> list[Exchange]:
        exchanges = [Exchange(index, 0.0, one.kind) for index, one in enumerate(prompts)]
        now_s, places = seconds_from_now(), asyncio.Semaphore(at_once)
        fields = {
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "stream": True,
            "reuse_prefix": load.reuses,  # then only the first policy reads the prompts
            "tenant": uuid4().hex,
            "speculation_policy": policy,
        }

        async def send(exchange: Exchange, prompt: Prompt) -> None:
            async with places:
                exchange.scheduled_s = now_s()
                await answer(exchange, transport, {**fields, **prompt.fields}, now_s)

        await asyncio.gather(*map(send, exchanges, prompts))
        return exchanges

    return serve


def in_process(server: Server, load: Load) -> Serve:
    """Requests to a server in this process."""

    def run(policy: str, prompts: Sequence[Prompt], at_once: int) -> list[Exchange]:
        start_s, tenant = time.monotonic(), uuid4().hex

        def send(index: int, prompt: Prompt) -> Exchange:
            exchange = Exchange(index, time.monotonic() - start_s)
            params = GenerateParams(
                text=prompt.text,
                max_tokens=prompt.max_tokens or load.max_tokens,
                temperature=load.temperature,
                stream=True,
                reuse_prefix=load.reuses,
                tenant=tenant,
                policy=policy.removesuffix(IN_PROCESS),
            )
            (sink,) = generate(server, [params])
            if sink.error is not None:
                exchange.error = sink.error[1]
            elif sink.num_tokens:
                exchange.chunk_s = [sink.times_s[0] - start_s, sink.times_s[-1] - start_s]
                exchange.chunk_tokens = [1, sink.num_tokens - 1]
            exchange.last = counts_of(sink.progress)
            return exchange

        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(send, range(len(prompts)), prompts))

    async def serve(policy: str, prompts: Sequence[Prompt], at_once: int) -> list[Exchange]:
        return await asyncio.to_thread(run, policy, prompts, at_once)

    return serve


async def run(
    sides: Mapping[str, Serve], load: Load, recorder: Recorder, say: Callable[[str], object]
) -> None:
    """All rounds. sides: what serves each policy. The first round warms up and does not count.

    Raises BenchError if a request of the warm-up fails.
    """
    names = list(sides)
    for number in range(-1, load.rounds):
        for size in load.sizes:
            say(f"round {number + 1} of {load.rounds}, {size} at once")
            prompts = load.prompts(number, PER_PLACE * size)
            shift = number % len(names)
            for name in (*names[shift:], *names[:shift]):
                exchanges = await sides[name](name, prompts, size)
                if number < 0:
                    check_answered(exchanges)
                else:
                    place = AT_ONCE, load.workload, float(size)
                    recorder.add(phase_of(name, place, number, exchanges))
