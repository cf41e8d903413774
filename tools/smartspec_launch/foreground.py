"""Runs a Triton server in the foreground: start, announce, watch, stop."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from smartspec_launch.answers import Answers
from smartspec_launch.phases import PhaseDisplay
from smartspec_launch.triton_server import INTERRUPTS, SECOND_SIGNAL, End, TritonServer
from smartspec_py.api.contract import MODEL_NAME

LOOK_S = 0.5
"""Longest wait for the backend's next beat, which comes more often, or for the end of its link."""


def run_in_foreground(server: TritonServer, console: Console) -> int:
    """Serve until a signal or a failure, and return the exit code.

    0: a signal stopped it, and every request had its last response. 1: any other end.
    Raises TritonServerError if Triton does not become ready, and the errors of
    `TritonServer.start`.
    """
    with signals_interrupt():
        try:
            return _serve_until_signal(server, console)
        except KeyboardInterrupt:
            server.kill()
            return report(server, console, SECOND_SIGNAL)
        finally:
            server.kill()


def _serve_until_signal(server: TritonServer, console: Console) -> int:
    """A second signal raises KeyboardInterrupt, or is in `TritonServer.failure`."""
    try:
        server.start()
        wait_with_progress(server, console)
        announce(server, console)
        return watch(server, console)
    except KeyboardInterrupt:
        console.print("Stopping.")
        code = server.stop()
        if not code:
            return 0
        return report(server, console, server.failure or str(End("Triton", code)))


def wait_with_progress(server: TritonServer, console: Console) -> None:
    """Wait until the server is ready, and show its phases meanwhile. Then print the start time,
    warnings, and what is served."""
    start = time.monotonic()
    with PhaseDisplay(console) as display:
        server.wait_ready(display.show)
    console.print(
        f"Triton is ready after {time.monotonic() - start:.1f} s; log: {server.log_path}",
        soft_wrap=True,
    )
    lines = [f"Warning: {text}" for text in server.notices] + [served_text(server.facts)]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


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


def announce(server: TritonServer, console: Console) -> None:
    """Print the server's URLs and a curl command that works."""
    address = server.address
    urls = {"HTTP": address.http_url, "gRPC": address.grpc_url, "metrics": address.metrics_url}
    if server.openai is not None:
        urls["OpenAI"] = server.openai.url(address)
        urls["page"] = server.openai.url(address).removesuffix("v1")
    for name, url in urls.items():
        console.print(f"  {name:8}{url}", highlight=False)
    console.print(
        f"Try:\n  {example(server)}\nCtrl-C stops it.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def example(server: TritonServer) -> str:
    """A command: a chat if the model has a template for it, else a text to continue."""
    openai = server.openai
    if openai is None or not openai.has_chats:
        body = json.dumps({"text_input": "Once upon a time", "max_tokens": 64, "stream": True})
        url = f"{server.address.http_url}/v2/models/{MODEL_NAME}/generate_stream"
        return f"curl -N {url} -d {shlex.quote(body)}"
    message = {"role": "user", "content": "What is the capital of Japan?"}
    name = next(iter(openai.names), MODEL_NAME)
    body = json.dumps({"model": name, "messages": [message], "max_tokens": 64})
    headers = "-H 'Content-Type: application/json' "
    if openai.needs_key:
        headers += "-H 'Authorization: Bearer YOUR_KEY' "
    return f"curl {openai.url(server.address)}/chat/completions {headers}-d {shlex.quote(body)}"


def watch(server: TritonServer, console: Console) -> int:
    """Wait until the server fails. Kill all its processes, print the reason and return 1."""
    answers = server.answers()
    try:
        while (reason := server.look(LOOK_S) or hung(answers)) is None:
            pass
    finally:
        for each in answers.values():
            each.close()
    # Kill at once, without a drain. Clients then see that their streams have ended, and a
    # supervisor can restart the server.
    server.kill()
    return report(server, console, reason)


def hung(answers: Mapping[str, Answers]) -> str | None:
    """One sentence that names a process that hangs, or a Triton that has lost its model although
    the backend process is alive; None if there is none."""
    for name, each in answers.items():
        each.look(time.monotonic())
        if each.is_hung:
            return f"{name} hangs: no answer for {each.limit_s:g} s (limits.hang_s)."
    return None


def report(server: TritonServer, console: Console, reason: str) -> int:
    """Print the last lines of the log, then the reason: people look at the last line first. Returns
    the exit code."""
    console.print(f"{server.log_tail()}\n{reason}", markup=False, soft_wrap=True)
    return 1


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
