"""Runs a Triton server in the foreground: start, announce, watch, stop."""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from smartspec_launch.triton_server import INTERRUPTS, TritonServer
from smartspec_py.api.contract import MODEL_NAME

LOOK_S = 0.5
"""Longest wait for the backend's next beat, which comes more often, or for the end of its link."""

READY_S = 2.0
"""Between two checks. MAX_MISSES checks take longer than the link needs to find the reason."""

MAX_MISSES = 3
"""Failed readiness checks in a row before the server is stopped. One may fail on a busy server."""


def run_in_foreground(server: TritonServer, console: Console) -> int:
    """Serve until a signal or a failure, and return the exit code.

    0: a signal stopped Triton, and it shut down cleanly. 1: any other end.
    Raises TritonServerError if Triton does not become ready, and the errors of
    `TritonServer.start`.
    """
    with signals_interrupt():
        try:
            server.start()
            wait_with_progress(server, console)
            announce(server, console)
            return watch(server, console)
        except KeyboardInterrupt:
            console.print("Stopping.")
            end = server.stop() or 0
            if end:
                console.print(f"Triton ended with exit code {end}.", markup=False)
                console.print(server.log_tail(), markup=False)
            return 1 if end else 0
        finally:
            server.stop()


def wait_with_progress(server: TritonServer, console: Console) -> None:
    """Wait until the server is ready, then print the start time and what is served.

    A terminal shows the elapsed time and the backend's newest message meanwhile.
    """
    start = time.monotonic()

    def show(message: str) -> None:
        text = message.replace("[", r"\[")
        status.update(f"Starting Triton, {time.monotonic() - start:.0f} s [dim]{text:.50}[/dim]")

    if not console.is_terminal:
        console.print("Starting Triton")
    with console.status("Starting Triton") as status:
        server.wait_ready(show)
    console.print(
        f"Triton is ready after {time.monotonic() - start:.1f} s; log: {server.log_path}",
        soft_wrap=True,
    )
    console.print(served_text(server.facts), soft_wrap=True, highlight=False, markup=False)


def served_text(facts: Mapping[str, Any]) -> str:
    """One line that says what is served. facts: see `Beat.facts`."""
    threads, cache_bytes = facts.get("threads"), facts.get("cache_bytes")
    words = {
        "model": facts.get("model"),
        "dtype": facts.get("dtype"),
        "runtime": facts.get("runtime"),
        "threads": threads and f"{threads} thread{'s' if threads > 1 else ''}",
        "context": f"context {facts.get('context_len')} tokens",
        "cache": cache_bytes and f"KV cache up to {cache_bytes / 2**30:.1f} GiB",
        "drafts": f"drafts from {', '.join(facts.get('proposers', ())) or 'nothing'}",
        "policy": f"policy {facts.get('policy')}",
    }
    return f"Serving {', '.join(str(word) for word in words.values() if word)}"


def announce(server: TritonServer, console: Console, prompt: str = "Hello") -> None:
    """Print the server's URLs and a curl command with this prompt."""
    address = server.address
    body = shlex.quote(json.dumps({"text_input": prompt, "max_tokens": 64, "stream": True}))
    urls = {"HTTP": address.http_url, "gRPC": address.grpc_url, "metrics": address.metrics_url}
    if server.openai is not None:
        urls["OpenAI"] = server.openai.url(address)
        urls["page"] = server.openai.url(address).removesuffix("v1")
    for name, url in urls.items():
        console.print(f"  {name:8}{url}", highlight=False)
    console.print(
        f"Try:\n  curl -N {address.http_url}/v2/models/{MODEL_NAME}/generate_stream -d {body}\n"
        "Ctrl-C stops it.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def watch(server: TritonServer, console: Console) -> int:
    """Wait until the server fails. Kill all its processes, print the reason and return 1."""
    misses: list[str] = []
    # In a thread, because a process that hangs lets each check wait for seconds.
    threading.Thread(target=_check, args=(server, misses), daemon=True).start()
    while (reason := server.look(LOOK_S)) is None and len(misses) < MAX_MISSES:
        pass
    # Kill at once, without a drain. Clients then see that their streams have ended, and a
    # supervisor can restart the server.
    server.kill()
    # The reason comes last, where people look first.
    reason = reason or misses[-1]
    console.print(f"{server.log_tail()}\n{reason}", markup=False, soft_wrap=True)
    return 1


def _check(server: TritonServer, misses: list[str]) -> None:
    """Check all processes again and again, and keep what did not answer in a row. This finds one
    that hangs, and a Triton that has lost its model although the backend process is alive."""
    while len(misses) < MAX_MISSES:
        time.sleep(READY_S)
        if silence := server.silence():
            misses.append(silence)
        else:
            misses.clear()


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """In the `with` block, SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does. SIGHUP stays
    ignored if it is, because `nohup` starts the server so that it outlives the terminal."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in INTERRUPTS if not (number is signal.SIGHUP and is_ignored)]
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
