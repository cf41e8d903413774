"""Load tests in Locust. Each user sends one request after another and reads its stream.

    locust -f loadtest/locustfile.py SseUser --host http://127.0.0.1:8000 --scenario step

`SseUser` uses HTTP, and `GrpcUser` uses gRPC. Without a class name, Locust runs both. See
docs/evaluate/load-tests.md. `scripts/loadtest` also starts a server.
"""

from __future__ import annotations

import signal
from typing import Any

import gevent  # type: ignore[import-untyped]
from grpc_user import GrpcUser  # before any use of grpc, because it sets up grpc for gevent
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
"""New users per second. With Locust's default of 1, each step would be a ramp."""


class Scenario(LoadTestShape):
    """The load shape of --scenario, --users and --run-time. Locust calls `tick` once per second."""

    use_common_options = True

    def reset_time(self) -> None:
        """Start the run. Locust calls this first in every run, headless or from its page."""
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
    """Check the options. A wrong option ends Locust before it sends requests."""
    options = environment.parsed_options
    assert options is not None
    if options.processes or options.worker or options.master:
        raise SystemExit(
            "error: use one Locust process; several would overwrite each other's --jsonl file"
        )
    try:
        LlmUser.load = LoadRun(options)
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
    LlmUser.load.end()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def on_test_stop(environment: Environment, **_: Any) -> None:
    LlmUser.load.close()
    options = environment.parsed_options
    if options is not None and options.csv_prefix:
        # Locust writes its CSV files at this interval, but not at the end of a run.
        gevent.sleep(CSV_STATS_INTERVAL_SEC + 0.2)
