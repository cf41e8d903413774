"""Open-loop load on a running server: requests leave at their times, whatever the server does.

Every request has an absolute time at which it is due. Nothing waits for an answer, so a slow server
does not slow the load down; and latency counts from when a request was due, so that the generator's
own delays are seen and not left out (`send_lag`). Bounded in number, in time, and in requests that
are out at once: one that is due while too many are out is not sent, and counts as failed.
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
    """max_requests, max_s: of sending. max_out: requests out at once. timeout_s: of each."""

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
        """fields: of every request; a prompt's own come on top. now: seconds, any origin."""
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
        """Send a prompt at each time, and await all answers; in the order of sending.

        ended: told of each exchange when it is over. A cancel ends those that are out. Where the
        server cannot be reached, nothing more is sent: `unreachable` then says why.
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
        """Also where the time has passed, others get a turn: their answers must be read."""
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
