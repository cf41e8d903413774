"""Two `smartspec serve` processes with the fake engine on loopback, each on its own ports."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rolling.haproxy import HaProxy
from smartspec_launch.address import INTERNAL_PORTS, LOOPBACK, can_bind

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
READY = "Ctrl-C stops it."
NAMES = ("a", "b")
DRAIN_S = 120.0
"""limits.drain_s: longer than the longest stream."""

EXIT_S = DRAIN_S + 30.0
GONE_S = 10.0


class ServerError(RuntimeError):
    """A server did not start or stop; the message has its last lines."""


class Server:
    """One server. It is started and stopped several times, on the same ports."""

    def __init__(self, name: str, folder: Path, step_s: float, max_sequences: int) -> None:
        self.name = name
        self.http_port, self._grpc_port, self._metrics_port = free_ports(3)
        self._folder = folder / name
        self._engine = {"kind": "fake", "tokenizer": str(TOKENIZER), "step_s": step_s}
        self._limits = {
            "max_sequences": max_sequences,
            "max_queue": max_sequences,
            "max_context_len": 512,
            "drain_s": DRAIN_S,
        }
        self._launcher: subprocess.Popen[str] | None = None

    def start(self, policy: str) -> None:
        """Start with this default policy, and wait until the model is ready."""
        self._folder.mkdir(exist_ok=True)
        config = {"engine": self._engine, "limits": self._limits, "policy": policy}
        path = self._folder / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "smartspec_cli.app", "serve", "--config", str(path)]
        command += [f"--http-port={self.http_port}", f"--grpc-port={self._grpc_port}"]
        command += [f"--metrics-port={self._metrics_port}", "--openai-port=0"]
        command += [f"--run-dir={self._folder / 'run'}"]
        self._launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._launcher.stderr is not None
        lines = []
        for line in self._launcher.stderr:
            lines.append(line)
            if READY in line:
                return
        raise ServerError(f"server {self.name} did not start: {''.join(lines[-5:])}")

    def drain(self) -> None:
        """Send SIGTERM, and wait until the server has finished its requests and ended."""
        assert self._launcher is not None
        self._launcher.send_signal(signal.SIGTERM)
        _, said = self._launcher.communicate(timeout=EXIT_S)
        if self._launcher.returncode:
            raise ServerError(f"server {self.name} did not end in order: {said[-500:]}")

    def kill(self) -> None:
        """Kill all its processes at once, as if the machine had failed."""
        if self._launcher is None or self._launcher.poll() is not None:
            return
        launcher = psutil.Process(self._launcher.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        for process in processes:
            process.suspend()  # otherwise one would see the end of another and report it
        for process in processes:
            process.kill()
        self._launcher.communicate(timeout=GONE_S)
        psutil.wait_procs(processes, timeout=GONE_S)


@dataclass(frozen=True)
class Fleet:
    """The servers that run, and HAProxy before them."""

    servers: tuple[Server, ...]
    proxy: HaProxy


@contextmanager
def running_fleet(folder: Path, policy: str, step_s: float, max_sequences: int) -> Iterator[Fleet]:
    """Start both servers at the same time, then HAProxy. Ends all processes."""
    servers = tuple(Server(name, folder, step_s, max_sequences) for name in NAMES)
    (port,) = free_ports(1)
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.start(policy), servers))
        ports = {server.name: server.http_port for server in servers}
        yield Fleet(servers, stack.enter_context(HaProxy(folder, port, ports)))


def free_ports(count: int) -> list[int]:
    """Free ports below the range of outgoing connections, so that they stay free between two
    starts."""
    candidates: Any = random.sample(INTERNAL_PORTS, 200)
    return [port for port in candidates if can_bind(LOOPBACK, port)][:count]
