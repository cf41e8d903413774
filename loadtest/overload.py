"""Tests a server under overload: up to ten times the requests that it can serve, for minutes.

Starts its own server and measures its request rate with a closed loop. It then sends Poisson
arrivals in an open loop, at 1.2, 2 and 10 times that rate. From 2 times on, the queue is always
full. For each phase it prints the time of refusals, the latency of admitted requests and the memory
of the server's processes. The last line is one JSON document.

    python loadtest/overload.py --model TARGET --draft DRAFT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from smartspec_bench.open_loop import Bounds, OpenLoop
from smartspec_bench.prompts import Prompt
from smartspec_bench.streams import Exchange, HttpStreams, ask, seconds_from_now
from smartspec_bench.workloads import WORKLOADS, generate
from smartspec_launch.triton_server import TritonServer, free_address
from smartspec_py.serving.config import LimitsConfig, ServerConfig, TorchEngineConfig
from smartspec_sim.arrivals import arrival_times, poisson_gaps, steady

MAX_TOKENS = 48
NUM_ROWS = 8
MAX_QUEUE = 8
PHASES = ((1.2, 40.0), (2.0, 60.0), (10.0, 180.0), (2.0, 60.0))
"""For each phase, the factor of the served rate and the length in seconds."""

SETTLING_S = 10.0
"""Time at the start of each phase that is not measured, because the queue fills."""

MEMORY_EVERY_S = 5.0
TIMEOUT_S = 120.0
MOST_REQUESTS = 1_000_000

FIELDS = {"max_tokens": MAX_TOKENS, "end_id": -1, "stream": True, "reuse_prefix": False}


@dataclass
class Phase:
    """The results of one phase. rate_hz: arrivals per second.

    Latencies are in seconds, for requests that arrived after SETTLING_S.
    """

    name: str
    rate_hz: float
    num_sent: int = 0
    num_other_errors: int = 0
    served_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "phase": self.name,
            "rate_hz": round(self.rate_hz, 2),
            "sent": self.num_sent,
            "served": len(self.served_s),
            "refused": len(self.refused_s),
            "other_errors": self.num_other_errors,
            "served_mean_s": _mean(self.served_s),
            "served_p95_s": _percentile(self.served_s, 0.95),
            "refused_p50_s": _percentile(self.refused_s, 0.5),
            "refused_p99_s": _percentile(self.refused_s, 0.99),
            "memory_first_mib": self.memory_mib[0] if self.memory_mib else None,
            "memory_last_mib": self.memory_mib[-1] if self.memory_mib else None,
            "memory_most_mib": max(self.memory_mib, default=None),
        }


def _mean(values: list[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def _percentile(values: list[float], share: float) -> float | None:
    if not values:
        return None
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4)


def _prompts() -> Iterator[Prompt]:
    for index in count():
        yield Prompt(generate(WORKLOADS[index % len(WORKLOADS)], 77, index).prompt)


async def _served_rps(streams: HttpStreams, seconds: float) -> float:
    """The requests per second of NUM_ROWS clients that each send one request after another."""
    now_s, prompts, num_served = seconds_from_now(), _prompts(), 0

    async def client() -> None:
        nonlocal num_served
        while now_s() < seconds:
            await ask(streams, {**FIELDS, **next(prompts).fields})
            num_served += 1

    await asyncio.gather(*(client() for _ in range(NUM_ROWS)))
    return num_served / now_s()


async def _overload(
    streams: HttpStreams, phase: Phase, seconds: float, server: TritonServer
) -> Phase:
    now_s = seconds_from_now()
    next_memory_s = SETTLING_S

    def ended(exchange: Exchange) -> None:
        nonlocal next_memory_s
        is_refused = "queue is full" in (exchange.error or "")
        if exchange.error is not None and not is_refused:
            phase.num_other_errors += 1
            print(f"{phase.name}: {exchange.error}", file=sys.stderr)
        elif exchange.scheduled_s >= SETTLING_S:
            took_s = now_s() - exchange.scheduled_s
            (phase.refused_s if is_refused else phase.served_s).append(took_s)
        if now_s() >= next_memory_s:
            phase.memory_mib.append(round(_resident_mib(server.pid), 1))
            next_memory_s += MEMORY_EVERY_S

    times = arrival_times(poisson_gaps(1), steady(phase.rate_hz, seconds))
    bounds = Bounds(MOST_REQUESTS, seconds, MOST_REQUESTS, TIMEOUT_S)
    exchanges = await OpenLoop(streams, bounds, FIELDS).run(times, _prompts(), ended)
    phase.num_sent = len(exchanges)
    return phase


def _resident_mib(group: int) -> float:
    """The resident memory of the server's process group, in MiB."""
    pages = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[2]) == group:
                pages += int((folder / "statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # the process has ended in the meantime
    return pages * 4096 / 2**20


async def _run(server: TritonServer, scale: float) -> list[Phase]:
    async with HttpStreams(server.address.http_url) as streams:
        await _served_rps(streams, 5)
        rate_hz = await _served_rps(streams, 30)
        print(f"serves {rate_hz:.2f} requests/s of {MAX_TOKENS} tokens", file=sys.stderr)
        found = []
        for factor, length in PHASES:
            phase = Phase(f"{factor:g} times", factor * rate_hz)
            found.append(await _overload(streams, phase, length * scale, server))
            print(json.dumps(phase.summary()), file=sys.stderr)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the phase lengths")
    options = parser.parse_args()
    engine = TorchEngineConfig(
        model=str(options.model.resolve()),
        draft=str(options.draft.resolve()),
        profile_cache=str(Path(".smartspec/profiles").resolve()),
    )
    limits = LimitsConfig(max_sequences=NUM_ROWS, max_queue=MAX_QUEUE, max_context_len=512)
    config = ServerConfig(engine=engine, limits=limits)
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer(config, Path(folder), free_address()) as server,
    ):
        server.wait_ready()
        phases = asyncio.run(_run(server, options.scale))
        is_alive = server.is_model_ready()
    summaries = [phase.summary() for phase in phases]
    print(json.dumps({"alive": is_alive, "limits": limits.model_dump(), "phases": summaries}))
    sys.exit(0 if is_alive else 1)


if __name__ == "__main__":
    main()
