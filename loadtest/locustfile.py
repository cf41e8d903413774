"""Load tests in Locust: users who each send one request after the other, and read its stream.

    locust -f loadtest/locustfile.py SseUser --host http://127.0.0.1:8000 --scenario step

`SseUser` speaks HTTP, `GrpcUser` gRPC; without a name there are both. docs/evaluate/load-tests.md
has the rest, `scripts/loadtest` starts a server as well.
"""

from __future__ import annotations

import signal
from typing import Any

import gevent  # type: ignore[import-untyped]
from grpc_user import GrpcUser  # before any use of grpc: it tells grpc of gevent
from llm_user import LlmUser
from load_options import add_options
from load_run import LoadRun
from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.stats import CSV_STATS_INTERVAL_SEC
from sse_user import SseUser

__all__ = ["GrpcUser", "Scenario", "SseUser"]

SPAWN_RATE = 100.0
"""Users a second. Locust's 1 would make a ramp of every step."""


class Scenario(LoadTestShape):
    """--scenario, --users and --run-time, as Locust asks for them: once a second."""

    use_common_options = True

    def reset_time(self) -> None:
        """Locust's first call of every run, on the command line or from the page."""
        super().reset_time()  # type: ignore[no-untyped-call]
        assert self.runner is not None
        assert self.runner.environment.parsed_options is not None
        LlmUser.load = LoadRun(self.runner.environment.parsed_options)
        LlmUser.load.start()

    def tick(self) -> tuple[int, float] | None:
        num_users = LlmUser.load.num_users
        return None if num_users is None else (num_users, SPAWN_RATE)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def on_command_line(parser: LocustArgumentParser) -> None:
    add_options(parser)


@events.init.add_listener  # type: ignore[untyped-decorator]
def on_init(environment: Environment, **_: Any) -> None:
    """A mistake in the options ends Locust before anything is sent."""
    options = environment.parsed_options
    assert options is not None
    if options.processes or options.worker or options.master:
        raise SystemExit("one process only: several would write over one another's --jsonl")
    try:
        LlmUser.load = LoadRun(options)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    # Locust has no handler yet while a headless run with a shape goes on: SIGTERM would end it with
    # neither CSV nor HTML.
    gevent.signal_handler(signal.SIGTERM, _end_now, environment)


def _end_now(environment: Environment) -> None:
    """Requests that are out are cut off. The shape ends the run: were it ended here, the shape's
    end would kill users once more, in the middle of their leaving."""
    environment.stop_timeout = 0.0
    LlmUser.load.end()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def on_test_stop(environment: Environment, **_: Any) -> None:
    LlmUser.load.close()
    options = environment.parsed_options
    if options is not None and options.csv_prefix:
        # Locust writes its CSV so often, and not once more at the end.
        gevent.sleep(CSV_STATS_INTERVAL_SEC + 0.2)
