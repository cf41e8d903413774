"""How many replicas a load needs, with and without speculation, and what disturbs a fleet.

Llama 3 8B with an EAGLE head, each replica on one H100, by published costs and in virtual time. No
GPU is needed, and none was used. The results do not depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from smartspec_sim.capacity import SAMPLE, parse_target
from smartspec_sim.fleet import FleetSpec, Outage
from smartspec_sim.fleet_runs import FleetRun
from smartspec_sim.hardware import Hardware, gpu_hardware
from smartspec_sim.scenario import Load, Run, Scenario, runs_of
from smartspec_sim.simulate import SimLimits
from smartspec_sim.workload import KindSpec, PhaseSpec, WorkloadSpec
from studies.document import publish, table

TARGET = "p99 ttft < 500 ms"
RATES = (10.0, 100.0, 1000.0)
POLICIES = ("none", "fixed:3", "goodput")
DURATION_S = 15.0

SHORT_S = 12.0
DISTURBED_RATE, DISTURBED_REPLICAS = 60.0, 4
DISTURBANCES = {
    "nothing": FleetSpec(DISTURBED_REPLICAS),
    "one replica fails at 4 s, back after 3 s": FleetSpec(
        DISTURBED_REPLICAS, failures=(Outage(4.0, 3.0),)
    ),
    "rolling restart from 2 s, 1 s each": FleetSpec(DISTURBED_REPLICAS, rolling=Outage(2.0, 1.0)),
}

PREFIX = KindSpec(prefix_len=2000, num_prefixes=40)
PREFIX_TOKENS = 24_000
"""Room for 12 of the 40 prefixes on each replica."""

PREFIX_RATE = 40.0


@lru_cache
def hardware(num_rows: int) -> Hardware:
    return gpu_hardware("h100", 1, "llama-3-8b", "eagle", num_rows)


def runs(rate: float, duration_s: float, kind: KindSpec, limits: SimLimits) -> list[Run]:
    """One for each policy."""
    phase = PhaseSpec(duration_s=duration_s, rate=rate)
    scenario = Scenario(Load(WorkloadSpec(kinds=(kind,), phases=(phase,))), limits)
    return runs_of([scenario], POLICIES, hardware)


def replicas() -> Iterator[dict[str, Any]]:
    """The smallest fleets. A search begins at the result of the rate before."""
    guesses = dict.fromkeys(POLICIES, 0)
    targets = (parse_target(TARGET),)
    for rate in RATES:
        for run in runs(rate, DURATION_S, KindSpec(), SimLimits()):
            search = FleetRun.of(run, FleetSpec(), targets)
            row = replace(search, guess=guesses[run.policy]).row()
            guesses[run.policy] = round(row["num_replicas"] * RATES[1] / RATES[0])
            yield shown(row, rate) | {"tried": row["tried"]}


def disturbed() -> Iterator[dict[str, Any]]:
    for name, fleet in DISTURBANCES.items():
        run = runs(DISTURBED_RATE, SHORT_S, KindSpec(), SimLimits())[-1]
        yield shown(FleetRun.of(run, fleet).row(), DISTURBED_RATE) | {"case": name}


def routed() -> Iterator[dict[str, Any]]:
    for route in ("random", "least", "prefix"):
        limits = SimLimits(prefix_tokens=PREFIX_TOKENS)
        run = runs(PREFIX_RATE, SHORT_S, PREFIX, limits)[-1]
        yield shown(FleetRun.of(run, FleetSpec(DISTURBED_REPLICAS, route)).row(), PREFIX_RATE)


def shown(row: dict[str, Any], rate: float) -> dict[str, Any]:
    return {
        "rate": rate,
        "policy": row["policy"],
        "route": row["route"],
        "replicas": row["num_replicas"],
        "simulated": row["simulated_replicas"],
        "num_requests": row["num_requests"],
        "errors": row["errors"],
        "ttft_ms": row["ttft_ms"],
        "tpot_ms": row["tpot_ms"],
        "e2e_ms": row["e2e_ms"],
        "mean_draft_len": row["mean_draft_len"],
        "mean_rows": row["mean_rows"],
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row[name][value]:,.0f}"
        for name, value in (
            ("ttft_ms", "mean"),
            ("ttft_ms", "p99"),
            ("e2e_ms", "mean"),
            ("e2e_ms", "p99"),
        )
    ]


LATENCIES = ("TTFT, ms", "p99", "e2e, ms", "p99")


def main(folder: Path) -> None:
    routes, disturbances, sizes = list(routed()), list(disturbed()), []
    for row in replicas():
        sizes.append(row)
        print(row["rate"], row["policy"], row["replicas"], file=sys.stderr, flush=True)
    write(folder, sizes, disturbances, routes)


Rows = list[dict[str, Any]]


def write(folder: Path, sizes: Rows, disturbances: Rows, routes: Rows) -> None:
    by_rate = [
        [f"{rate:,.0f}", *(str(row["replicas"]) for row in sizes if row["rate"] == rate)]
        for rate in RATES
    ]
    publish(
        folder,
        "fleet",
        "Replicas for a load",
        [
            f"The smallest number of replicas with {TARGET}. Llama 3 8B with an EAGLE head, one "
            "H100 for each replica, by published costs in virtual time; no GPU was used. Requests "
            "as in ShareGPT, 227 prompt and 250 generated tokens on average, at most 32 at once, "
            f"Poisson arrivals for {DURATION_S:g} s, routed to the fewest open requests.",
            table(["requests/s", *POLICIES], by_rate),
            f"At these sizes. Of fleets with more than {SAMPLE} replicas, {SAMPLE} were simulated "
            "at the same load for each. Near saturation the queue grows with the length of the "
            "load, so a longer load can need more replicas.",
            table(
                ["requests/s", "policy", "replicas", *LATENCIES, "tokens drafted per step"],
                [
                    [
                        f"{row['rate']:,.0f}",
                        row["policy"],
                        row["replicas"],
                        *_cells(row),
                        f"{row['mean_draft_len']:.2f}",
                    ]
                    for row in sizes
                ],
            ),
            f"## Failures and restarts\n\n`goodput`, {DISTURBED_REPLICAS} replicas, "
            f"{DISTURBED_RATE:g} requests/s for {SHORT_S:g} s. A failed replica loses the requests "
            "that have a token; the others are sent again.",
            table(
                ["case", "requests", "failed", *LATENCIES],
                [
                    [row["case"], row["num_requests"], sum(row["errors"].values()), *_cells(row)]
                    for row in disturbances
                ],
            ),
            f"## Routes\n\n`goodput`, {DISTURBED_REPLICAS} replicas, {PREFIX_RATE:g} requests/s. "
            f"Each prompt begins with one of {PREFIX.num_prefixes} prefixes of "
            f"{PREFIX.prefix_len:,} tokens; each replica has room for "
            f"{PREFIX_TOKENS // PREFIX.prefix_len} of them.",
            table(["route", *LATENCIES], [[row["route"], *_cells(row)] for row in routes]),
        ],
        {"replicas": sizes, "disturbed": disturbances, "routed": routes},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
