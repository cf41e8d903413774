"""Computes the phase of the document from the exchanges of a turn. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from smartspec_bench.document import Phase, Series, Spread
from smartspec_bench.plan import Turn
from smartspec_bench.streams import Exchange
from smartspec_sim.latency import RequestTiming, Slo, statistics_ms, summarise

POINT_S = 1.0
"""Seconds between two points of a series."""


def phase_of(
    turn: Turn, exchanges: Sequence[Exchange], slo: Slo | None, passes_s: tuple[float, float]
) -> Phase:
    """passes_s: the server's seconds in draft passes and in target passes during the phase."""
    timings = [exchange.timing for exchange in exchanges]
    found = summarise(timings, slo)
    finished = [exchange for exchange in exchanges if exchange.timing.is_finished]
    lens = [draft_len for exchange in finished for draft_len in draft_lens(exchange)]
    accepted = [num for exchange in finished for _, num in _verifications(exchange)]
    num_drafted = sum(lens)
    point = turn.point
    return Phase(
        policy=turn.policy,
        shape=point.shape,
        workload=point.workload,
        load=point.load,
        rate_rps=_rate_rps(turn),
        seed=turn.seed,
        repeat=turn.repeat,
        num_sent=len(exchanges),
        num_finished=found["num_finished"],
        num_failed=found["num_failed"],
        duration_s=found["elapsed_s"],
        e2e_ms=Spread(**found["e2e_ms"]),
        ttft_ms=Spread(**found["ttft_ms"]),
        itl_ms=Spread(**statistics_ms([s for e in finished if (s := itl_s(e)) is not None])),
        tpot_ms=Spread(**found["tpot_ms"]),
        send_lag_ms=Spread(**found["send_lag_ms"]),
        token_goodput_tps=found["token_goodput_tps"],
        slo_goodput_rps=found.get("slo_goodput_rps"),
        mean_draft_len=num_drafted / len(lens) if lens else 0.0,
        acceptance_rate=sum(accepted) / num_drafted if num_drafted else None,
        draft_len_counts=_histogram(lens),
        accepted_counts=_histogram(accepted),
        series=series_of(exchanges),
        time_shares=time_shares(timings, passes_s),
    )


def _rate_rps(turn: Turn) -> float:
    """Expected mean rate of the phase; 0 for closed."""
    stretches = turn.point.stretches
    if not stretches:
        return 0.0
    num = sum(stretch.rate_rps * stretch.duration_s for stretch in stretches)
    return num / turn.point.sending_s


def itl_s(exchange: Exchange) -> float | None:
    """Time from the first chunk to the last token, per token after the first chunk.

    None if all tokens are in the first chunk.
    """
    num_later = exchange.num_tokens - exchange.chunk_tokens[0]
    return (exchange.chunk_s[-1] - exchange.chunk_s[0]) / num_later if num_later else None


def _verifications(exchange: Exchange) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each step with drafts; empty without detailed metrics."""
    document: dict[str, Any] = json.loads(exchange.last.get("metrics") or "{}")
    found = document.get("speculative_decoding", {})
    drafted, accepted = found.get("per_step_drafted", []), found.get("per_step_accepted", [])
    return list(zip(drafted, accepted, strict=True))


def draft_lens(exchange: Exchange) -> list[int]:
    """The draft lengths of all decoding steps.

    The server reports the steps with drafts in order, and the total number of steps. Steps without
    drafts are assumed to be spread evenly among the others.
    """
    drafted = [num for num, _ in _verifications(exchange)]
    num_steps = int(exchange.last.get("num_steps", 0))
    places = [index * len(drafted) // max(1, num_steps) for index in range(num_steps + 1)]
    return [drafted[a] if a < b else 0 for a, b in pairwise(places)]


def _histogram(values: Sequence[int]) -> list[int]:
    counts = Counter(values)
    return [counts[value] for value in range(max(counts, default=-1) + 1)]


def series_of(exchanges: Sequence[Exchange]) -> Series:
    """One point per second from the first due request. Its time is the middle of the second.

    The steps of a request are distributed evenly over its chunks after the first one, because a
    slow client can receive several steps in one chunk.
    """
    ends = [e.chunk_s[-1] for e in exchanges if e.chunk_s]
    start_s = min((e.scheduled_s for e in exchanges), default=0.0)
    num_points = int((max(ends, default=start_s) - start_s) // POINT_S) + 1 if ends else 0
    due, running = [0.0] * num_points, [0.0] * num_points
    drafted, num_steps = [0] * num_points, [0] * num_points
    for exchange in exchanges:
        first = int((exchange.scheduled_s - start_s) // POINT_S)
        if first < num_points:
            due[first] += 1 / POINT_S
        if not exchange.chunk_s:
            continue
        for index in range(num_points):
            running[index] += _overlap_s(exchange, start_s + index * POINT_S) / POINT_S
        for time_s, num in _drafts_over_time(exchange):
            index = int((time_s - start_s) // POINT_S)
            drafted[index] += num
            num_steps[index] += 1
    return Series(
        time_s=[(index + 0.5) * POINT_S for index in range(num_points)],
        rate_rps=due,
        running=running,
        draft_len=[d / n if n else 0.0 for d, n in zip(drafted, num_steps, strict=True)],
    )


def _overlap_s(exchange: Exchange, from_s: float) -> float:
    """Seconds of [from_s, from_s + POINT_S] in which the request was in flight."""
    end_s = min(exchange.chunk_s[-1], from_s + POINT_S)
    return max(0.0, end_s - max(exchange.scheduled_s, from_s))


def _drafts_over_time(exchange: Exchange) -> list[tuple[float, int]]:
    """The arrival time of the tokens of each decoding step, and its draft length."""
    lens = draft_lens(exchange)
    times = exchange.chunk_s[1:] or exchange.chunk_s
    return [(times[index * len(times) // len(lens)], num) for index, num in enumerate(lens)]


def time_shares(
    timings: Sequence[RequestTiming], passes_s: tuple[float, float]
) -> dict[str, float]:
    """Shares of the time with a request in flight: draft passes, target passes, and the rest.

    Only target passes that decode count as target; the rest includes prefill.
    """
    busy_s = _busy_s([(t.sent_s, t.last_s) for t in timings if t.last_s is not None])
    if not busy_s or not passes_s[1]:
        return {}
    draft, target = (seconds / busy_s for seconds in passes_s)
    return {"draft": draft, "target": target, "host": max(0.0, 1 - draft - target)}


def _busy_s(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the spans, in seconds."""
    total_s, end_s = 0.0, 0.0
    for start, end in sorted(spans):
        total_s += max(0.0, end - max(start, end_s))
        end_s = max(end_s, end)
    return total_s
