"""What the OpenAI-compatible endpoint adds to Triton's own gRPC stream.

A real Triton with the fake engine, whose steps take 20 ms, so that only the processes beside the
engine differ. Requests alternate between gRPC and the endpoint in one run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from smartspec_bench.streams import GrpcStreams
from smartspec_cli.commands.quickstart import SHIPPED_PAIR
from smartspec_launch.address import behind_front, free_address
from smartspec_launch.front_process import OpenAi
from smartspec_launch.triton_server import TritonServer
from smartspec_py.serving.config import LimitsConfig, ServerConfig
from smartspec_testing.engines import FakeEngineConfig
from studies.document import publish, table

STEP_S = 0.02
NUM_TOKENS = 64
NUM_ROUNDS = 8
STREAMS = (1, 8, 32)
PROMPT = "Task: chat\nUser: Hello!\nAnswer:"


async def grpc_times(streams: GrpcStreams) -> list[float]:
    start = time.perf_counter()
    fields = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "stream": True}
    return [time.perf_counter() - start async for _ in streams.stream(fields)]


async def openai_times(session: aiohttp.ClientSession, url: str) -> list[float]:
    start = time.perf_counter()
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0}
    async with session.post(f"{url}/completions", json=body) as response:
        return [time.perf_counter() - start async for _ in _texts(response)]


async def _texts(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if data and data != b"[DONE]":
            yield json.loads(data)["choices"][0]["text"]


async def measure(server: TritonServer, url: str) -> dict[int, dict[str, list[dict[str, float]]]]:
    """By number of streams and path: figures of each round."""
    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        GrpcStreams(server.address.grpc_url) as streams,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        for num in STREAMS:
            of_num = found.setdefault(num, {"gRPC": [], "OpenAI": []})
            for number in range(NUM_ROUNDS + 1):
                for path in ("gRPC", "OpenAI"):
                    start = time.perf_counter()
                    asked = [
                        grpc_times(streams) if path == "gRPC" else openai_times(session, url)
                        for _ in range(num)
                    ]
                    times = await asyncio.gather(*asked)
                    if number:  # the first round warms up
                        of_num[path].append(_figures(times, time.perf_counter() - start))
    return found


def _figures(times: list[list[float]], seconds: float) -> dict[str, float]:
    gaps = [(one[-1] - one[0]) / (len(one) - 1) for one in times]
    return {
        "first_ms": 1e3 * statistics.median(one[0] for one in times),
        "gap_ms": 1e3 * statistics.median(gaps),
        "tokens_per_s": sum(map(len, times)) / seconds,
    }


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    engine = FakeEngineConfig(kind="fake", tokenizer=str(SHIPPED_PAIR / "target"), step_s=STEP_S)
    config = ServerConfig(engine=engine, limits=LimitsConfig(max_sequences=32))
    openai = OpenAi(free_address().http_port, SHIPPED_PAIR / "target")
    with tempfile.TemporaryDirectory() as run_dir:
        server = TritonServer(config, Path(run_dir), behind_front(free_address()))
        with server:
            server.wait_ready()
            assert openai.is_up(server.address, server.start_openai(openai)), server.log_tail()
            found = asyncio.run(measure(server, openai.url(server.address)))
    rows: list[list[Any]] = []
    for num, of_num in found.items():
        mean = {
            path: {name: statistics.mean(one[name] for one in rounds) for name in rounds[0]}
            for path, rounds in of_num.items()
        }
        grpc, ours = mean["gRPC"], mean["OpenAI"]
        rows.append(
            [
                num,
                f"{ours['first_ms'] - grpc['first_ms']:.1f}",
                f"{100 * (ours['gap_ms'] / grpc['gap_ms'] - 1):.1f}",
                f"{ours['tokens_per_s'] / grpc['tokens_per_s']:.3f}",
            ]
        )
    header = ["streams", "first token, ms later", "between tokens, % longer", "throughput, ratio"]
    publish(
        folder,
        "openai_cost",
        "Cost of the OpenAI-compatible endpoint",
        [
            f"Fake engine with steps of {1e3 * STEP_S:g} ms, {NUM_TOKENS} tokens, {NUM_ROUNDS} "
            "rounds, over Triton's gRPC stream; client, endpoint and Triton share the machine.",
            table(header, rows),
        ],
        {"streams": found},
    )


if __name__ == "__main__":
    main()
