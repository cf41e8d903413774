"""Compares this server with others on the same machine: `scripts/bench_peer`.

Every server is a process with an OpenAI-compatible `/v1/completions`. They serve the same prompts
in turns, greedily. This server first answers all prompts, and then every server generates as many
tokens for a prompt as that answer has. While one works, the others are stopped, because a process
that waits may keep a core busy. The result is a document of `smartspec bench`: below, the
policy `goodput` of this server is compared with each other server.

The other servers must not reuse prefixes (llama.cpp: the field cache_prompt is sent as false).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smartspec_bench import real_model
from smartspec_bench.live import PER_PLACE, Load, Serve, run, through
from smartspec_bench.prompts import MIXED, WORKLOADS, Prompt, chat_template, read_prompts
from smartspec_bench.report import markdown
from smartspec_bench.results import BenchError, Recorder, check_answered, described
from smartspec_bench.streams import Exchange, HttpStreams, StreamError

START_S = 1800.0
STOP_S = 30.0
POLL_S = 0.5
MAX_PROMPTS = 160
PORT = 8390
"""Of this server; its other ports are the next ones."""


@dataclass(frozen=True)
class Peer:
    """A server. port: of `/v1/completions`. fields: of each request; they make the server generate
    all tokens, and read each prompt."""

    name: str
    port: int
    command: Sequence[str]
    fields: Mapping[str, Any]

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


class CompletionStreams(HttpStreams):
    """The transport to a server's `/v1/completions`. Use within `async with`."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer.url, "/completions")
        self._fields = peer.fields

    async def stream(self, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The first piece of text as one token, and the last one as the others: events do not say
        how many tokens they have, but the last one says the sum."""
        body = {
            "prompt": fields["text_input"],
            "max_tokens": fields["max_tokens"],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        num_tokens, has_begun = 0, False
        async for event in self.events(body):
            if not has_begun and any(one.get("text") for one in event.get("choices", ())):
                has_begun = True
                yield {"num_output_tokens": 1}
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        if num_tokens != fields["max_tokens"] or not has_begun:
            raise StreamError(f"{num_tokens} tokens came, not {fields['max_tokens']}")
        yield {"num_output_tokens": num_tokens - 1, "finish_reason": "length"}


def asking(peer: Peer, load: Load, process: subprocess.Popen[bytes] | None = None) -> Serve:
    """Sends the requests of a phase to the server. process: stopped while it is idle; None for this
    server, whose launcher would miss heartbeats."""

    async def serve(policy: str, prompts: Sequence[Prompt], at_once: int) -> list[Exchange]:
        if process is not None:
            _signal(process, signal.SIGCONT)
        async with CompletionStreams(peer) as streams:
            exchanges = await through(streams, load)(policy, prompts, at_once)
        if process is not None:
            _signal(process, signal.SIGSTOP)
        return exchanges

    return serve


def ours(options: argparse.Namespace) -> list[Peer]:
    """This server, once for each policy; they share its process."""
    ports = ("--http-port", "--grpc-port", "--metrics-port")
    command = [sys.executable, "-m", "smartspec_cli.app", "serve", "--model", str(options.model)]
    command += ["--draft", options.draft] if options.draft else []
    command += ["--heads", str(options.heads)] if options.heads else []
    command += ["--dtype", options.dtype, "--num-threads", str(options.num_threads)]
    command += ["--set", f"limits.max_context_len={options.context_len}"]
    command += ["--openai-port", str(PORT)]
    command += [word for i, name in enumerate(ports) for word in (name, str(PORT + 1 + i))]
    fields = {"model": "smartspec", "ignore_eos": True, "reuse_prefix": False}
    return [
        Peer(policy, PORT, command, {**fields, "speculation_policy": policy})
        for policy in options.policies.split(",")
    ]


async def with_lengths(load: Load) -> list[Prompt]:
    """Prompts for all rounds, each with the length of this server's answer as its max_tokens."""
    most = max(load.sizes)
    prompts = load.prompts(-1, min(MAX_PROMPTS, (load.rounds + 1) * PER_PLACE * most))
    async with HttpStreams(f"http://127.0.0.1:{PORT + 1}") as streams:
        exchanges = await through(streams, load)("none", prompts, most)
    check_answered(exchanges)
    return [
        replace(prompt, max_tokens=exchange.num_tokens)
        for prompt, exchange in zip(prompts, exchanges, strict=True)
    ]


def measure(options: argparse.Namespace, load: Load, recorder: Recorder) -> None:
    """Start all servers and run all rounds. Raises BenchError."""
    logs = options.out.parent
    own = ours(options)
    fields = {"model": str(options.model), "ignore_eos": True, "cache_prompt": False}
    with ExitStack() as stack:
        stack.enter_context(running(own[0], logs / "ours.log"))
        _say("lengths of the answers")
        load = replace(load, own=asyncio.run(with_lengths(load)))
        sides = {peer.name: asking(peer, load) for peer in own}
        for number, (name, port, command) in enumerate(options.peer or ()):
            peer = Peer(name, int(port), shlex.split(command), fields)
            process = stack.enter_context(running(peer, logs / f"peer-{number}.log"))
            sides[name] = asking(peer, load, process)
            _signal(process, signal.SIGSTOP)
        asyncio.run(run(sides, load, recorder, _say))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    sizes = [int(size) for size in options.concurrency.split(",")]
    try:
        options.model, options.heads = real_model.served(options.model, options.heads)
        template = chat_template(options.model)
        own = read_prompts(options.input) if options.input else []
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    label = options.input.name if options.input else options.workload
    load = Load(sizes, label, options.rounds, options.max_tokens, own=own, template=template)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = described(
        "Comparison with other servers",
        model=options.model.name,
        dtype=options.dtype,
        num_threads=options.num_threads,
        **{name: command for name, _, command in options.peer or ()},
    )
    recorder = Recorder(about, options.out, _say)
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
    parser.add_argument(
        "--model", type=Path, help="target model of this server; default: that of the quickstart"
    )
    parser.add_argument("--draft", help="draft model of this server")
    parser.add_argument("--heads", type=Path, help="heads of this server")
    parser.add_argument("--workload", choices=WORKLOADS, default=MIXED)
    parser.add_argument("--input", type=Path, help="your own prompts, sent as they are")
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
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context-len", type=int, default=512, help="of this server")
    parser.add_argument("--dtype", default="float32", help="of this server")
    parser.add_argument("--num-threads", type=int, default=2, help="of this server")
    parser.add_argument("--out", type=Path, default=Path(".smartspec/results/peer.json"))
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
