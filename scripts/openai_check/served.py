"""The shipped pair in Triton, with the endpoint, for the time of the checks."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hostile_http.processes import held

from smartspec_cli.commands.quickstart import SHIPPED_PAIR
from smartspec_launch.address import DIRECT, free_address
from smartspec_launch.front_process import OpenAi
from smartspec_launch.triton_server import TritonServer
from smartspec_py.serving.config import LimitsConfig, ServerConfig, TorchEngineConfig

IDLE_S = 20.0


@dataclass(frozen=True)
class Served:
    """url: of the endpoint, without path. pid: of the endpoint's process."""

    url: str
    metrics_url: str
    pid: int
    server: TritonServer

    def is_up(self) -> bool:
        with DIRECT.open(f"{self.url}/health", timeout=10) as response:
            return bool(response.status == 200) and self.server.poll() is None

    def wait_idle(self) -> bool:
        """Whether no request is running or waiting in Triton, now or in IDLE_S."""
        deadline = time.monotonic() + IDLE_S
        while self.num_open() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.num_open() == 0

    def num_open(self) -> int:
        with DIRECT.open(self.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        names = ("smartspec_num_requests_running{", "smartspec_num_requests_waiting{")
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(names))

    def held(self) -> dict[str, tuple[float, int]]:
        """MiB of memory and open files of the endpoint and of Triton."""
        pids = {"endpoint": self.pid, "Triton": self.server.pid}
        found = {name: held(pid) for name, pid in pids.items()}
        return {name: (one.rss_mib, one.num_files) for name, one in found.items()}


@contextlib.contextmanager
def served() -> Iterator[Served]:
    engine = TorchEngineConfig(
        model=str(SHIPPED_PAIR / "target"),
        draft=str(SHIPPED_PAIR / "draft"),
        dtype="float32",
        num_threads=1,
    )
    config = ServerConfig(engine=engine, limits=LimitsConfig(max_sequences=8, max_context_len=512))
    openai = OpenAi(free_address().http_port, SHIPPED_PAIR / "target")
    with tempfile.TemporaryDirectory() as run_dir:
        server = TritonServer(config, Path(run_dir), free_address())
        with server:
            server.wait_ready()
            companion = server.start_openai(openai)
            if not openai.is_up(server.address, companion):
                raise SystemExit(server.log_tail())
            url = openai.url(server.address).removesuffix("/v1")
            yield Served(url, server.address.metrics_url, companion.pid, server)
