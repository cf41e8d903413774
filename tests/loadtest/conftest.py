"""The server of the tests of Locust, and its runs, which end with their test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = Path(__file__).parent
LOADTEST = HERE.parents[1] / "loadtest"
# The files of loadtest/ import one another as Locust lets them: by bare names.
sys.path += [str(HERE), str(LOADTEST)]

if TYPE_CHECKING:
    from locust_runs import LocustRun

    from smartspec_launch.triton_server import TritonServer

StartLocust = Callable[..., "LocustRun"]


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    from locust_runs import STEP_S
    from servers import fake_config, serving

    config = fake_config(step_s=STEP_S)
    with serving(config, tmp_path_factory.mktemp("fake")) as server:
        yield server


@pytest.fixture
def start_locust(tmp_path: Path) -> Iterator[StartLocust]:
    """Starts Locust on a server, with more arguments."""
    from locust_runs import start

    runs: list[LocustRun] = []

    def start_one(server: TritonServer, *arguments: str) -> LocustRun:
        folder = tmp_path / f"run{len(runs)}"
        folder.mkdir()
        hosts = [f"--host={server.address.http_url}", f"--grpc={server.address.grpc_url}"]
        runs.append(start(folder, *hosts, *arguments))
        return runs[-1]

    yield start_one
    for run in runs:
        run.close()
