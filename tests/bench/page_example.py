"""A made-up result document of a full run: 5 loads, 5 policies, 4 repeats; a step; a mix.

No number was measured. Latency grows as that of a queue: service time over (1 - load share), and
each policy has a service time and a rate at which it saturates.
"""

from __future__ import annotations

import random

from smartspec_bench.document import (
    About,
    Ceilings,
    Comparison,
    Document,
    Phase,
    Series,
    Spread,
)

SATURATION_RPS = {"none": 2.0, "fixed:1": 2.1, "fixed:3": 1.8, "fixed:5": 1.5, "goodput": 2.3}
SERVICE_MS = {"none": 900.0, "fixed:1": 640.0, "fixed:3": 430.0, "fixed:5": 400.0, "goodput": 400.0}
LOADS = (0.05, 0.3, 0.6, 0.9, 1.1)
NUM_REPEATS = 4
STEP_S = 20

ABOUT = About(
    title="Latency under load: goodput against fixed draft lengths",
    date="2026-11-21T20:00:00Z",
    command="smartspec bench --form full --model target --draft draft --out result.json",
    machine="a made-up machine, no number was measured",
    cores=2,
    versions={"python": "3.11.7", "torch": "2.13.0", "smartspec": "0.1.0"},
    commit="0123abc",
    pair="target 110M and draft 4M",
    limits={"max_sequences": 32, "max_draft_len": 7, "batch_invariant": None},
    form="full",
    definitions="token_goodput_tps: tokens of finished requests over the seconds of the phase.\n"
    "slo_goodput_rps: requests a second that met every target.",
)
CEILINGS = Ceilings(
    SATURATION_RPS, {"1": 12.1, "8": 15.3, "32": 31.9}, 11.2, ["a quiet machine: 1 % apart"]
)


def latency_ms(policy: str, rate_rps: float) -> float:
    share = rate_rps / SATURATION_RPS[policy]
    return SERVICE_MS[policy] / max(0.04, 1 - share)


def spread(mean: float) -> Spread:
    return Spread(mean, 0.9 * mean, 1.6 * mean, 1.9 * mean, 2.8 * mean)


def draft_len(policy: str, rate_rps: float) -> float:
    if policy == "none":
        return 0.0
    if policy.startswith("fixed:"):
        return float(policy.removeprefix("fixed:"))
    return max(0.2, 5.2 - 2.6 * rate_rps)


def counts(mean: float, num_steps: int = 600) -> list[int]:
    """Steps around a mean, whole at whole means."""
    low = int(mean)
    found = [0] * 8
    found[low] = round(num_steps * (1 - (mean - low)))
    found[low + 1] = num_steps - found[low]
    return found


def shares(length: float) -> dict[str, float]:
    return {"draft": 0.05 * length, "target": 0.9 - 0.05 * length, "host": 0.1}


def phase(
    policy: str, shape: str, load: float, repeat: int, rng: random.Random, series: Series
) -> Phase:
    rate_rps = load * SATURATION_RPS["none"]
    e2e_ms = latency_ms(policy, rate_rps) * rng.uniform(0.94, 1.06)
    length = draft_len(policy, rate_rps)
    return Phase(
        policy=policy,
        shape=shape,
        workload="mixed",
        load=load if shape == "steady" else 0.0,
        rate_rps=rate_rps,
        seed=1000 + repeat,
        repeat=repeat,
        num_sent=120,
        num_finished=119,
        num_failed=1,
        duration_s=60.0,
        e2e_ms=spread(e2e_ms),
        ttft_ms=spread(0.15 * e2e_ms),
        itl_ms=spread(0.017 * e2e_ms),
        tpot_ms=spread(0.017 * e2e_ms),
        send_lag_ms=spread(0.4),
        token_goodput_tps=50 * min(rate_rps, SATURATION_RPS[policy]) * rng.uniform(0.99, 1.01),
        slo_goodput_rps=0.9 * min(rate_rps, SATURATION_RPS[policy]),
        mean_draft_len=length,
        acceptance_rate=None if policy == "none" else 0.78 - 0.05 * length,
        draft_len_counts=[] if shape == "step" else counts(length),
        accepted_counts=[] if shape == "step" else counts(0.65 * length),
        series=series,
        time_shares=shares(length) if shape == "steady" else {},
    )


def step_series(policy: str) -> Series:
    """Quiet, then crowded, then quiet again."""
    rates = [0.2] * STEP_S + [2.2] * STEP_S + [0.4] * STEP_S
    running, out = [], 0.0
    for rate in rates:
        out = max(rate, out + rate - 0.9 * SATURATION_RPS[policy])
        running.append(round(out, 2))
    lengths = [draft_len(policy, rate) for rate in rates]
    return Series([float(at) for at in range(len(rates))], rates, running, lengths)


def comparison(load: float, against: str, role: str, bound: float | None) -> Comparison:
    rate_rps = load * SATURATION_RPS["none"]
    ratio = latency_ms("goodput", rate_rps) / latency_ms(against, rate_rps)
    low, high = ratio * 0.95, ratio * 1.06
    verdict = "met" if bound and high <= bound else "missed" if bound and low > bound else "open"
    text = f"At {rate_rps:.2f}/s goodput takes {ratio:.2f} times as long as {against}."
    return Comparison(
        *("steady", "mixed", load, rate_rps, "goodput", against, role, "e2e_ms.mean"),
        *(ratio, low, high, NUM_REPEATS, bound, verdict, text),
    )


def full_document() -> Document:
    rng = random.Random(7)
    steady = [
        phase(policy, "steady", load, repeat, rng, Series())
        for load in LOADS
        for repeat in range(NUM_REPEATS)
        for policy in SATURATION_RPS
    ]
    step = [phase(policy, "step", 0.5, 0, rng, step_series(policy)) for policy in SATURATION_RPS]
    mix = [
        phase(policy, "mix", 0.6, repeat, rng, Series())
        for repeat in range(NUM_REPEATS)
        for policy in SATURATION_RPS
    ]
    best = {0.05: "fixed:5", 0.3: "fixed:5", 0.6: "fixed:3", 0.9: "fixed:1", 1.1: "fixed:1"}
    comparisons = [comparison(load, best[load], "best fixed", 0.8) for load in LOADS]
    comparisons += [comparison(load, "none", "none", 0.9) for load in LOADS]
    comparisons += [comparison(load, "fixed:3", "fixed", None) for load in LOADS]
    summary = [
        "Over five loads, goodput answered in 0.41 to 0.98 times the time of the best fixed draft "
        "length (95 % intervals within 0.39 to 1.04).",
        "Against no speculation it took 0.20 to 0.44 times as long.",
    ]
    return Document(ABOUT, CEILINGS, [*steady, *step, *mix], comparisons, summary)
