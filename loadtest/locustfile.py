"""Load tests in Locust. Each user sends one request after another and reads its stream.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --scenario step --model MODEL

`scripts/loadtest` runs it without Locust's page. The loop is closed: a slow server gets fewer
requests. To measure latencies at a fixed rate, use `smartspec bench lockstep`. The last line of
stdout is a JSON document with exact percentiles.

Each event of a request is a row of Locust's tables (smartspec_sim/latency.py defines the values):

- `ttft` and `tpot`: for finished requests.
- `e2e`: for every request. Its failures are the failures of the run, including errors in a stream
  with status 200. A failure has no time.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, TextIO

import gevent  # type: ignore[import-untyped]
from locust import FastHttpUser, LoadTestShape, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.env import Environment
from locust.exception import StopUser
from locust.stats import CSV_STATS_INTERVAL_SEC
from shapes import MOST_USERS, SCENARIOS

from smartspec_bench.prompts import MIXED, WORKLOADS, Prompt, chat_template, generated, read_prompts
from smartspec_bench.streams import NO_FINISH, TIMED_OUT, Exchange, StreamError, outputs_of
from smartspec_py.api.contract import MODEL_NAME
from smartspec_sim.latency import LATENCIES, RequestTiming, summarise

PATH = f"/v2/models/{MODEL_NAME}/generate_stream"
OVER = "cancelled: the run ended"
BROKEN = "this client failed: see Locust's table of exceptions"

SPAWN_RATE = 100.0
"""New users per second. With Locust's default of 1, each step would be a ramp."""

PAUSE_S = 0.1
"""Pause after a failure. Without it, a refused user would send requests in a busy loop."""


class LoadRun:
    """One run: the prompts to send, and what came back. Times are seconds since `start`."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: the values of `on_command_line`. Raises ValueError, with the option's name."""
        if not 1 <= options.num_users <= MOST_USERS:
            raise ValueError(f"--users: got {options.num_users}, must be from 1 to {MOST_USERS}")
        self.timeout_s: float = options.request_timeout
        self._seconds: float = options.run_time
        self._max_requests: int = options.max_requests
        self._fields = request_fields(options)
        self._users, self._most_users = SCENARIOS[options.scenario], options.num_users
        model = Path(options.model) if options.model else None
        self._prompts: Iterator[Prompt] = (
            cycle(read_prompts(Path(options.prompts)))
            if options.prompts
            else generated(options.workload, template=chat_template(model))
        )
        self._path = Path(options.jsonl) if options.jsonl else None
        self._lines: TextIO | None = None
        self._start_s = 0.0
        self._num_sent = 0
        self.timings: list[RequestTiming] = []
        self.kinds: dict[str, Counter[str]] = {}
        """Sums of the requests of each kind of prompt."""
        self.is_ended = False

    def start(self) -> None:
        """Open the file and start the clock. Raises OSError if the file cannot be written."""
        self._lines = None if self._path is None else self._path.open("w", encoding="utf-8")
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def has_sent_all(self) -> bool:
        return self._num_sent >= self._max_requests

    @property
    def num_users(self) -> int | None:
        """The number of users now; None after the end of the run."""
        if self.is_ended or self.has_sent_all or self.now_s() >= self._seconds:
            return None
        return self._users(self.now_s() / self._seconds, self._most_users)

    def send(self) -> tuple[Exchange, Mapping[str, Any]]:
        """The next request and its fields. It counts as sent now."""
        prompt = next(self._prompts)
        exchange = Exchange(self._num_sent, self.now_s(), prompt.kind)
        self._num_sent += 1
        return exchange, {**self._fields, **prompt.fields}

    def ended(self, exchange: Exchange) -> None:
        """Write the request's line at once, because a run may be stopped at any time."""
        self.timings.append(exchange.timing)
        kind = self.kinds.setdefault(exchange.kind, Counter())
        kind.update({"num_requests": 1, **exchange.counts})
        if self._lines is not None:
            self._lines.write(json.dumps(exchange.record()) + "\n")
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def request_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of every request. Raises ValueError."""
    try:
        more = json.loads(options.fields or "{}")
    except ValueError as error:
        raise ValueError(f"--fields: got {options.fields!r}, must be JSON ({error})") from None
    if not isinstance(more, dict):
        raise ValueError(f"--fields: got {options.fields!r}, must be a JSON object")
    fields = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "reuse_prefix": False,  # prompts are repeated after 160 requests
        "return_spec_metrics": "detailed",
    }
    policy = {"speculation_policy": options.policy} if options.policy else {}
    return fields | policy | more


class SseUser(FastHttpUser):
    """A user of Triton's `generate_stream`: server-sent events over HTTP."""

    load: ClassVar[LoadRun]
    """The run of all users. It is set when a run starts."""

    # Locust's default of 60 s would end a request that waits in a queue. `ask` has a timeout.
    network_timeout = 3600.0

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
            self._fire(exchange.timing)
        if exchange.error is not None:
            gevent.sleep(PAUSE_S)

    def _exchange(self, exchange: Exchange, fields: Mapping[str, Any]) -> str | None:
        """Send the request and read its stream. Returns the error, or None."""
        try:
            with (
                gevent.Timeout(self.load.timeout_s, StreamError(TIMED_OUT)),
                closing(self._stream(fields)) as responses,
            ):
                for response in responses:
                    exchange.take(response, self.load.now_s())
        except StreamError as error:
            return str(error)
        return None if exchange.last.get("finish_reason") else NO_FINISH

    def _stream(self, fields: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
        """The responses of one request. Raises StreamError."""
        try:
            # An exception in this block suppresses the row of the headers, so that `e2e` alone
            # counts a failure.
            with self.client.post(
                PATH, json=dict(fields), stream=True, catch_response=True, name="headers"
            ) as response:
                if not response.status_code:
                    raise StreamError(f"no answer: {response.error}")
                if response.status_code != 200:
                    text = (response.text or "").strip()
                    raise StreamError(f"HTTP {response.status_code}: {text:.300}")
                # Other read methods wait for whole blocks, or for the end of a short answer.
                for line in iter(lambda: response.stream.readline(b"\n"), b""):
                    if line.startswith(b"data:"):
                        yield outputs_of(line.removeprefix(b"data:"))
        except FAILURE_EXCEPTIONS as error:
            raise StreamError(f"{type(error).__name__}: {error}") from error

    def _fire(self, timing: RequestTiming) -> None:
        if not timing.is_finished:
            self._fire_row("e2e", None, StreamError(timing.error))
            return
        for name in LATENCIES:
            if (seconds := timing.latency_s(name)) is not None:
                self._fire_row(name, seconds)

    def _fire_row(self, name: str, seconds: float | None, error: StreamError | None = None) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=name,
            response_time=None if seconds is None else 1e3 * seconds,
            response_length=0,
            exception=error,
            context={},
        )


class Scenario(LoadTestShape):
    """The load shape of --scenario, --users and --run-time. Locust calls `tick` once per second."""

    use_common_options = True

    def reset_time(self) -> None:
        """Start the run. Locust calls this first in every run, headless or from its page."""
        super().reset_time()  # type: ignore[no-untyped-call]
        assert self.runner is not None
        assert self.runner.environment.parsed_options is not None
        SseUser.load = LoadRun(self.runner.environment.parsed_options)
        SseUser.load.start()

    def tick(self) -> tuple[int, float] | None:
        num_users = SseUser.load.num_users
        return None if num_users is None else (num_users, SPAWN_RATE)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def on_command_line(parser: LocustArgumentParser) -> None:
    """Add options, and set Locust's defaults: a run has a time limit, and requests in flight at its
    end may finish. Cut requests are mostly long ones, and without them latencies look too good."""
    parser.set_defaults(
        num_users=8,
        run_time=60,
        stop_timeout=30,
        host="http://127.0.0.1:8000",
        web_host="127.0.0.1",  # Locust's page has no password, and its form names files to write
    )
    add_options(parser)


def add_options(parser: LocustArgumentParser) -> None:
    """The options of this file."""
    add = parser.add_argument
    add("--scenario", choices=list(SCENARIOS), default="steady", help="Number of users over time.")
    add("--workload", choices=WORKLOADS, default=MIXED, help="Workload of the prompts.")
    add("--model", default="", help="The served model: prompts get its chat template.")
    add(
        "--prompts",
        default="",
        help="Instead of --workload: a JSONL file, plain, MT-bench or ShareGPT.",
    )
    add("--max-tokens", type=int, default=128, help="Most tokens, for prompts without max_tokens.")
    add("--temperature", type=float, default=0.0, help="Sampling temperature; 0 is greedy.")
    add("--policy", default="", help="Policy of the requests; default: the server's.")
    add("--fields", default="", help='More request fields, as JSON: {"ignore_eos": true}.')
    lines = "File for one JSON line per request. Each run overwrites it."
    add("--jsonl", default="", help=lines, include_in_web_ui=False)
    add("--max-requests", type=int, default=100_000, help="The run ends after this many requests.")
    add("--request-timeout", type=float, default=300.0, help="Timeout of a request in seconds.")


@events.init.add_listener  # type: ignore[untyped-decorator]
def on_init(environment: Environment, **_: Any) -> None:
    """Check the options. A wrong option ends Locust before it sends requests."""
    options = environment.parsed_options
    assert options is not None
    if options.processes or options.worker or options.master:
        raise SystemExit("error: use one Locust process: several would overwrite --jsonl")
    try:
        SseUser.load = LoadRun(options)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    # Locust sets no signal handler during a headless run with a shape. Without this handler,
    # SIGTERM would end the run without CSV and HTML.
    gevent.signal_handler(signal.SIGTERM, _end_now, environment)


def _end_now(environment: Environment) -> None:
    """Cancel the requests in flight and let the shape end the run.

    If the run ended here, the shape would stop the users a second time while they are stopping.
    """
    environment.stop_timeout = 0.0
    SseUser.load.is_ended = True


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def on_test_stop(environment: Environment, **_: Any) -> None:
    SseUser.load.close()
    options = environment.parsed_options
    if options is not None and options.csv_prefix:
        # Locust writes its CSV files at this interval, but not at the end of a run.
        gevent.sleep(CSV_STATS_INTERVAL_SEC + 0.2)
    timings, kinds = SseUser.load.timings, SseUser.load.kinds
    errors = Counter(timing.error for timing in timings if timing.error)
    print(json.dumps(summarise(timings) | {"kinds": kinds, "errors": errors}), flush=True)


def show_help() -> None:
    """Locust itself prints its help without the options of this file."""
    parser = LocustArgumentParser(
        prog="scripts/loadtest",
        description="Sends prompts to a running server, and prints a summary.",
        epilog="The most used options of Locust: --host URL (default http://127.0.0.1:8000), "
        "--users N (8), --run-time SECONDS (60), --csv PREFIX, --html FILE. "
        "`.venv/bin/locust --help` shows all of them.",
    )
    add_options(parser)
    parser.print_help()


if __name__ == "__main__":
    show_help()
