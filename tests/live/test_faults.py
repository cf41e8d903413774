"""What is killed or hangs under load ends the launcher with 1, every stream visibly, and leaves
nothing. Times are limits against a hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from one_stream import ask_alone

from smartspec_bench.streams import GrpcStreams, HttpStreams, StreamError
from smartspec_launch.address import Address, free_ports
from smartspec_launch.files import lock_run_dir
from smartspec_py.serving.link import SHM_FOLDER

pytestmark = pytest.mark.triton

TOKENIZER = Path(__file__).parents[2] / "engines_build" / "tiny" / "target"
LIMIT_S = 30.0
"""Below the 35 s that a stop may take, above what a busy machine adds to two seconds."""

HANG_S = 60.0
"""A stream that has not ended so long after the launcher is said to hang, and a process to live."""

EXIT_S = 60.0
FIELDS = {"text_input": "Question:", "max_tokens": 3500, "stream": True, "num_draft_tokens": 0}
"""35 s of tokens."""


@dataclass
class Served:
    """A `smartspec serve` in a process of its own, and what belongs to it."""

    launcher: subprocess.Popen[str]
    address: Address
    named: dict[str, psutil.Process]
    processes: list[psutil.Process]


@dataclass
class Result:
    """exit_s: from the fault to the launcher's end. streams: how each ended. said: on stderr."""

    code: int
    exit_s: float
    streams: list[str]
    said: str
    left: list[str]


class Client(threading.Thread):
    """One long stream; `end` says how it ended."""

    def __init__(self, address: Address, is_grpc: bool) -> None:
        super().__init__(daemon=True)
        self._streams = GrpcStreams(address.grpc_url) if is_grpc else HttpStreams(address.http_url)
        self.has_begun = threading.Event()
        self.end = "hangs"

    def run(self) -> None:
        try:
            responses = ask_alone(self._streams, FIELDS, lambda _: self.has_begun.set())
            self.end = responses[-1]["finish_reason"]
        except StreamError as error:
            self.end = f"error: {error}"
        except Exception as error:
            self.end = type(error).__name__
        self.has_begun.set()


def launch(
    folder: Path,
    limits: dict[str, Any] | None = None,
    step_s: float = 0.01,
    has_openai: bool = False,
) -> tuple[subprocess.Popen[str], Address]:
    """`smartspec serve` with the fake engine, which is not ready yet. has_openai: the gateway takes
    two seconds longer to start."""
    config = {
        "engine": {"kind": "fake", "tokenizer": str(TOKENIZER), "step_s": step_s},
        "limits": {"max_context_len": 4096} | (limits or {}),
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    *ports, openai_port = free_ports(4)
    address = Address("127.0.0.1", *ports)
    command = [sys.executable, "-m", "smartspec_cli.app", "serve", "--config", str(path)]
    command += ["--http-port", str(address.http_port), "--grpc-port", str(address.grpc_port)]
    command += ["--metrics-port", str(address.metrics_port), "--run-dir", str(folder / "run")]
    command += ["--openai-port", str(openai_port if has_openai else 0)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True), address


def serve(
    folder: Path,
    limits: dict[str, Any] | None = None,
    step_s: float = 0.01,
    has_openai: bool = False,
) -> Served:
    """Returns when it is ready."""
    launcher, address = launch(folder, limits, step_s, has_openai)
    assert launcher.stderr is not None
    seen = []
    for line in launcher.stderr:
        seen.append(line)
        if "Ctrl-C stops it." in line:
            break
    assert "Ctrl-C stops it." in seen[-1], seen
    processes = psutil.Process(launcher.pid).children(recursive=True)
    named = {"launcher": psutil.Process(launcher.pid)}
    for each in processes:
        is_gateway = "smartspec_gateway" in each.cmdline()
        named["gateway" if is_gateway else each.name()[:13]] = each
    return Served(launcher, address, named, processes)


def faulted(
    served: Served,
    name: str,
    fault: signal.Signals | None,
    num_streams: int,
    is_stopping: bool = False,
) -> Result:
    """Open streams, half of them each way, bring the fault about, and wait for all that follows.

    is_stopping: the server drains when the fault comes.
    """
    mapped = {each.path for each in served.named["triton_python"].memory_maps()}
    regions = [path for path in mapped if path.startswith(str(SHM_FOLDER))]
    clients = [Client(served.address, index % 2 == 1) for index in range(num_streams)]
    for client in clients:
        client.start()
    for client in clients:
        assert client.has_begun.wait(EXIT_S), "a stream did not begin"
    start = time.monotonic()
    if is_stopping:
        served.launcher.send_signal(signal.SIGTERM)
        assert served.launcher.stderr is not None
        assert served.launcher.stderr.readline() == "Stopping.\n"
    if fault is not None:
        served.named[name].send_signal(fault)
    _, said = served.launcher.communicate(timeout=EXIT_S)
    exit_s = time.monotonic() - start
    for client in clients:
        client.join(HANG_S)
    _, alive = psutil.wait_procs(served.processes, timeout=HANG_S)
    left = [f"process {each.pid}" for each in alive]
    left += [path for path in regions if Path(path).exists()]
    ends = [client.end for client in clients]
    return Result(served.launcher.returncode, exit_s, ends, said, left)


def suspend(process: psutil.Process) -> None:
    """SIGSTOP, until none of its threads runs. On a busy machine, others run on until the thread
    that takes the signal has its turn."""
    process.send_signal(signal.SIGSTOP)
    threads = [path / "stat" for path in Path(f"/proc/{process.pid}/task").iterdir()]
    deadline = time.monotonic() + EXIT_S
    while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in threads):
        assert time.monotonic() < deadline, "it is not suspended"
        time.sleep(0.01)


DEAD_STUB = ("has died.", "exit code 134.")
"""The launcher notices its end, or Triton's own abort."""


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("triton_python", signal.SIGKILL, DEAD_STUB),
        ("triton_python", signal.SIGSTOP, "hangs: no message for 2 s (limits.hang_s)."),
        ("tritonserver", signal.SIGSTOP, "Triton hangs: no answer for 2 s (limits.hang_s)."),
        ("gateway", signal.SIGKILL, "The gateway ended with exit code 137."),
    ],
)
def test_a_fault_ends_the_launcher_and_every_stream(
    tmp_path: Path, name: str, fault: signal.Signals, words: str | tuple[str, ...]
) -> None:
    served = serve(tmp_path, {"hang_s": 2.0}, has_openai=name == "gateway")
    result = faulted(served, name, fault, 4)
    assert result.code == 1
    assert result.said.rstrip().endswith(words)
    assert "Traceback" not in result.said
    assert result.exit_s < LIMIT_S
    assert not {"hangs", "length"} & set(result.streams)
    assert result.left == []


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("triton_python", signal.SIGKILL, DEAD_STUB),
        ("gateway", signal.SIGKILL, "The gateway ended with exit code 137."),
        ("launcher", signal.SIGTERM, "A second signal ended the server before its requests."),
    ],
)
def test_a_drain_that_is_cut_says_why_in_the_last_line(
    tmp_path: Path, name: str, fault: signal.Signals, words: str | tuple[str, ...]
) -> None:
    served = serve(tmp_path, has_openai=name == "gateway")
    result = faulted(served, name, fault, 4, is_stopping=True)
    assert result.code == 1
    assert result.said.rstrip().endswith(words)
    assert result.exit_s < LIMIT_S
    assert not {"hangs", "length"} & set(result.streams)
    assert result.left == []


def test_processes_that_stand_still_for_a_while_are_busy(tmp_path: Path) -> None:
    """Each of them for 2 s, as on a machine that has too much to do. Then the server drains.

    The stub stands still for a shorter time: after 1 s, Triton 2.51 may end it.
    """
    served = serve(tmp_path, {"drain_s": 0.5})
    client = Client(served.address, is_grpc=False)
    client.start()
    assert client.has_begun.wait(EXIT_S)
    for name, still_s in (("triton_python", 0.7), ("tritonserver", 2.0), ("gateway", 2.0)):
        served.named[name].send_signal(signal.SIGSTOP)
        time.sleep(still_s)
        served.named[name].send_signal(signal.SIGCONT)
    served.launcher.send_signal(signal.SIGTERM)
    _, said = served.launcher.communicate(timeout=EXIT_S)
    assert served.launcher.returncode == 0, said
    client.join(HANG_S)
    assert client.end == "cancelled"


def test_a_launcher_that_is_killed_takes_its_triton_with_it(tmp_path: Path) -> None:
    """And the same run directory can be used again at once."""
    result = faulted(serve(tmp_path), "launcher", signal.SIGKILL, 4)
    assert result.code == -signal.SIGKILL
    assert not {"hangs", "length"} & set(result.streams)
    assert result.left == []
    os.close(lock_run_dir(tmp_path / "run"))


def test_a_hung_engine_fails_the_streams_with_its_reason(tmp_path: Path) -> None:
    """A step of 10 s, where 1 s is allowed: the loop's own thread is inside of the engine."""
    served = serve(tmp_path, {"engine_timeout_s": 1.0}, step_s=10.0)
    result = faulted(served, "", None, 2)
    assert result.code == 1
    assert "The model has stopped: a step takes longer" in result.said
    assert all("limits.engine_timeout_s" in end for end in result.streams), result.streams
    assert result.left == []


def test_a_stop_while_the_backend_stands_still_does_not_wait_for_it(tmp_path: Path) -> None:
    served = serve(tmp_path, {"drain_s": 1.0, "hang_s": 2.0})
    ask_alone(HttpStreams(served.address.http_url), {"text_input": "a", "max_tokens": 1})
    suspend(served.named["triton_python"])
    served.launcher.send_signal(signal.SIGTERM)
    _, said = served.launcher.communicate(timeout=EXIT_S)
    assert served.launcher.returncode == 1, said
    assert said.rstrip().endswith(("hangs: no message for 2 s (limits.hang_s).", *DEAD_STUB)), said


def test_a_stop_during_the_start_is_clean(tmp_path: Path) -> None:
    launcher, _ = launch(tmp_path)
    deadline = time.monotonic() + EXIT_S
    while not (processes := psutil.Process(launcher.pid).children(recursive=True)):
        assert time.monotonic() < deadline, "Triton is not started"
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=EXIT_S)
    assert launcher.returncode == 0, said
    assert said.splitlines()[-1] == "Stopping."
    assert psutil.wait_procs(processes, timeout=HANG_S)[1] == []
