"""Part: tokens per second of every policy, with a fixed number of sequences at once.

Policies follow each other directly with the same prompts, and begin with another one in each round.
A round of a batch counts for all policies or for none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from smartspec_bench.gpu.document import BATCHES, BatchPoint, PolicyRate
from smartspec_bench.gpu.pair import Pair, serving
from smartspec_bench.gpu.passes import PassTimes, accept_probs, pass_times, predicted_tps
from smartspec_bench.gpu.plan import BASELINE, MAX_DRAFT_LEN, POLICIES, Plan
from smartspec_bench.gpu.streams import Rate, full_house, params_of
from smartspec_bench.prompts import MIXED, PROMPT_SEED, generated
from smartspec_py.serving.request import GenerateParams
from smartspec_py.serving.server import Server

SEEDS_A_ROUND = 1000
WARM_UP_SEED = PROMPT_SEED - 2


@dataclass(frozen=True)
class BatchResult:
    """See `Document`. left_out: batches without a complete round."""

    accept_probs: list[float]
    points: list[BatchPoint]
    left_out: list[str]


def measure_batches(
    pair: Pair, plan: Plan, deadline_s: float, say: Callable[[str], None]
) -> BatchResult:
    """Run rounds over all batches until the next would end after the deadline (monotonic)."""
    runs: dict[int, list[dict[str, Rate]]] = {num: [] for num in plan.batches}
    most = pair.max_sequences
    say("passes by batch and k")
    times = {num: pass_times(pair, num) for num in plan.batches if num <= most}
    with serving(pair) as server:
        say("acceptance")
        longest = f"fixed:{MAX_DRAFT_LEN}"
        prompts = requests(longest, WARM_UP_SEED, plan)
        warm = full_house(server, prompts, most, max(most, plan.min_requests), deadline_s)
        probs = accept_probs(warm.records)
        took_s: dict[int, float] = {}
        for number in range(plan.max_rounds):
            for batch_size in times:
                start_s = time.monotonic()
                if start_s + took_s.get(batch_size, 0.0) > deadline_s:
                    continue
                say(f"round {number + 1} of {plan.max_rounds}, {batch_size} at once")
                found = _round(server, plan, batch_size, number, deadline_s)
                took_s[batch_size] = time.monotonic() - start_s
                if found is not None:
                    runs[batch_size].append(found)
    points = [_point(num, times[num], rounds, probs) for num, rounds in runs.items() if rounds]
    left_out = [f"{BATCHES}: {num} at once" for num, rounds in runs.items() if not rounds]
    return BatchResult(probs, points, left_out)


def requests(policy: str, seed: int, plan: Plan) -> Iterator[GenerateParams]:
    """Without end; the workloads in turn."""
    return (params_of(prompt, policy, plan.max_tokens) for prompt in generated(MIXED, seed))


def _round(
    server: Server, plan: Plan, batch_size: int, number: int, deadline_s: float
) -> dict[str, Rate] | None:
    """None if the deadline passed before the last policy had run."""
    found = {}
    seed = PROMPT_SEED + SEEDS_A_ROUND * batch_size + number
    first = number % len(POLICIES)
    for policy in POLICIES[first:] + POLICIES[:first]:
        prompts = requests(policy, seed, plan)
        counted = max(batch_size, plan.min_requests)
        rate = full_house(server, prompts, batch_size, counted, deadline_s).rate
        if time.monotonic() > deadline_s or rate is None:
            return None
        found[policy] = rate
    return found


def _point(
    batch_size: int,
    times: PassTimes,
    rounds: Sequence[Mapping[str, Rate]],
    probs: Sequence[float],
) -> BatchPoint:
    return BatchPoint(
        batch_size=batch_size,
        target_ms=times.target_ms,
        draft_ms=times.draft_ms,
        predicted_tps=predicted_tps(batch_size, times, probs),
        rates=[_rate(policy, [found[policy] for found in rounds]) for policy in POLICIES],
    )


def _rate(policy: str, rounds: Sequence[Rate]) -> PolicyRate:
    num_drafted = sum(rate.num_drafted for rate in rounds)
    num_decoded = sum(rate.num_decoded for rate in rounds)
    return PolicyRate(
        policy=policy,
        tokens_tps=[rate.tokens_tps for rate in rounds],
        draft_len=num_drafted / max(1, num_decoded),
        accepted=sum(rate.num_accepted for rate in rounds) / num_drafted if num_drafted else None,
    )


def saturation(server: Server, pair: Pair, plan: Plan, deadline_s: float) -> float | None:
    """Requests per second of the baseline at the largest batch: tokens per second over the mean
    tokens of a request. All requests generate to their end, so that long ones are part of the mean.
    None if no step was done before the deadline (monotonic)."""
    prompts, batch_size = requests(BASELINE, WARM_UP_SEED, plan), pair.max_sequences
    counted = max(batch_size, plan.min_requests)
    run = full_house(server, prompts, batch_size, counted, deadline_s, drains=True)
    if run.rate is None:
        return None
    mean_tokens = sum(sink.num_tokens for sink in run.requests) / len(run.requests)
    return run.rate.tokens_tps / mean_tokens
