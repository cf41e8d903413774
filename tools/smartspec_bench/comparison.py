"""Compares a policy with the others at each place of a document. Pure.

Ratios are of mean latencies, over the repeats; below 1 the compared policy is faster. The best
fixed length is chosen by one half of the repeats and compared on the other (`ratios.cross_fit`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smartspec_bench.ratios import Means, Ratio, cross_fit, paired
from smartspec_bench.results import Document, Phase

NONE, GOODPUT = "none", "goodput"


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
    num_different_texts: int

    def policy(self, name: str) -> PolicyMeans | None:
        return next((one for one in self.policies if one.policy == name), None)


def places(document: Document, compared: str = GOODPUT) -> list[Place]:
    """In the order of the first phase of each."""
    found: dict[tuple[str, str, float], list[Phase]] = {}
    for phase in document.phases:
        found.setdefault(phase.place, []).append(phase)
    return [_place(phases, compared) for phases in found.values()]


def _place(phases: Sequence[Phase], compared: str) -> Place:
    names = list(dict.fromkeys(phase.policy for phase in phases))
    latencies = {name: _latencies(phases, name) for name in names}
    ours = latencies.get(compared, {})
    rows = [_means(phases, name, ours, latencies[name]) for name in sorted(names, key=_order)]
    fixed = [one for one in rows if _is_fixed(one.policy) and one.e2e_ms is not None]
    found = cross_fit(ours, {one.policy: latencies[one.policy] for one in fixed}) if ours else None
    return Place(
        label=label_of(*phases[0].place),
        policies=tuple(rows),
        best_fixed=min(fixed, key=lambda one: one.e2e_ms or math.inf, default=None),
        over_best=None if found is None else found.ratio,
        num_failed=sum(phase.num_failed for phase in phases),
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
    if shape == "at once":
        return f"{load:.0f} at once, {workload}"
    names = {
        "closed": "one request at a time",
        "steady": f"{100 * load:.0f} % of saturation",
        "step": "load that rises and falls",
        "shift": "texts that change",
        "start": f"first requests of a new server, {100 * load:.0f} % of saturation",
    }
    return f"{names.get(shape, shape)}, {workload}"


def _order(policy: str) -> tuple[int, str]:
    """none, fixed lengths, others, goodput."""
    ranks = {NONE: 0, GOODPUT: 3}
    return ranks.get(policy, 1 if policy.startswith("fixed:") else 2), policy


def _latencies(phases: Sequence[Phase], policy: str) -> Means:
    return {
        phase.repeat: phase.e2e_ms.mean
        for phase in phases
        if phase.policy == policy and phase.e2e_ms.mean
    }


def _means(phases: Sequence[Phase], policy: str, ours: Means, theirs: Means) -> PolicyMeans:
    own = [phase for phase in phases if phase.policy == policy]
    is_ours = theirs == ours
    return PolicyMeans(
        policy=policy,
        e2e_ms=_mean(phase.e2e_ms.mean for phase in own),
        p99_ms=_mean(phase.e2e_ms.p99 for phase in own),
        ttft_ms=_mean(phase.ttft_ms.mean for phase in own),
        tokens_per_s=_mean(phase.token_goodput_tps for phase in own) or 0.0,
        draft_len=sum(phase.mean_draft_len for phase in own) / len(own),
        ratio=None if is_ours or not ours or not theirs else paired(ours, theirs),
    )


def _mean(values: Iterator[float | None]) -> float | None:
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else None
