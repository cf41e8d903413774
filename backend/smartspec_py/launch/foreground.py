"""Runs a Triton server in the foreground: start, announce, watch, stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from smartspec_py.serving.contract import MODEL_NAME
from smartspec_py.triton_server import Address, TritonServer

WATCH_S = 1.0
MAX_MISSES = 3
"""Looks in a row that find the model not ready; one alone may be a server that is merely busy."""


def run_in_foreground(
    server: TritonServer, console: Console, on_ready: Callable[[], None] | None = None
) -> int:
    """Serve until a signal or a failure; return the exit code for the caller.

    Signals end Triton in good order and give its exit code; a model that stops being ready is 1.
    Raises TritonServerError where it does not come up, and what `TritonServer.start` raises.
    """
    with signals_interrupt():
        try:
            server.start()
            wait_with_progress(server, console)
            announce(server.address, console)
            if on_ready is not None:
                on_ready()
            code = watch(server, console)
        except KeyboardInterrupt:
            console.print("Stopping.")
            code = server.stop() or 0
            if code:
                report_end(code, server, console)
            return code
        finally:
            server.stop()
        return code


def wait_with_progress(server: TritonServer, console: Console) -> None:
    """Wait for readiness, showing for how long and on a terminal what Triton last logged."""
    start = time.monotonic()

    def show(line: str) -> None:
        elapsed_s = time.monotonic() - start
        status.update(f"Starting Triton, {elapsed_s:.0f} s [dim]{_message(line):.80}[/dim]")

    if not console.is_terminal:
        console.print("Starting Triton")
    with console.status("Starting Triton") as status:
        server.wait_ready(show)
    console.print(
        f"Triton serves after {time.monotonic() - start:.1f} s; log: {server.log_path}",
        soft_wrap=True,
    )


def announce(address: Address, console: Console) -> None:
    """Print where it listens, and a line to try."""
    body = '{"text_input": "Hello", "max_tokens": 32, "stream": true}'
    for name, url in (
        ("HTTP", address.http_url),
        ("gRPC", address.grpc_url),
        ("metrics", address.metrics_url),
    ):
        console.print(f"  {name:8}{url}", highlight=False)
    console.print(
        f"Try:\n  curl -N {address.http_url}/v2/models/{MODEL_NAME}/generate_stream -d '{body}'\n"
        "Ctrl-C stops it.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def watch(server: TritonServer, console: Console) -> int:
    """Return when Triton has ended, with its exit code, or when the model is gone, with 1."""
    misses = 0
    while misses < MAX_MISSES:
        time.sleep(WATCH_S)
        code = server.poll()
        if code is not None:
            report_end(code, server, console)
            # Unasked, even a clean end is a failure to whoever supervises this process.
            return code or 1
        misses = 0 if server.is_model_ready() else misses + 1
    console.print(f"The model is no longer ready, stopping.\n{server.log_tail()}", markup=False)
    return 1


def report_end(code: int, server: TritonServer, console: Console) -> None:
    """Say with what code Triton ended, and what it logged last."""
    console.print(f"Triton ended with exit code {code}.\n{server.log_tail()}", markup=False)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP do what Ctrl-C does: raise KeyboardInterrupt."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _message(line: str) -> str:
    """A line of Triton's log without its prefix, and safe to print as markup."""
    return line.partition('] "')[2].rstrip('"').replace("[", r"\[") or "..."
