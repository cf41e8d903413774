"""Open-loop load on a running server: requests are sent at their times, whatever the server does.

Every request has a time at which it is due. Nothing waits for an answer, so a slow server does not
reduce the load. Latency counts from the time when a request was due, so that delays of the
generator are included (`send_lag`). The load is bounded in number, in time, and in requests in
flight. A request that is due while too many are in flight is not sent, and counts as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smartspec_bench.prompts import Prompt
from smartspec_bench.streams import Exchange, Transport, answer

TOO_MANY_OUT = "not sent: too many requests were out"


@dataclass(frozen=True)
class Bounds:
    """max_requests, max_s: bounds of sending. max_out: most in flight. timeout_s: of each."""

    max_requests: int
    max_s: float
    max_out: int = 1000
    timeout_s: float = 600.0


class OpenLoop:
    """Sends and keeps account. `run` once."""

    def __init__(
        self,
        transport: Transport,
        bounds: Bounds,
        fields: Mapping[str, Any],
        *,
        now: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """fields: of every request; fields of a prompt are added. now: seconds, any origin."""
        self._transport = transport
        self._bounds = bounds
        self._fields = fields
        self._clock = now
        self._sleep = sleep
        self._start_s = 0.0
        self._num_out = 0
        self.unreachable = ""

    async def run(
        self,
        times: Iterable[float],
        prompts: Iterator[Prompt],
        ended: Callable[[Exchange], None] = lambda exchange: None,
    ) -> list[Exchange]:
        """Send a prompt at each time, and wait for all answers; they are in the order of sending.
        ended: called with each exchange when it has ended. A cancellation ends the requests in
        flight. If the server cannot be reached, nothing more is sent, and `unreachable` says why.
        """
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time
        self._start_s = self._clock()
        exchanges: list[Exchange] = []
        async with asyncio.TaskGroup() as group:
            for index, scheduled_s in enumerate(times):
                if index >= self._bounds.max_requests or scheduled_s > self._bounds.max_s:
                    break
                await self._until(scheduled_s)
                if self.unreachable:
                    break
                prompt = next(prompts)
                exchange = Exchange(index, scheduled_s, prompt.kind)
                exchanges.append(exchange)
                if self._num_out >= self._bounds.max_out:
                    exchange.error = TOO_MANY_OUT
                    ended(exchange)
                else:
                    self._num_out += 1
                    group.create_task(self._serve(exchange, prompt, ended))
        return exchanges

    async def _until(self, time_s: float) -> None:
        """Let other tasks run, also if the time has passed, because their answers must be read."""
        await self._sleep(max(0.0, time_s - self._now()))

    def _now(self) -> float:
        assert self._clock is not None
        return self._clock() - self._start_s

    async def _serve(
        self, exchange: Exchange, prompt: Prompt, ended: Callable[[Exchange], None]
    ) -> None:
        fields = {**self._fields, **prompt.fields}
        timeout_s = self._bounds.timeout_s
        if not await answer(exchange, self._transport, fields, self._now, timeout_s):
            self.unreachable = exchange.error or ""
        self._num_out -= 1
        ended(exchange)
