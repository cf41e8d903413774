"""Runs a load test: starts a server, runs a Locust scenario and prints the summary."""

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
"""Time after the run and STOP_S before Locust is terminated."""


def main(
    context: typer.Context,
    scenario: Annotated[str, typer.Option(help=", ".join(SCENARIOS))] = "steady",
    transport: Annotated[str, typer.Option(help=", ".join(USERS))] = "http",
    users: Annotated[
        int, typer.Option(help="Largest number of users; for step use --scale.", min=1)
    ] = 8,
    seconds: Annotated[int, typer.Option(help="Seconds of sending.", min=1, max=86_400)] = 60,
    url: Annotated[
        str | None, typer.Option(help="URL of a running server; default: start one.")
    ] = None,
    grpc: Annotated[
        str | None, typer.Option(help="Its gRPC HOST:PORT; default: port 8001 of --url's host.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the files; default: a new folder.")
    ] = None,
) -> None:
    for name, value, allowed in (
        ("--scenario", scenario, SCENARIOS),
        ("--transport", transport, USERS),
    ):
        if value not in allowed:
            raise typer.BadParameter(f"{name}: got {value!r}, must be one of {', '.join(allowed)}")
    if grpc is not None and url is None:
        raise typer.BadParameter("--grpc: can be used only with --url")
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


main.__doc__ = f"""Run a scenario in Locust, headless and with a time limit, and keep its files.

Without --url, the command serves the shipped tiny pair on free ports and stops that server at the
end. The folder has requests.jsonl (one line per request, in the format of `smartspec load --jsonl`)
and report.html and locust_*.csv (from Locust, rounded). Arguments after `--` go to Locust: its own
options, and --workload, --prompts, --max-tokens, --policy and others of `locust -f
loadtest/locustfile.py --help`. The exit code is Locust's: 1 if a request failed.

{DEFINITIONS}

In a closed loop the scheduled time of a request is the time when it is sent.
"""


@contextlib.contextmanager
def _server(url: str | None, grpc: str | None, console: Console) -> Iterator[tuple[str, str]]:
    """The HTTP and gRPC addresses of the server. Raises TritonServerError and the errors of
    `TritonServer.start`."""
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
    """Run Locust and return its exit code. It is terminated after timeout_s; its files are kept."""
    command = [sys.executable, "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless"]
    command += ["--only-summary", "--csv", str(folder / "locust")]
    command += ["--html", str(folder / "report.html"), f"--jsonl={folder / 'requests.jsonl'}"]
    process = subprocess.Popen([*command, *options])
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"error: Locust did not end within {timeout_s:.0f} s", file=sys.stderr)
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
