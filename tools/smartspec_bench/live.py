"""Compares policies on a running server: the same prompts for each, in turns.

A round sends the same requests, all at once, under one policy after the other, in an order that
rotates with the round. Results are ratios within a round, because the speed of a shared machine
changes. With a server in this process beside it, the ratio of both is the cost of Triton and HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from smartspec_bench.prompts import Prompt, generated
from smartspec_bench.results import Recorder, check_answered, phase_of
from smartspec_bench.streams import Exchange, Transport, answer, counts_of, seconds_from_now
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.serving.server import Server
from smartspec_testing.local import LocalSink, generate

AT_ONCE = "at once"
"""Shape of the phases; their load is the number of requests."""

IN_PROCESS = ", in process"
"""Suffix of the policies of the server in this process."""

Serve = Callable[[str, Sequence[Prompt]], Awaitable[list[Exchange]]]
"""Serves requests that are due at once under a policy."""


@dataclass(frozen=True)
class Load:
    """sizes: numbers of requests at once. own: prompts instead of those of the workload. template:
    see `prompts.generated`."""

    sizes: Sequence[int]
    workload: str
    rounds: int
    max_tokens: int
    temperature: float = 0.0
    own: Sequence[Prompt] = ()
    template: Callable[[str], str] = str

    def prompts(self, number: int, size: int) -> list[Prompt]:
        """The requests of a round. Each round continues where the one before has ended."""
        prompts = cycle(self.own) if self.own else generated(self.workload, template=self.template)
        return list(islice(prompts, (number + 1) * size, (number + 2) * size))


def through(transport: Transport, load: Load) -> Serve:
    """Requests to the running server."""

    async def serve(policy: str, prompts: Sequence[Prompt]) -> list[Exchange]:
        exchanges = [Exchange(index, 0.0, one.kind) for index, one in enumerate(prompts)]
        now_s = seconds_from_now()
        fields = {
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "stream": True,
            "reuse_prefix": False,  # or only the first policy would read the prompts
            "speculation_policy": policy,
        }
        await asyncio.gather(
            *(
                answer(exchange, transport, {**fields, **one.fields}, now_s)
                for exchange, one in zip(exchanges, prompts, strict=True)
            )
        )
        return exchanges

    return serve


def in_process(server: Server, load: Load) -> Serve:
    """Requests to a server in this process."""

    def run(policy: str, prompts: Sequence[Prompt]) -> list[Exchange]:
        start_s = time.monotonic()
        sinks = generate(
            server,
            [
                GenerateParams(
                    text=prompt.text,
                    max_tokens=prompt.max_tokens or load.max_tokens,
                    temperature=load.temperature,
                    stream=True,
                    reuse_prefix=False,
                    policy=policy.removesuffix(IN_PROCESS),
                )
                for prompt in prompts
            ],
        )
        return [_exchange(index, sink, start_s) for index, sink in enumerate(sinks)]

    async def serve(policy: str, prompts: Sequence[Prompt]) -> list[Exchange]:
        return await asyncio.to_thread(run, policy, prompts)

    return serve


def _exchange(index: int, sink: LocalSink, start_s: float) -> Exchange:
    exchange = Exchange(index, 0.0)
    if sink.error is not None:
        exchange.error = sink.error[1]
    elif sink.num_tokens:
        exchange.chunk_s = [sink.times_s[0] - start_s, sink.times_s[-1] - start_s]
        exchange.chunk_tokens = [1, sink.num_tokens - 1]
    exchange.last = counts_of(sink.progress)
    return exchange


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
            prompts = load.prompts(number, size)
            shift = number % len(names)
            for name in (*names[shift:], *names[:shift]):
                exchanges = await sides[name](name, prompts)
                if number < 0:
                    check_answered(exchanges)
                else:
                    place = AT_ONCE, load.workload, float(size)
                    recorder.add(phase_of(name, place, number, exchanges))
