"""Replaces two servers behind HAProxy under load, then kills one, and counts what clients see.

Starts two servers with the fake engine on loopback and HAProxy before them. Clients keep a number
of streams in flight. One server after the other is stopped with SIGTERM and started with another
configuration. At last, all processes of one server are killed. Each request has a seed, which
defines its text; so a text that is cut, doubled or another request's is found. Exit status 1 if a
promise is broken.

    python loadtest/rolling_restart.py --streams 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rolling.haproxy import find_haproxy
from rolling.load import Load
from rolling.report import KILL, replaced, restarts, summary_of, table_of
from rolling.servers import Fleet, Server, running_fleet

POLL_S = 0.1
SETTLE = 0.25
"""Answers after each change, as a share of the streams, before the next change."""

OLD_POLICY, NEW_POLICY = "fixed:3", "none"


def run(folder: Path, num_streams: int, step_s: float, num_replaced: int) -> dict[str, Any]:
    """The demonstration and its summary."""
    with running_fleet(folder, OLD_POLICY, step_s, num_streams) as fleet:
        load = Load(fleet.proxy.url, num_streams)
        victims = asyncio.run(demonstrate(fleet, load, num_replaced))
        return summary_of(load.answers, victims, fleet.proxy.statistics())


async def demonstrate(fleet: Fleet, load: Load, num_replaced: int) -> list[int]:
    """All phases. Returns the seeds of the streams that the killed server had."""
    async with load:
        await load.until_full()
        await _settle(load)
        for server in fleet.servers[:num_replaced]:
            load.phase = restarts(server.name)
            await asyncio.to_thread(server.drain)
            await asyncio.to_thread(server.start, NEW_POLICY)
            await _until_up(fleet, server)
            load.phase = replaced(server.name)
            await _settle(load)
        victim = fleet.servers[-1]
        await load.until_serving(victim.name)
        load.phase = KILL
        seeds = load.open_at(victim.name)
        await asyncio.to_thread(victim.kill)
        await load.until_ended(seeds)
        await _settle(load)
    return seeds


async def _settle(load: Load) -> None:
    await load.until_answered(load.num_answered + int(SETTLE * load.num_streams) + 1)


async def _until_up(fleet: Fleet, server: Server) -> None:
    while not fleet.proxy.is_up(server.name):
        await asyncio.sleep(POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=200, help="streams in flight; 2..1000")
    parser.add_argument("--step-s", type=float, default=0.2, help="seconds of an engine step")
    parser.add_argument(
        "--replace", type=int, default=2, choices=(1, 2), help="number of servers to replace"
    )
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    if not 2 <= options.streams <= 1000:
        parser.error(f"--streams: got {options.streams}, must be in 2..1000")
    if not 0.01 <= options.step_s <= 10:
        parser.error(f"--step-s: got {options.step_s:g}, must be in 0.01..10")
    if find_haproxy() is None:
        print("skipped: haproxy is not installed; run `apt-get install haproxy`", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        summary = run(Path(folder), options.streams, options.step_s, options.replace)
    Console().print(table_of(summary))
    for promise, is_kept in summary["promises"].items():
        print(f"{'yes' if is_kept else 'NO '} {promise}")
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0 if all(summary["promises"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
