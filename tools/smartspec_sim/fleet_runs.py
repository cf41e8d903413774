"""Runs of fleets: a given number of replicas, or the smallest number that meets latency targets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from smartspec_sim.capacity import SAMPLE, Target, Verdict, smallest
from smartspec_sim.fleet import FleetSimulation, FleetSpec
from smartspec_sim.scenario import Load, Run, as_row
from smartspec_sim.workload import SimRequest, offered_rate

GUESSED_LOAD = 0.7
"""The search begins at the number of replicas that would be this busy with decoding."""


@dataclass(frozen=True)
class FleetRun(Run):
    """One policy under one scenario on a fleet.

    targets: if given, `fleet.num_replicas` is not used, and the row is that of the smallest fleet
    that meets all of them. guess: where the search begins; 0 is an estimate from the costs.
    """

    fleet: FleetSpec = field(default_factory=FleetSpec)
    targets: tuple[Target, ...] = ()
    guess: int = 0

    @classmethod
    def of(cls, run: Run, fleet: FleetSpec, targets: tuple[Target, ...] = ()) -> FleetRun:
        """Raises ValueError if the route does not suit the load."""
        if fleet.route == "prefix" and not any(map(has_prefix, run.scenario.load.requests())):
            raise ValueError(
                "--route: got 'prefix', but no request has a shared prefix; set prefix_len of a "
                "kind in --workload"
            )
        return cls(
            run.scenario, run.policy, run.cost, run.limits, run.slo, run.changes, fleet, targets
        )

    def row(self, progress: Callable[[float], None] = lambda share: None) -> dict[str, Any]:
        """progress: called with the share that is done; of a search, it is estimated."""
        if self.targets:
            return self._search(progress)
        number = self.fleet.num_replicas
        row = self._row(number, number, progress)
        assert row is not None, "it gives up only to meet a target"
        return row

    def _search(self, progress: Callable[[float], None]) -> dict[str, Any]:
        """The row of the smallest fleet that meets the targets. Without one, the row has no
        latencies."""
        rows: dict[int, dict[str, Any] | None] = {}

        def is_enough(number: int) -> bool:
            sample = number if self.fleet.is_disturbed else min(number, SAMPLE)
            rows[number] = self._row(number, sample)
            progress(1 - 0.8 ** len(rows))
            return rows[number] is not None

        number = smallest(is_enough, self.guess or self._guess())
        found = rows.get(number or 0) or {
            "scenario": self.scenario.label,
            "policy": self.policy,
            "offered_rps": rate_of(self.scenario.load),
            "route": self.fleet.route,
        }
        targets = [str(target) for target in self.targets]
        return found | {"num_replicas": number, "targets": targets, "tried": sorted(rows)}

    def _row(
        self, num_replicas: int, sample: int, progress: Callable[[float], None] = lambda share: None
    ) -> dict[str, Any] | None:
        """The row of this many replicas, or None if they miss a target.

        sample: the number that is simulated. A load without requests meets no target: it shows
        nothing.
        """
        requests = self.scenario.load.faster(sample / num_replicas).requests()
        verdict = Verdict(() if self.fleet.is_disturbed else self.targets, len(requests))
        result = FleetSimulation(
            requests,
            self.policy,
            self.cost,
            self.limits,
            replace(self.fleet, num_replicas=sample),
            changes=self.changes,
        ).run(lambda num_over: progress(num_over / max(1, len(requests))), verdict.is_missed)
        is_met = result is not None and all(one.is_met(result.timings) for one in self.targets)
        if result is None or not (is_met and requests):
            return None
        rate = offered_rate(requests) * num_replicas / sample
        row = as_row(result, self.scenario.label, self.limits, rate, self.slo)
        return row | {
            "num_replicas": num_replicas,
            "simulated_replicas": sample,
            "route": self.fleet.route,
            "errors": dict(Counter(one.error for one in result.timings if one.error)),
        }

    def _guess(self) -> int:
        """From the rate of full batches of single tokens, with the mean lengths of the load."""
        rate = rate_of(self.scenario.load)
        requests = self.scenario.load.faster(min(1.0, 10 / rate)).requests()
        if not requests:
            return 1
        mean_output = sum(one.output_len for one in requests) / len(requests)
        mean_context = sum(one.context_len for one in requests) / len(requests)
        rows = self.limits.max_sequences
        step_s = self.cost.target_s(rows, rows, mean_context)
        return math.ceil(rate * mean_output * step_s / rows / GUESSED_LOAD)


def has_prefix(request: SimRequest) -> bool:
    return request.prefix is not None


def rate_of(load: Load) -> float:
    """Mean requests per second."""
    if load.spec is None:
        return offered_rate(load.record)
    phases = [phase.rates for phase in load.spec.phases]
    return sum(one.num_expected for one in phases) / sum(one.duration_s for one in phases)
