"""Open-loop load on a running server: requests leave at their times, whatever the server does.

Every request has an absolute time at which it is due. Nothing waits for an answer, so a slow server
does not slow the load down; and latency counts from when a request was due, so that the generator's
own delays are seen and not left out (`send_lag`). Bounded in number, in time, and in requests that
are out at once: one that is due while too many are out is not sent, and counts as failed.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from smartspec_bench.prompts import Prompt
from smartspec_sim.latency import RequestTiming

SERVER_TIMES = ("arrival", "first_scheduled", "first_token", "last_token")
"""Of a request as the server saw it; sent where `return_perf_metrics` was asked for."""

TOO_MANY_OUT = "not sent: too many requests were out"
TIMED_OUT = "no last response in time"
NO_FINISH = "the stream ended without a last response"


@dataclass
class Exchange:
    """One request and what came of it. Times are seconds from the start of the load.

    chunk_s, chunk_tokens: when each response with tokens came, and how many it had.
    last: the outputs of the last response.
    """

    index: int
    scheduled_s: float
    kind: str = ""
    sent_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    num_input_tokens: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.chunk_tokens)

    def take(self, response: Mapping[str, Any], now_s: float) -> None:
        """Add a response's outputs, which came at now_s."""
        num_tokens = int(response.get("num_output_tokens", 0))
        self.num_input_tokens += int(response.get("num_input_tokens", 0))
        if num_tokens:
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(num_tokens)
        self.last = response

    @property
    def timing(self) -> RequestTiming:
        has_tokens = bool(self.chunk_s)
        error = self.error
        if error is None and not has_tokens:
            error = "no token was generated"
        return RequestTiming(
            scheduled_s=self.scheduled_s,
            sent_s=self.scheduled_s if self.sent_s is None else self.sent_s,
            first_s=self.chunk_s[0] if has_tokens else None,
            last_s=self.chunk_s[-1] if has_tokens else None,
            num_tokens=self.num_tokens,
            error=error,
        )

    @property
    def accept_prob(self) -> float | None:
        """Probability that a draft is kept, given that those before it were; needs the detailed
        metrics of the response: accepted drafts over them and the steps that rejected one."""
        document = json.loads(self.last.get("metrics") or "{}").get("speculative_decoding", {})
        if "per_step_drafted" not in document:
            return None
        steps = list(zip(document["per_step_accepted"], document["per_step_drafted"], strict=True))
        num_accepted = sum(accepted for accepted, _ in steps)
        num_rejected = sum(accepted < drafted for accepted, drafted in steps)
        num_trials = num_accepted + num_rejected
        return num_accepted / num_trials if num_trials else None

    @property
    def server_s(self) -> dict[str, float]:
        """`SERVER_TIMES` in seconds of the server's monotonic clock; empty where not sent."""
        found = {name: int(self.last.get(f"{name}_time_ns", 0)) for name in SERVER_TIMES}
        return {name: 1e-9 * ns for name, ns in found.items()} if all(found.values()) else {}

    def record(self) -> dict[str, Any]:
        """The line of the JSONL file; `simulate --record` reads it."""
        record: dict[str, Any] = {
            "index": self.index,
            "kind": self.kind,
            "scheduled_s": self.scheduled_s,
            "sent_s": self.sent_s,
            "chunk_s": self.chunk_s,
            "chunk_tokens": self.chunk_tokens,
            "num_input_tokens": self.num_input_tokens,
            "num_output_tokens": self.num_tokens,
            "finish_reason": self.last.get("finish_reason", ""),
            "num_steps": self.last.get("num_steps", 0),
            "total_draft_tokens": self.last.get("total_draft_tokens", 0),
            "total_accepted_draft_tokens": self.last.get("total_accepted_draft_tokens", 0),
            "error": self.error,
        }
        if (prob := self.accept_prob) is not None:
            record["accept_prob"] = prob
        if server_s := self.server_s:
            record["server_s"] = server_s
        return record


class Transport(Protocol):
    def stream(self, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The responses of one request. Raises ExchangeError."""
        ...


class ExchangeError(RuntimeError):
    """The server refused or failed the request."""


class UnreachableError(ExchangeError):
    """Nobody listens there. The next request would fail as well."""


OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
"""Why a connection may fail although the server is well: this machine has too many."""


class HttpStreams:
    """Server-sent events of Triton's `generate_stream`. Use within `async with`."""

    def __init__(self, url: str) -> None:
        """url: of generate_stream itself."""
        self._url = url
        self._session: Any = None

    async def __aenter__(self) -> HttpStreams:
        import aiohttp

        # No bound on connections: a request that waited for one would no longer be open loop.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def stream(self, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        import aiohttp

        try:
            async with self._session.post(self._url, json=dict(fields)) as response:
                if response.status != 200:
                    reason = (await response.text()).strip()
                    raise ExchangeError(f"HTTP {response.status}: {reason:.300}")
                async for line in response.content:
                    if line.startswith(b"data:"):
                        yield outputs_of(line.removeprefix(b"data:"))
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise UnreachableError(f"{error} is no http:// address") from error
        except aiohttp.ClientConnectorError as error:
            is_own = error.os_error.errno in OWN_LIMITS
            raise (ExchangeError if is_own else UnreachableError)(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = " ".join(str(error).split())  # some have several lines
            raise ExchangeError(f"{type(error).__name__}: {reason}") from error


def outputs_of(data: bytes) -> Mapping[str, Any]:
    """Errors come in a stream whose status was 200."""
    try:
        found: dict[str, Any] = json.loads(data)
    except ValueError:
        raise ExchangeError(f"an event is no JSON: {data[:100]!r}") from None
    if "error" in found:
        raise ExchangeError(str(found["error"]))
    return found


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
        fields = {**self._fields, "text_input": prompt.text}
        if prompt.max_tokens is not None:
            fields["max_tokens"] = prompt.max_tokens
        exchange.sent_s = self._now()
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                async for response in self._transport.stream(fields):
                    exchange.take(response, self._now())
            if not exchange.last.get("finish_reason"):
                exchange.error = NO_FINISH
        except TimeoutError:
            exchange.error = TIMED_OUT
        except ExchangeError as error:
            exchange.error = str(error)
            if isinstance(error, UnreachableError):
                self.unreachable = exchange.error
        self._num_out -= 1
        ended(exchange)
