"""Runs: one policy under one load on one machine, and their results as JSON documents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from smartspec_py.core.cost import FAR_TOKENS
from smartspec_sim.capacity import Target, smallest
from smartspec_sim.hardware import Hardware
from smartspec_sim.latency import RequestTiming, Slo, summarise
from smartspec_sim.simulate import SimLimits, SimResult, Simulation
from smartspec_sim.workload import SimRequest, offered_rate

SAMPLE = 4
"""Replicas that `search` simulates at most. A larger fleet is represented by these, with their
share of the requests. This is on the safe side on average: with more replicas, one is idle more
often."""

GUESSED_LOAD = 0.7
"""`search` begins at the number of replicas that would be this busy with decoding."""

Progress = Callable[[float], object]
"""Called with the share that is done."""


@dataclass(frozen=True)
class Run:
    """requests: in order of arrival. machine: times of steps, which the planner knows."""

    requests: Sequence[SimRequest]
    policy: str
    machine: Hardware
    limits: SimLimits
    slo: Slo | None = None

    @property
    def server_limits(self) -> SimLimits:
        """The limits with the cache of the machine. Prompt chunks are not longer than the costs can
        be extrapolated."""
        cost = self.machine.cost
        measured = (cost.prompt or cost.target).tokens_per_row[-1]
        return replace(
            self.limits,
            prefill_chunk=min(self.limits.prefill_chunk, FAR_TOKENS * measured),
            target_bytes=self.machine.target_bytes,
            draft_bytes=self.machine.draft_bytes,
            cache_bytes=self.machine.cache_bytes,
        )

    def row(self, num_replicas: int = 1, progress: Progress = lambda share: None) -> dict[str, Any]:
        """The result of this many replicas."""
        return self._as_row(self.requests, num_replicas, num_replicas, progress)[0]

    def search(
        self, targets: Sequence[Target], progress: Progress = lambda share: None
    ) -> dict[str, Any]:
        """The result of the fewest replicas that meet the targets; without latencies if no number
        does."""
        rows: dict[int, dict[str, Any]] = {}

        def is_enough(number: int) -> bool:
            sample = min(number, SAMPLE)
            requests = _every(self.requests, sample / number)
            rows[number], timings = self._as_row(requests, number, sample)
            progress(1 - 0.8 ** len(rows))
            return bool(requests) and all(target.is_met(timings) for target in targets)

        number = smallest(is_enough, self._guess())
        found = {"policy": self.policy, "offered_rps": offered_rate(self.requests)}
        found |= rows.get(number or 0, {})
        texts = [str(target) for target in targets]
        return found | {"num_replicas": number, "targets": texts, "tried": sorted(rows)}

    def _guess(self) -> int:
        """From the rate of full batches of single tokens, with the mean lengths of the load."""
        num = max(1, len(self.requests))
        mean_output = sum(one.output_len for one in self.requests) / num
        mean_context = sum(one.context_len for one in self.requests) / num
        rows = self.limits.max_sequences
        step_s = self.machine.cost.target_s(rows, rows, mean_context)
        busy = offered_rate(self.requests) * mean_output * step_s / rows
        return math.ceil(busy / GUESSED_LOAD)

    def _as_row(
        self,
        requests: Sequence[SimRequest],
        num_replicas: int,
        sample: int,
        progress: Progress = lambda share: None,
    ) -> tuple[dict[str, Any], list[RequestTiming]]:
        """The result as a JSON document, and the timings. sample: number of simulated replicas."""
        limits = self.server_limits
        simulation = Simulation(
            requests, self.policy, self.machine.cost, limits, num_replicas=sample
        )
        result = simulation.run(lambda num_over: progress(num_over / len(requests)))
        row = {
            "policy": self.policy,
            "offered_rps": offered_rate(self.requests),
            "num_replicas": num_replicas,
            "simulated_replicas": sample,
            **summarise(result.timings, self.slo),
            **_speculated(result),
            "limits": asdict(limits),
            "errors": dict(Counter(one.error for one in result.timings if one.error)),
            "by_kind": self._by_kind(requests, result.timings),
        }
        return row, result.timings

    def _by_kind(
        self, requests: Sequence[SimRequest], timings: Sequence[RequestTiming]
    ) -> dict[str, Any]:
        """A summary per kind of request; empty if there is only one kind."""
        kinds: dict[str, list[RequestTiming]] = {}
        for request, timing in zip(requests, timings, strict=True):
            kinds.setdefault(request.acceptance_group, []).append(timing)
        found = {kind: summarise(those, self.slo) for kind, those in sorted(kinds.items())}
        return found if len(found) > 1 else {}


def _speculated(result: SimResult) -> dict[str, Any]:
    return {
        "mean_rows": result.mean_rows,
        "mean_draft_len": result.mean_draft_len,
        "mean_acceptance_len": result.mean_acceptance_len,
        "draft_lens": {str(k): n for k, n in sorted(result.draft_lens.items())},
        "num_steps": result.num_steps,
        "num_preemptions": result.num_preemptions,
        "target_busy": result.busy_s / result.elapsed_s if result.elapsed_s > 0 else 0.0,
    }


def _every(requests: Sequence[SimRequest], share: float) -> list[SimRequest]:
    """This share of the requests, at even distances."""
    return [
        request
        for number, request in enumerate(requests)
        if math.floor((number + 1) * share) > math.floor(number * share)
    ]
