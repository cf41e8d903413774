"""Sends the requests of a phase to a live server, and reads the server's metrics.

The open loop is `open_loop`. In a closed loop the next request is sent when the previous one ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smartspec_bench.open_loop import Bounds, OpenLoop
from smartspec_bench.plan import Due
from smartspec_bench.prompts import Prompt
from smartspec_bench.streams import Exchange, HttpStreams, answer, seconds_from_now
from smartspec_launch.triton_server import Address
from smartspec_py.serving.metric_families import DRAFT_TIME, RUNNING, VERIFY_TIME, WAITING, Family

POLL_S = 0.2
IDLE_TIMEOUT_S = 60.0
MAX_OUT = 4096
"""Limit of requests in flight. It equals the queue limit of the benchmark's server, so that the
server refuses none."""


class BenchError(RuntimeError):
    """The server cannot be measured. The message says why."""


@dataclass
class FullQueue:
    """All requests of a saturated server, and the interval that counts, in seconds.

    The interval begins when the first requests of all slots have ended; see `Client.full_queue`.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    from_s: float = math.inf
    to_s: float = math.inf

    def add(self, now_s: float) -> Exchange:
        exchange = Exchange(len(self.exchanges), now_s)
        self.exchanges.append(exchange)
        return exchange

    def start(self, now_s: float, duration_s: float) -> None:
        self.from_s, self.to_s = now_s, now_s + duration_s


class Client:
    """A client of one server. Use it in `async with`.

    fields: fields of every request, except text and policy. timeout_s: limit per request.
    """

    def __init__(self, address: Address, fields: Mapping[str, Any], timeout_s: float) -> None:
        self._streams = HttpStreams(address.http_url)
        self._metrics_url = address.metrics_url
        self._fields = fields
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Client:
        await self._streams.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._streams.__aexit__(*error)

    async def open_loop(self, policy: str, due: Sequence[Due]) -> list[Exchange]:
        bounds = Bounds(len(due), due[-1].time_s + 1.0, MAX_OUT, self._timeout_s)
        loop = OpenLoop(self._streams, bounds, self._with(policy))
        return await loop.run([one.time_s for one in due], iter([one.prompt for one in due]))

    async def closed_loop(self, policy: str, prompts: Iterable[Prompt]) -> list[Exchange]:
        """Send one request at a time, until all prompts are used."""
        exchanges: list[Exchange] = []
        now_s = seconds_from_now()
        for prompt in prompts:
            exchange = Exchange(len(exchanges), now_s(), prompt.kind)
            exchanges.append(exchange)
            fields = self._fields_of(policy, prompt)
            await answer(exchange, self._streams, fields, now_s, self._timeout_s)
        return exchanges

    async def full_queue(
        self, policy: str, prompts: Iterator[Prompt], num_slots: int, duration_s: float
    ) -> FullQueue:
        """Keep one request in flight per slot for duration_s, then wait for the remaining ones.

        Slots that start together would stay in phase: all prefill, then all decode. To prevent
        that, the first requests generate only 1 / num_slots, 2 / num_slots, .. of `max_tokens`.
        The measured interval begins when all first requests have ended.
        """
        queue = FullQueue()
        now_s, num_ended, most = seconds_from_now(), 0, self._fields["max_tokens"]

        async def serve(max_tokens: int) -> bool:
            exchange = queue.add(now_s())
            fields = {**self._fields_of(policy, next(prompts)), "max_tokens": max_tokens}
            await answer(exchange, self._streams, fields, now_s, self._timeout_s)
            return exchange.error is None

        async def slot(number: int) -> None:
            nonlocal num_ended
            is_well = await serve(math.ceil(most * (number + 1) / num_slots))
            num_ended += 1
            if num_ended == num_slots:
                queue.start(now_s(), duration_s)
            while is_well and now_s() < queue.to_s:
                is_well = await serve(most)

        async with asyncio.TaskGroup() as group:
            for number in range(num_slots):
                group.create_task(slot(number))
        return queue

    def _with(self, policy: str) -> dict[str, Any]:
        return {**self._fields, "speculation_policy": policy}

    def _fields_of(self, policy: str, prompt: Prompt) -> dict[str, Any]:
        return {**self._with(policy), **prompt.fields}

    async def pass_times_s(self) -> tuple[float, float]:
        """Seconds in draft passes, and seconds in target passes that decode, since server start."""
        values = await self._values()
        return values[DRAFT_TIME.name], values[VERIFY_TIME.name]

    async def wait_idle(self) -> None:
        """Wait until no request runs or waits. Raises BenchError after IDLE_TIMEOUT_S."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            values = await self._values()
            if not values[RUNNING.name] and not values[WAITING.name]:
                return
            if time.monotonic() > deadline_s:
                raise BenchError(
                    f"the server still has requests after {IDLE_TIMEOUT_S:.0f} s; "
                    "stop other clients and run again"
                )
            await asyncio.sleep(POLL_S)

    async def _values(self) -> dict[str, float]:
        """Values of the needed metrics; 0 if the server does not report one yet."""
        import aiohttp

        try:
            async with aiohttp.ClientSession() as session, session.get(self._metrics_url) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, OSError) as error:
            raise BenchError(f"cannot read metrics: {type(error).__name__}: {error}") from error
        return {family.name: value_in(text, family) or 0.0 for family in _ASKED}


def value_in(text: str, family: Family) -> float | None:
    """The sum of a metric over all labels, from Prometheus text; None if the metric is absent."""
    lines = [line for line in text.splitlines() if line.startswith(f"{family.name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else None


_ASKED = (DRAFT_TIME, VERIFY_TIME, RUNNING, WAITING)
