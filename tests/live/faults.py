"""Servers that are killed or stopped under load: what their launchers, clients and machine see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from smartspec_bench.streams import GrpcStreams, HttpStreams, StreamError, ask_alone
from smartspec_launch.triton_server import Address, free_address
from smartspec_py.serving.link import SHM_FOLDER

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
READY = "Ctrl-C stops it."
HANG_S = 10.0
"""A stream that has not ended so long after the launcher is said to hang."""

EXIT_S = 60.0
FIELDS = {"text_input": "Question:", "max_tokens": 3500, "stream": True, "num_draft_tokens": 0}
"""35 s of tokens."""


GONE_S = 10.0
"""For a process to be gone: what is killed may be slow to end, and slow to be reaped."""


@dataclass
class Served:
    """A `smartspec serve` in a process of its own, and what belongs to it."""

    folder: Path
    launcher: subprocess.Popen[str]
    address: Address
    triton: psutil.Process
    stub: psutil.Process
    gateway: psutil.Process
    processes: list[psutil.Process]


@dataclass
class Result:
    """exit_s: from the fault to the launcher's end. streams: how each ended. said: on stderr."""

    code: int
    exit_s: float
    streams: list[str]
    said: str
    left: list[str] = field(default_factory=list)


class Client(threading.Thread):
    """One long stream; `end` says how it ended."""

    def __init__(self, address: Address, is_grpc: bool) -> None:
        super().__init__(daemon=True)
        self.name = "gRPC" if is_grpc else "HTTP"
        self._address = address
        self.has_begun = threading.Event()
        self.end = "hangs"

    def run(self) -> None:
        address = self._address
        is_grpc = self.name == "gRPC"
        streams = GrpcStreams(address.grpc_url) if is_grpc else HttpStreams(address.http_url)
        try:
            responses = ask_alone(streams, FIELDS, lambda _: self.has_begun.set())
            self.end = responses[-1]["finish_reason"]
        except StreamError as error:
            self.end = f"error: {error}"
        except Exception as error:
            self.end = type(error).__name__
        self.has_begun.set()


def serve(folder: Path, limits: dict[str, Any] | None = None, **engine: Any) -> Served:
    """The fake engine, 10 ms a step unless `engine` says otherwise; returns when it is ready."""
    config = {
        "engine": {"kind": "fake", "tokenizer": str(TOKENIZER), "step_s": 0.01} | engine,
        "limits": {"max_context_len": 4096} | (limits or {}),
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    address = free_address()
    ports = (address.http_port, address.grpc_port, address.metrics_port)
    command = [sys.executable, "-m", "smartspec_cli.app", "serve", "--config", str(path)]
    for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{name}-port", str(port)]
    command += ["--run-dir", str(folder / "run")]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert launcher.stderr is not None
    seen = []
    for line in launcher.stderr:
        seen.append(line)
        if READY in line:
            break
    assert READY in "".join(seen[-1:]), "".join(seen)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    found = {each.name(): each for each in processes}
    stub = next(found[name] for name in found if name.startswith("triton_python"))
    (gateway,) = (each for each in processes if "smartspec_gateway" in each.cmdline())
    return Served(folder, launcher, address, found["tritonserver"], stub, gateway, processes)


def faulted(served: Served, fault: Callable[[Served], object], num_streams: int = 4) -> Result:
    """Open streams, half of them each way, bring the fault about, and wait for all that follows."""
    regions = owned_regions(served)
    clients = [Client(served.address, index % 2 == 1) for index in range(num_streams)]
    for client in clients:
        client.start()
    for client in clients:
        assert client.has_begun.wait(EXIT_S), "a stream did not begin"
    start = time.monotonic()
    fault(served)
    _, said = served.launcher.communicate(timeout=EXIT_S)
    exit_s = time.monotonic() - start
    for client in clients:
        client.join(HANG_S)
    ends = [f"{client.name} {client.end}" for client in clients]
    _, alive = psutil.wait_procs(served.processes, timeout=GONE_S)
    left = [f"process {each.pid}" for each in alive]
    left += [f"/dev/shm/{name}" for name in regions if (SHM_FOLDER / name).exists()]
    return Result(served.launcher.returncode, exit_s, ends, said, left)


def owned_regions(served: Served) -> list[str]:
    """Names of the shared memory that Triton and its Python process have mapped."""
    mapped = {each.path for each in served.stub.memory_maps()}
    return [Path(path).name for path in mapped if path.startswith(str(SHM_FOLDER))]


def kill_stub(served: Served) -> None:
    served.stub.send_signal(signal.SIGKILL)


def stop_stub(served: Served) -> None:
    served.stub.send_signal(signal.SIGSTOP)


def kill_triton(served: Served) -> None:
    served.triton.send_signal(signal.SIGKILL)


def kill_launcher(served: Served) -> None:
    os.kill(served.launcher.pid, signal.SIGKILL)


def kill_gateway(served: Served) -> None:
    served.gateway.send_signal(signal.SIGKILL)


def stop_gateway(served: Served) -> None:
    served.gateway.send_signal(signal.SIGSTOP)
