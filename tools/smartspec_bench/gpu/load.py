"""Part: mean latency under Poisson arrivals, the same for every policy of a load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import islice

from smartspec_bench.gpu.batches import saturation
from smartspec_bench.gpu.document import LOAD, LoadPoint
from smartspec_bench.gpu.pair import Pair, serving
from smartspec_bench.gpu.plan import LOADED_POLICIES, LOADS, Plan
from smartspec_bench.gpu.streams import LocalStreams
from smartspec_bench.open_loop import Bounds, OpenLoop
from smartspec_bench.prompts import MIXED, PROMPT_SEED, generated
from smartspec_py.serving.server import Server
from smartspec_sim.arrivals import arrival_times, poisson_gaps, steady
from smartspec_sim.latency import summarise

ARRIVAL_SEED = 11
MAX_OUT = 4096
TIMEOUT_S = 60.0


def measure_load(
    pair: Pair, plan: Plan, deadline_s: float, say: Callable[[str], None]
) -> tuple[float | None, list[LoadPoint], list[str]]:
    """The saturation rate, a point for each load and policy, and the loads that did not fit in the
    time.

    A load starts if all of its policies are expected to end before the deadline (monotonic). The
    estimate is the time to generate their tokens at the saturation rate, plus the delay of the
    previous load.
    """
    points: list[LoadPoint] = []
    left_out: list[str] = []
    with serving(pair) as server:
        say("saturation without speculation")
        saturation_rps = saturation(server, pair, plan, deadline_s)
        if saturation_rps is None:
            return None, points, [LOAD]
        beyond_s = 0.0
        for index, load in enumerate(LOADS):
            expected_s = len(LOADED_POLICIES) * plan.load_s * max(1.0, load)
            start_s = time.monotonic()
            if start_s + expected_s + beyond_s > deadline_s:
                left_out.append(f"{LOAD}: {load} of saturation")
                continue
            first = index % len(LOADED_POLICIES)
            for policy in LOADED_POLICIES[first:] + LOADED_POLICIES[:first]:
                say(f"load {load} of saturation, {policy}")
                points.append(_measure(server, plan, policy, load, load * saturation_rps))
            beyond_s = max(0.0, time.monotonic() - start_s - expected_s)
    points.sort(key=lambda point: (point.load, LOADED_POLICIES.index(point.policy)))
    return saturation_rps, points, left_out


def _measure(server: Server, plan: Plan, policy: str, load: float, rate_rps: float) -> LoadPoint:
    times = arrivals(rate_rps, plan.load_s)
    prompts = islice(generated(MIXED, PROMPT_SEED + round(100 * load)), len(times))
    fields = {"max_tokens": plan.max_tokens, "speculation_policy": policy}
    bounds = Bounds(len(times), times[-1] + 1.0, MAX_OUT, TIMEOUT_S)
    loop = OpenLoop(LocalStreams(server), bounds, fields)
    exchanges = asyncio.run(loop.run(times, prompts))
    summary = summarise([exchange.timing for exchange in exchanges])
    return LoadPoint(
        load=load,
        rate_rps=rate_rps,
        policy=policy,
        num_requests=summary["num_requests"],
        num_failed=summary["num_failed"],
        mean_ms=summary["e2e_ms"]["mean"],
        p95_ms=summary["e2e_ms"]["p95"],
        tokens_tps=summary["token_goodput_tps"],
    )


def arrivals(rate_rps: float, duration_s: float) -> Sequence[float]:
    """Seconds of a phase; with a low rate, long enough for one request."""
    times = list(arrival_times(poisson_gaps(ARRIVAL_SEED), steady(rate_rps, duration_s)))
    return times or [0.0]
