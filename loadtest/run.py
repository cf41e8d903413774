"""A load test from nothing: a server, a scenario in Locust, its files, the summary of record."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from stages import SCENARIOS

from smartspec_launch import paths
from smartspec_launch.files import InstallationError
from smartspec_launch.foreground import signals_interrupt, wait_with_progress
from smartspec_launch.interpreter import InterpreterError
from smartspec_launch.triton_server import TritonServer, TritonServerError, free_address
from smartspec_py.serving.config import (
    DEFAULT_CONTEXT_LEN,
    LimitsConfig,
    ServerConfig,
    TorchEngineConfig,
)
from smartspec_sim.latency import DEFINITIONS

HERE = Path(__file__).parent
TINY = HERE.parent / "engines_build" / "tiny"
USERS = {"http": ["SseUser"], "grpc": ["GrpcUser"], "both": ["SseUser", "GrpcUser"]}

STOP_S = 30.0
EXIT_S = 30.0
"""Beyond the run and what is given to requests that are out; then Locust is ended."""


def main(
    context: typer.Context,
    scenario: Annotated[str, typer.Option(help=", ".join(SCENARIOS))] = "steady",
    transport: Annotated[str, typer.Option(help=", ".join(USERS))] = "http",
    users: Annotated[int, typer.Option(help="At most; step has its own: --scale.", min=1)] = 8,
    seconds: Annotated[int, typer.Option(help="Of sending.", min=1, max=86_400)] = 60,
    url: Annotated[str | None, typer.Option(help="A server that runs; else one starts.")] = None,
    grpc: Annotated[
        str | None, typer.Option(help="Its gRPC HOST:PORT; else port 8001 of --url's host.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="For the files; else a new one.")] = None,
) -> None:
    for name, value, allowed in (
        ("--scenario", scenario, SCENARIOS),
        ("--transport", transport, USERS),
    ):
        if value not in allowed:
            raise typer.BadParameter(f"{name}: got {value!r}, must be one of {', '.join(allowed)}")
    if grpc is not None and url is None:
        raise typer.BadParameter("--grpc: goes with --url")
    folder = folder or Path(f".smartspec/loadtest/{datetime.now(UTC):%Y%m%d-%H%M%S}-{scenario}")
    folder.mkdir(parents=True, exist_ok=True)
    options = [*USERS[transport], f"--scenario={scenario}", f"--users={users}"]
    options += [f"--run-time={seconds}", f"--stop-timeout={STOP_S:.0f}", *context.args]
    console = Console(stderr=True)
    try:
        with signals_interrupt(), _server(url, grpc, console) as (http_url, grpc_url):
            options += [f"--host={http_url}", f"--grpc={grpc_url}"]
            code = run_locust(options, folder, seconds + STOP_S + EXIT_S)
    except (InstallationError, InterpreterError, TritonServerError) as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    lines = folder / "requests.jsonl"
    if lines.exists():
        subprocess.run([sys.executable, str(HERE / "summary.py"), str(lines)], check=False)
    console.print(f"files: {folder}", markup=False, highlight=False)
    raise typer.Exit(code)


main.__doc__ = f"""Run a scenario in Locust, headless and bounded in time; leave its files.

Without --url the shipped tiny pair is served on free ports of this machine, and ended afterwards.
In the folder: requests.jsonl (a line a request, as of `smartspec load --jsonl`), report.html and
locust_*.csv (Locust's own, rounded). What stands behind `--` goes to Locust: its options, and
--workload, --prompts, --max-tokens, --policy and others of `locust -f loadtest/locustfile.py
--help`. The exit code is Locust's: 1 where a request failed.

{DEFINITIONS}

In a closed loop a request is due when it leaves.
"""


@contextlib.contextmanager
def _server(url: str | None, grpc: str | None, console: Console) -> Iterator[tuple[str, str]]:
    """HTTP and gRPC address. Raises TritonServerError, and what `TritonServer.start` raises."""
    if url is not None:
        yield url.rstrip("/"), grpc or f"{urlsplit(url).hostname}:8001"
        return
    address = free_address()
    engine = TorchEngineConfig(
        model=str(TINY / "target"),
        draft=str(TINY / "draft"),
        num_threads=1,
        profile_cache=str(paths.profile_cache().resolve()),
    )
    run_dir = paths.run_dir(address.http_port).resolve()
    config = ServerConfig(engine=engine, limits=LimitsConfig(max_context_len=DEFAULT_CONTEXT_LEN))
    with TritonServer(config, run_dir, address) as server:
        wait_with_progress(server, console)
        yield address.http_url, address.grpc_url


def run_locust(options: Sequence[str], folder: Path, timeout_s: float) -> int:
    """Locust's exit code; it is ended where it takes longer, and its files stay."""
    command = [sys.executable, "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless"]
    command += ["--only-summary", "--csv", str(folder / "locust")]
    command += ["--html", str(folder / "report.html"), f"--jsonl={folder / 'requests.jsonl'}"]
    process = subprocess.Popen([*command, *options])
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"Locust did not end within {timeout_s:.0f} s", file=sys.stderr)
        return 1
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(context_settings={"allow_extra_args": True})(main)
    app()
