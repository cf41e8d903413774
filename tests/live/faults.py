"""Servers that are killed or stopped under load: what their launchers, clients and machine see.

`scripts/faults` runs this file in the project's environment: it tries every fault once, or kills
Triton's Python process many times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
    front: psutil.Process
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
    (front,) = (each for each in processes if "smartspec_launch.front" in each.cmdline())
    return Served(folder, launcher, address, found["tritonserver"], stub, front, processes)


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


def kill_front(served: Served) -> None:
    served.front.send_signal(signal.SIGKILL)


def stop_front(served: Served) -> None:
    served.front.send_signal(signal.SIGSTOP)


def stop_triton(served: Served) -> None:
    served.triton.send_signal(signal.SIGSTOP)


def stop_launcher(served: Served) -> None:
    """For longer than any silence that it allows; then it is asked to end."""
    served.launcher.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    served.launcher.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert served.launcher.poll() is None, "it ended when it went on"
    terminate(served)


def terminate(served: Served) -> None:
    served.launcher.send_signal(signal.SIGTERM)


def fill_disk(served: Served) -> None:
    """Write until the file system of the run directory is full; then ask the server to end."""
    with contextlib.suppress(OSError), (served.folder / "filler").open("wb") as filler:
        while True:
            filler.write(bytes(1 << 20))
    time.sleep(2.0)
    assert served.launcher.poll() is None, "it ended of a full disk"
    terminate(served)


@dataclass(frozen=True)
class Fault:
    """code: exit status of the launcher. within_s: of the fault. ends: what the end of each stream
    must have in it."""

    name: str
    act: Callable[[Served], object]
    code: int
    within_s: float
    ends: str = "rror"


FAULTS = (
    Fault("Triton's Python process is killed", kill_stub, 1, 2.0),
    Fault("Triton's Python process is stopped", stop_stub, 1, 3.5),
    Fault("tritonserver is killed", kill_triton, 1, 2.0),
    Fault("tritonserver is stopped", stop_triton, 1, 25.0),
    Fault("the HTTP front is killed", kill_front, 1, 2.0),
    Fault("the HTTP front is stopped", stop_front, 1, 25.0),
    Fault("the launcher is killed", kill_launcher, -signal.SIGKILL, 2.0),
    Fault("the launcher is stopped for 4 s, then SIGTERM", stop_launcher, 0, 20.0, "cancelled"),
    Fault("SIGTERM, and streams that outlast limits.drain_s", terminate, 0, 20.0, "cancelled"),
    Fault("the disk is full, then SIGTERM", fill_disk, 0, 25.0, "cancelled"),
)


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of 256 MiB in memory, where this user may mount one; else a folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder]
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            yield Path(folder)
        finally:
            if is_mounted:
                subprocess.run(["umount", "--lazy", folder], check=True)


def try_all(num_streams: int) -> bool:
    """Every fault once; whether all was as expected."""
    print("| fault | expected | observed | |\n|---|---|---|---|")
    is_well = True
    for fault in FAULTS:
        expected = f"exit {int(fault.code)} within {fault.within_s:g} s"
        expected += f", streams end with {'an error' if fault.ends == 'rror' else fault.ends}"
        with small_disk() as folder:
            if fault.act is fill_disk and not os.path.ismount(folder):
                print(f"| {fault.name} | {expected} | not tried: it takes a mount | |")
                continue
            result = faulted(serve(folder, {"drain_s": 2.0}), fault.act, num_streams)
        ends = dict(Counter(end[:60] for end in result.streams))
        is_good = (
            result.code == fault.code
            and result.exit_s <= fault.within_s
            and all(fault.ends in end for end in result.streams)
            and not result.left
        )
        is_well &= is_good
        observed = f"exit {result.code} after {result.exit_s:.2f} s, {ends}"
        observed += f", left: {result.left}" if result.left else ", nothing left"
        print(f"| {fault.name} | {expected} | {observed} | {'' if is_good else '**no**'} |")
    return is_well


def kill_often(num_kills: int, num_streams: int) -> bool:
    """Kill Triton's Python process of a new server each time; whether each ended as it should."""
    results = []
    for number in range(num_kills):
        with tempfile.TemporaryDirectory() as folder:
            result = faulted(serve(Path(folder)), kill_stub, num_streams)
        results.append(result)
        ends = dict(Counter(end[:70] for end in result.streams))
        print(f"{number} {result.exit_s:.2f} s, exit {result.code}, {ends}, left: {result.left}")
    slowest_s = max(result.exit_s for result in results)
    num_hung = sum(end.endswith("hangs") for result in results for end in result.streams)
    num_left = sum(len(result.left) for result in results)
    summary = {
        "kills": len(results),
        "exit_s_median": round(statistics.median(result.exit_s for result in results), 3),
        "exit_s_most": round(slowest_s, 3),
        "exit_codes": dict(Counter(result.code for result in results)),
        "streams": sum(len(result.streams) for result in results),
        "streams_hung": num_hung,
        "left_over": num_left,
    }
    print(json.dumps(summary))
    is_well = slowest_s < 2.0 and num_hung + num_left == 0
    return is_well and all(result.code == 1 for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="kill Triton's Python process N times")
    parser.add_argument("--streams", type=int, default=8, help="open when it happens")
    options = parser.parse_args()
    if options.kills:
        return 0 if kill_often(options.kills, options.streams) else 1
    return 0 if try_all(options.streams) else 1


if __name__ == "__main__":
    sys.exit(main())
