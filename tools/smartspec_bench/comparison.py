"""Compares policies at each place of a document, by paired ratios with intervals. Pure.

Ratios are of mean latencies; below 1 the compared policy is faster. Every repeat gives one ratio,
with the same arrivals and prompts, minutes apart at most. Repeats are the unit, not requests,
because requests of a phase share its queue and are not independent. The interval is Student's t on
the logarithms of the ratios. With 3 to 10 repeats, a bootstrap covers too little. With logarithms,
"a over b" and "b over a" are the same statement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from smartspec_bench.results import Document, Phase, PlaceKey

NONE, GOODPUT = "none", "goodput"

Logs = Mapping[int, float]
"""Logarithms of a policy's mean latency, by repeat."""

# fmt: off
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
         2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
         2.052, 2.048, 2.045, 2.042)
# fmt: on
"""Student's t, two-sided 95 %, by degrees of freedom from 1; the last for more."""


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over the pairs, and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PolicyMeans:
    """Geometric means over the repeats. Times are milliseconds; None without a finished request.
    ratio: the compared policy's mean latency over this one's; None for fewer than two repeats."""

    policy: str
    e2e_ms: float | None
    p99_ms: float | None
    ttft_ms: float | None
    tokens_per_s: float
    draft_len: float
    ratio: Ratio | None


@dataclass(frozen=True)
class Place:
    """A load with all its policies. best_fixed: the fixed length with the lowest mean latency.
    over_best: the compared policy over the best fixed length."""

    label: str
    policies: tuple[PolicyMeans, ...]
    best_fixed: PolicyMeans | None
    over_best: Ratio | None
    num_failed: int
    failure: str | None
    num_different_texts: int

    def policy(self, name: str) -> PolicyMeans | None:
        return next((one for one in self.policies if one.policy == name), None)


def places(document: Document) -> list[Place]:
    """In the order of the first phase of each."""
    found: dict[PlaceKey, list[Phase]] = {}
    for phase in document.phases:
        found.setdefault(phase.place, []).append(phase)
    return [_place(phases) for phases in found.values()]


def _place(phases: Sequence[Phase]) -> Place:
    names = list(dict.fromkeys(phase.policy for phase in phases))
    latencies = {name: _latencies(phases, name) for name in names}
    ours = latencies.get(GOODPUT, {})
    rows = [_means(phases, name, ours, latencies[name]) for name in sorted(names, key=_order)]
    fixed = [one for one in rows if _is_fixed(one.policy) and one.e2e_ms is not None]
    return Place(
        label=label_of(*phases[0].place),
        policies=tuple(rows),
        best_fixed=min(fixed, key=lambda one: one.e2e_ms or math.inf, default=None),
        over_best=cross_fit(ours, {one.policy: latencies[one.policy] for one in fixed}),
        num_failed=sum(phase.num_failed for phase in phases),
        failure=next((phase.failure for phase in phases if phase.failure), None),
        num_different_texts=sum(
            phase.num_finished - phase.num_same_texts
            for phase in phases
            if phase.num_same_texts is not None
        ),
    )


def _is_fixed(policy: str) -> bool:
    """`fixed:3, in process` is no policy of its own."""
    return policy.startswith("fixed:") and "," not in policy


def label_of(shape: str, workload: str, load: float) -> str:
    """Such as `70 % of saturation, mixed`."""
    names = {
        "at once": f"{load:.0f} at once",
        "closed": "one request at a time",
        "steady": f"{100 * load:.0f} % of saturation",
        "step": "load that rises and falls",
        "start": f"first requests of a new server, {100 * load:.0f} % of saturation",
    }
    return f"{names.get(shape, shape)}, {workload}"


def _order(policy: str) -> tuple[int, str]:
    """none, fixed lengths, others, goodput."""
    ranks = {NONE: 0, GOODPUT: 3}
    return ranks.get(policy, 1 if policy.startswith("fixed:") else 2), policy


def _latencies(phases: Sequence[Phase], policy: str) -> Logs:
    found = {phase.repeat: phase.e2e_ms["mean"] for phase in phases if phase.policy == policy}
    return {repeat: math.log(mean) for repeat, mean in found.items() if mean}


def _means(phases: Sequence[Phase], policy: str, ours: Logs, theirs: Logs) -> PolicyMeans:
    own = [phase for phase in phases if phase.policy == policy]
    return PolicyMeans(
        policy=policy,
        e2e_ms=_mean(phase.e2e_ms["mean"] for phase in own),
        p99_ms=_mean(phase.e2e_ms["p99"] for phase in own),
        ttft_ms=_mean(phase.ttft_ms["mean"] for phase in own),
        tokens_per_s=_mean(phase.token_goodput_tps for phase in own) or 0.0,
        draft_len=sum(phase.mean_draft_len for phase in own) / len(own),
        ratio=None if theirs == ours else paired(ours, theirs),
    )


def _mean(values: Iterator[float | None]) -> float | None:
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else None


def paired(policy: Logs, against: Logs) -> Ratio | None:
    """Over the repeats that both have; None for fewer than two."""
    return interval([policy[repeat] - against[repeat] for repeat in _common([policy, against])])


def cross_fit(policy: Logs, fixed: Mapping[str, Logs]) -> Ratio | None:
    """The policy over the best fixed length, which each half of the repeats chooses for the other.

    The best of seven noisy means looks better than it is, if it is compared on the same repeats. So
    the repeats are divided into even and odd. The length with the lowest mean in one half is
    compared on the other half, and the ratios of both halves are combined. None for fewer than two
    repeats, or without a fixed length.
    """
    repeats = _common([policy, *fixed.values()])
    if not fixed or len(repeats) < 2:
        return None
    ratios = list[float]()
    for first in (0, 1):
        picks, scores = repeats[first::2], repeats[1 - first :: 2]
        best = min(fixed.values(), key=lambda logs: sum(logs[repeat] for repeat in picks))
        ratios += [policy[repeat] - best[repeat] for repeat in scores]
    return interval(ratios)


def interval(logs: Sequence[float]) -> Ratio | None:
    """From logarithms of ratios, one per repeat; None for fewer than two, which have no interval.

    Ratios 1 and e have the logarithms 0 and 1: mean 1/2, standard error 1/2, t 12.706, so the
    interval is e to 0.5 -+ 6.353.
    """
    if len(logs) < 2:
        return None
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    half = error * T_975[min(len(logs) - 1, len(T_975)) - 1]
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _common(logs: Sequence[Logs]) -> list[int]:
    return sorted(set.intersection(*map(set, logs)))
