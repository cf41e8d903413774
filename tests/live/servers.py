"""The servers that the live tests start: their configurations, their starts and their ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smartspec_launch.address import free_address
from smartspec_launch.triton_server import TritonServer
from smartspec_py.config import LimitsConfig, ServerConfig
from smartspec_testing.engines import FakeEngineConfig

TINY = Path(__file__).parents[2] / "engines_build" / "tiny"


def fake_config(
    step_s: float = 0.0,
    fail_at_step: int | None = None,
    limits: LimitsConfig | None = None,
    explain: bool = False,
) -> ServerConfig:
    engine = FakeEngineConfig(
        kind="fake", tokenizer=str(TINY / "target"), step_s=step_s, fail_at_step=fail_at_step
    )
    return ServerConfig(engine=engine, limits=limits or LimitsConfig(), explain=explain)


_stopper = ThreadPoolExecutor(4)
_stops: list[Future[int | None]] = []


@contextmanager
def serving(config: ServerConfig, run_dir: Path, **options: Any) -> Iterator[TritonServer]:
    """A server that is ready, for tests that are not about its end.

    A clean stop is two seconds of waiting for Triton, so it goes on while the next tests run.
    """
    server = TritonServer(config, run_dir, free_address(), **options)
    try:
        server.start()
        server.wait_ready()
        yield server
    finally:
        _stops.append(_stopper.submit(server.stop))


def wait_for_stops() -> None:
    """Until every server of `serving` has ended; raises what a stop has raised."""
    while _stops:
        _stops.pop().result()
