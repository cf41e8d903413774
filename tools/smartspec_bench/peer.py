"""Compares this server with others on the same machine: `scripts/bench_peer`.

Every server is a process with an OpenAI-compatible `/v1/completions`. They serve the same prompts
in turns, greedily, with the same number of tokens. While one works, the others are stopped, because
a process that waits may keep a core busy. The result is a document of `smartspec bench`: below, the
policy `goodput` of this server is compared with each other server.

The other servers must not reuse prefixes (llama.cpp: the field cache_prompt is sent as false).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartspec_bench.live import Load, Serve, run
from smartspec_bench.prompts import MIXED, Prompt
from smartspec_bench.report import markdown
from smartspec_bench.results import BenchError, Phase, Recorder, described
from smartspec_bench.streams import Exchange, seconds_from_now

START_S = 1800.0
STOP_S = 30.0
POLL_S = 0.5
ANSWER_S = 600.0
PORT = 8390
"""Of this server; its other ports are the next ones."""

OURS = {"ignore_eos": True, "reuse_prefix": False}
THEIRS = {"ignore_eos": True, "cache_prompt": False}
"""Fields that make each server generate all tokens, and read each prompt."""


@dataclass(frozen=True)
class Peer:
    """A server. port: of `/v1/completions`. can_stop: whether it may be stopped while it is idle;
    this server may not, because its launcher would miss heartbeats."""

    name: str
    port: int
    command: Sequence[str]
    fields: Mapping[str, Any]
    can_stop: bool = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def running(peer: Peer, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server, and end its process group at the end. Raises BenchError."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            peer.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_ready(peer, process, log)
        yield process
    finally:
        _signal(process, signal.SIGCONT)
        _signal(process, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _wait_ready(peer: Peer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise BenchError(f"{peer.name} ended with {process.returncode}; see {log}")
        try:
            with urllib.request.urlopen(f"{peer.url}/models", timeout=5):
                return
        except OSError:
            time.sleep(POLL_S)
    raise BenchError(f"{peer.name} was not ready after {START_S:.0f} s; see {log}")


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def asking(peer: Peer, process: subprocess.Popen[bytes], model: str, load: Load) -> Serve:
    """Sends the requests of a phase to the server, all at once."""

    async def serve(policy: str, prompts: Sequence[Prompt]) -> list[Exchange]:
        import aiohttp

        if peer.can_stop:
            _signal(process, signal.SIGCONT)
        exchanges = [Exchange(index, 0.0) for index in range(len(prompts))]
        now_s = seconds_from_now()
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def ask(exchange: Exchange, prompt: Prompt) -> None:
                body = {
                    "model": model,
                    "prompt": prompt.text,
                    "max_tokens": load.max_tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    **peer.fields,
                }
                try:
                    async with session.post(f"{peer.url}/completions", json=body) as reply:
                        if reply.status != 200:
                            exchange.error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
                            return
                        await _read(reply.content, exchange, now_s, load.max_tokens)
                except (aiohttp.ClientError, TimeoutError) as error:
                    exchange.error = f"{type(error).__name__}: {error}"

            await asyncio.gather(*map(ask, exchanges, prompts))
        if peer.can_stop:
            _signal(process, signal.SIGSTOP)
        return exchanges

    return serve


async def _read(
    lines: Any, exchange: Exchange, now_s: Callable[[], float], num_expected: int
) -> None:
    """Take the events of a stream; the number of tokens comes with the last one."""
    times_s, num_tokens = [], 0
    async for line in lines:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if any(choice.get("text") for choice in event.get("choices", ())):
            times_s.append(now_s())
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    if num_tokens != num_expected or not times_s:
        exchange.error = f"{num_tokens} tokens came, not {num_expected}"
        return
    exchange.chunk_s = [times_s[0], times_s[-1]]
    exchange.chunk_tokens = [1, num_tokens - 1]


def ours(options: argparse.Namespace) -> list[Peer]:
    """This server, once for each policy; they share its process."""
    ports = ("--http-port", "--grpc-port", "--metrics-port")
    command = [sys.executable, "-m", "smartspec_cli.app", "serve", "--model", options.model]
    command += ["--draft", options.draft] if options.draft else []
    command += ["--dtype", options.dtype, "--num-threads", str(options.num_threads)]
    command += ["--set", "limits.max_context_len=512", "--openai-port", str(PORT)]
    command += [word for i, name in enumerate(ports) for word in (name, str(PORT + 1 + i))]
    return [
        Peer(policy, PORT, command, {**OURS, "speculation_policy": policy}, can_stop=False)
        for policy in options.policies.split(",")
    ]


def measure(options: argparse.Namespace, load: Load, recorder: Recorder) -> None:
    """Start all servers and run all rounds. Raises BenchError."""
    logs = options.out.parent
    own = ours(options)
    others = [
        Peer(name, int(port), shlex.split(command), THEIRS)
        for name, port, command in options.peer or ()
    ]
    with ExitStack() as stack:
        process = stack.enter_context(running(own[0], logs / "ours.log"))
        sides = {peer.name: asking(peer, process, "smartspec", load) for peer in own}
        for number, peer in enumerate(others):
            process = stack.enter_context(running(peer, logs / f"peer-{number}.log"))
            sides[peer.name] = asking(peer, process, options.model, load)
            _signal(process, signal.SIGSTOP)
        asyncio.run(run(sides, load, recorder, _say))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    sizes = [int(size) for size in options.concurrency.split(",")]
    load = Load(sizes, MIXED, options.rounds, options.max_tokens)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = described(
        "Comparison with other servers",
        model=options.model,
        dtype=options.dtype,
        num_threads=options.num_threads,
        **{name: command for name, _, command in options.peer or ()},
    )
    recorder = Recorder(about, options.out, _show)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are ended
    try:
        measure(options, load, recorder)
    except BenchError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {options.out} has the phases so far")
    print(markdown(recorder.document))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="target model of this server")
    parser.add_argument("--draft", help="draft model of this server")
    parser.add_argument(
        "--peer",
        nargs=3,
        action="append",
        metavar=("NAME", "PORT", "COMMAND"),
        help="another server, its port, and the command that starts it; may be repeated",
    )
    parser.add_argument("--policies", default="none,goodput", help="of this server")
    parser.add_argument("--concurrency", default="1,8", help="requests at once")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32", help="of this server")
    parser.add_argument("--num-threads", type=int, default=2, help="of this server")
    parser.add_argument("--out", type=Path, default=Path(".smartspec/results/peer.json"))
    return parser.parse_args(arguments)


def _show(phase: Phase) -> None:
    _say(f"{phase.policy}: {phase.token_goodput_tps:,.1f} tokens/s, {phase.num_failed} failed")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
