"""Before the phases: measures the machine's limits, and lets the server serve every policy.

Each policy serves a full queue for a while. This compiles the kernels for its pass sizes, lets the
server learn acceptance and costs, and measures the saturation rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import islice

import numpy as np

from smartspec_bench.client import BenchError, Client, FullQueue
from smartspec_bench.document import Ceilings
from smartspec_bench.plan import MIXED, NONE, Capacity, Settings, needed_workloads
from smartspec_bench.prompts import PROMPT_SEED, generated
from smartspec_bench.streams import step_trace
from smartspec_launch.address import Address
from smartspec_py.core.cost import CostModel
from smartspec_py.serving.step_trace import cost_from_json

WARM_UP_SEED = PROMPT_SEED - 1
"""Its prompts come in no phase."""

ROWS = (1, 8, 32)
NUM_SOLO = 3
EXTRA_SLOTS = 4
"""Requests beyond those that the engine serves at once, so that the queue is never empty."""

COPY_BYTES = 1 << 28
NUM_COPIES = 5


async def warm_up(
    client: Client, settings: Settings, max_sequences: int, say: Callable[[str], None]
) -> Capacity:
    """Raises BenchError where nothing came back."""

    async def rate(policy: str, workload: str) -> float:
        say(f"saturation of {policy} on {workload}, {settings.saturation_s:g} s and the rest")
        prompts, num_slots = generated(workload, WARM_UP_SEED), max_sequences + EXTRA_SLOTS
        queue = await client.full_queue(policy, prompts, num_slots, settings.saturation_s)
        await client.wait_idle()
        return saturation_rps(queue, num_slots)

    await client.closed_loop(NONE, islice(generated(MIXED, WARM_UP_SEED), 1))
    none_rps = {name: await rate(NONE, name) for name in needed_workloads(settings)}
    others = {name: await rate(name, MIXED) for name in settings.policies if name != NONE}
    say("requests alone")
    prompts = islice(generated(MIXED, WARM_UP_SEED), NUM_SOLO)
    alone = await client.closed_loop(NONE, prompts)
    solo_s = sum(e.chunk_s[-1] - e.scheduled_s for e in alone if e.chunk_s) / NUM_SOLO
    return Capacity({NONE: none_rps[MIXED], **others}, none_rps, solo_s)


def saturation_rps(queue: FullQueue, num_first: int) -> float:
    """Tokens per second while the queue was full, divided by the mean tokens of a request.
    num_first: requests at the start that were shortened; they are not part of the means. All others
    are, also if they ended later, so that long requests are not left out. Raises BenchError if a
    request failed."""
    exchanges = queue.exchanges
    failed = [e.timing.error for e in exchanges if e.timing.error is not None]
    if failed:
        raise BenchError(f"warm-up: {len(failed)} of {len(exchanges)} failed: {failed[0]}")
    num_tokens = sum(
        num
        for exchange in exchanges
        for time_s, num in zip(exchange.chunk_s, exchange.chunk_tokens, strict=True)
        if queue.from_s <= time_s < queue.to_s
    )
    duration_s = queue.to_s - queue.from_s
    if not num_tokens:
        raise BenchError(f"warm-up: no token came within {duration_s:g} s; allow more seconds")
    whole = exchanges[num_first:]
    return num_tokens / duration_s / (sum(e.num_tokens for e in whole) / len(whole))


def ceilings(capacity: Capacity, cost: CostModel, max_sequences: int, *more_notes: str) -> Ceilings:
    """cost: as the server's profile has it."""
    target_ms = {str(n): 1e3 * cost.target.one_token_s(n) for n in ROWS if n <= max_sequences}
    notes = [
        *more_notes,
        *(f"saturation of none on {k}: {v:.2f} requests/s" for k, v in capacity.none_rps.items()),
    ]
    notes.append(f"one request alone under none: {1e3 * capacity.solo_s:.0f} ms")
    notes.append("target_pass_ms: of the server's own profile, the best of several rounds")
    return Ceilings(dict(capacity.saturation_rps), target_ms, copy_gb_per_s(), notes)


def cost_of(address: Address) -> CostModel:
    """The server's own profile."""
    return cost_from_json(json.loads(step_trace(address.http_url, 1).splitlines()[0])["profile"])


def copy_gb_per_s() -> float:
    """Memory bandwidth: the best of several copies; bytes read plus written, in units of 1e9."""
    source = np.ones(COPY_BYTES, np.uint8)
    to = np.empty_like(source)
    best_s = float("inf")
    for _ in range(NUM_COPIES):
        start_s = time.perf_counter()
        np.copyto(to, source)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * COPY_BYTES / best_s / 1e9
