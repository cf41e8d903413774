"""Starts `smartspec serve` several times, and reports where the time to the first token goes.

Each repeat starts it twice: cold, with an empty folder for pass times, so that they are measured;
and cached, with the pass times of the cold start. In both, files are in the page cache. Phases of
Triton and the backend are read from the times in Triton's log; the others are timed here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from smartspec_launch.address import DIRECT, Address, free_address
from smartspec_launch.start_phases import MARKS, start_phases
from smartspec_py.serving.profile import machine_name

TINY = Path("engines_build/tiny")
POLL_S = 0.01
STOP_S = 60.0
BODY = {"text_input": "Task: qa", "max_tokens": 8, "stream": True}
PHASES = ("command", *(name for name, _ in MARKS), "ready", "first token")
"""command: until Triton is started; ready: from Triton's port on until readiness is seen through
the front; first token: of a request that is sent then."""

TOTAL = "total"
KINDS = ("cold", "cached")

Start = Mapping[str, float]
"""Seconds of each of PHASES that this start has, and of TOTAL."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_start", description=__doc__)
    parser.add_argument("--model", type=Path, default=TINY / "target")
    parser.add_argument("--draft", type=Path, default=TINY / "draft")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("folder", nargs="?", type=Path, help="where start.json is written")
    options = parser.parse_args()
    starts: dict[str, list[Start]] = {kind: [] for kind in KINDS}
    for number in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="smartspec-start-") as folder:
            for kind in KINDS:
                found = timed_start(options.model, options.draft, Path(folder))
                starts[kind].append(found)
                print(f"{number + 1} {kind}: {found[TOTAL]:.1f} s", file=sys.stderr)
    medians = {kind: median(starts[kind]) for kind in KINDS}
    Console().print(as_table(medians))
    if options.folder is not None:
        document = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": machine_name(),
            "model": str(options.model),
            "draft": str(options.draft),
            "median_s": medians,
            "starts_s": starts,
        }
        options.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document, indent=1) + "\n"
        (options.folder / "start.json").write_text(text, encoding="utf-8")


def timed_start(model: Path, draft: Path, folder: Path) -> Start:
    """One start, from the command to the first token. folder: for its pass times and its log."""
    address = free_address()
    begin_s = time.time()
    with serving(model, draft, folder, address) as process:
        while not is_ready(address):
            if process.poll() is not None:
                raise SystemExit(process.communicate()[1])
            time.sleep(POLL_S)
        ready_s = time.time()
        wait_for_token(address)
        end_s = time.time()
    # Written just before Triton is started.
    triton_s = (folder / "run/models/smartspec/1/engine.json").stat().st_mtime
    log = (folder / "run/tritonserver.log").read_text(encoding="utf-8", errors="replace")
    inside = start_phases(log, triton_s)
    found = {
        "command": triton_s - begin_s,
        **inside,
        "ready": ready_s - triton_s - sum(inside.values()),
        "first token": end_s - ready_s,
        TOTAL: end_s - begin_s,
    }
    return {name: round(value, 3) for name, value in found.items()}


@contextmanager
def serving(
    model: Path, draft: Path, folder: Path, address: Address
) -> Iterator[subprocess.Popen[str]]:
    """`smartspec serve` as a process, which SIGTERM ends."""
    command = [str(Path(sys.executable).parent / "smartspec"), "serve"]
    command += [f"--model={model}", f"--draft={draft}", f"--run-dir={folder / 'run'}"]
    command += [f"--profile-cache={folder / 'profiles'}", f"--host={address.host}"]
    command += [f"--http-port={address.http_port}", f"--grpc-port={address.grpc_port}"]
    command.append(f"--metrics-port={address.metrics_port}")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=STOP_S)


def is_ready(address: Address) -> bool:
    with suppress(OSError), DIRECT.open(f"{address.http_url}/v2/models/smartspec/ready") as answer:
        return bool(answer.status == 200)
    return False


def wait_for_token(address: Address) -> None:
    """Read a stream to its end, so that the server ends cleanly. Returns the time of the first
    event."""
    url = f"{address.http_url}/v2/models/smartspec/generate_stream"
    request = urllib.request.Request(url, json.dumps(BODY).encode())
    with DIRECT.open(request) as answer:
        while not answer.readline().startswith(b"data:"):
            pass
        answer.read()


def median(starts: list[Start]) -> dict[str, float]:
    """Medians of each phase, so they need not sum to the median of the total."""
    names = [name for name in (*PHASES, TOTAL) if name in starts[0]]
    return {name: round(statistics.median(start[name] for start in starts), 3) for name in names}


def as_table(medians: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table("seconds", *medians)
    for name in medians["cold"]:
        table.add_row(name, *(f"{found[name]:.2f}" for found in medians.values()))
    return table


if __name__ == "__main__":
    main()
