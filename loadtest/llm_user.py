"""The base class of users of both transports. A user sends one request after another.

Each event of a request is a row of Locust's tables under its transport. smartspec_sim/latency.py
defines the values:

- `ttft` and `tpot`: for finished requests.
- `e2e`: for every request. Its failures are the failures of the run, including errors in a stream
  with status 200. A failure has no time.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, ClassVar

import gevent  # type: ignore[import-untyped]
from load_run import OVER, LoadRun
from locust import User, task
from locust.exception import StopUser

from smartspec_bench.streams import NO_FINISH, TIMED_OUT, Exchange, StreamError

BROKEN = "this client failed: see Locust's table of exceptions"

PAUSE_S = 0.1
"""Pause after a failure. Without it, a refused user would send requests in a busy loop."""


class LlmUser(User):
    abstract = True
    transport: ClassVar[str]

    load: ClassVar[LoadRun]
    """The run of all users. It is set when a run starts."""

    def stream(self, fields: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
        """The responses of one request. Raises StreamError."""
        raise NotImplementedError(f"{type(self).__name__} must implement stream")

    @task
    def ask(self) -> None:
        load = self.load
        if load.has_sent_all:
            raise StopUser
        exchange, fields = load.send()
        exchange.error = BROKEN
        try:
            exchange.error = self._exchange(exchange, fields)
        except gevent.GreenletExit:  # Locust ends this user
            exchange.error = OVER
            raise
        finally:
            load.ended(exchange)
            self._fire(exchange)
        if exchange.error is not None:
            gevent.sleep(PAUSE_S)

    def _exchange(self, exchange: Exchange, fields: Mapping[str, Any]) -> str | None:
        """Send the request and read its stream. Returns the error, or None."""
        try:
            with (
                gevent.Timeout(self.load.timeout_s, StreamError(TIMED_OUT)),
                closing(self.stream(fields)) as responses,
            ):
                for response in responses:
                    exchange.take(response, self.load.now_s())
        except StreamError as error:
            return str(error)
        return None if exchange.last.get("finish_reason") else NO_FINISH

    def _fire(self, exchange: Exchange) -> None:
        timing = exchange.timing
        if not timing.is_finished:
            self._fire_row("e2e", None, StreamError(timing.error))
            return
        self._fire_row("ttft", timing.ttft_s(timing.scheduled_s))
        if timing.tpot_s is not None:
            self._fire_row("tpot", timing.tpot_s)
        self._fire_row("e2e", timing.e2e_s(timing.scheduled_s))

    def _fire_row(self, name: str, seconds: float | None, error: StreamError | None = None) -> None:
        self.environment.events.request.fire(
            request_type=self.transport,
            name=name,
            response_time=None if seconds is None else 1e3 * seconds,
            response_length=0,
            exception=error,
            context={},
        )
