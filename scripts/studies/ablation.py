"""Ablation: what each mechanism of the controller brings, by leaving it out.

The server's own loop and controller run in the simulator, once as they are and once with one thing
patched away, on the same requests and texts. See `ablation_loads` for what they are tried on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np

from smartspec_py.core import acceptance, corrections, guard, plan_budget, regression, request_counts, search
from smartspec_py.core.corrections import CostCorrections, predicted
from smartspec_py.serving import batcher, controller, drafters
from studies.ablation_loads import Condition, Measured, conditions, seeds
from studies.document import publish, table

MIN_SEEDS, MAX_SEEDS = 2, 2
ENOUGH = 0.003
"""Standard error of a ratio that is small enough."""


@dataclass(frozen=True)
class Mechanism:
    """name: what is left out. changes: the arguments of `patch.object`."""

    name: str
    changes: Sequence[tuple[Any, str, Any]] = ()
    policy: str = "goodput"
    has_kinds: bool = True
    has_host: bool = True

    def run(self, condition: Condition, seed: int) -> Measured:
        with ExitStack() as stack:
            for target, attribute, new in self.changes:
                stack.enter_context(patch.object(target, attribute, new))
            return condition.run(
                seed, self.policy, has_kinds=self.has_kinds, has_host=self.has_host
            )


def _flat_profile(self: Any, mean: float) -> Any:
    odds = acceptance._odds(np.full(acceptance.MAX_POSITIONS, mean))
    return odds, float(odds[0])


def _fixed_trust(slope: float) -> Any:
    def observe(self: Any, *_: Any) -> None:
        self.slope = slope

    return observe


def _only_profile(self: CostCorrections, step: Any) -> Any:
    return predicted(self._profile, step)


def _always(answer: Any) -> Any:
    return lambda self, *_: answer


def _believed(self: Any, error: float) -> tuple[float, float]:
    self._recent.append(error)
    self._median = sorted(self._recent)[regression.RECENT // 2]
    return error, 1.0


PLAN, PREFILLS, DEPTHS = controller.Controller.plan, batcher.Batcher.prefills, search._selections


def _undelayed(self: Any, views: Any, num_delayed: int = 0, num_background: int = 0) -> Any:
    return PLAN(self, views, 0, num_background)


def _one_a_row(self: Any, tokens_per_row: float = 1.0, num_decode_tokens: int = 0) -> Any:
    return PREFILLS(self, 1.0, num_decode_tokens)


def _uniform_start(step: Any, objective: Any) -> Any:
    scores = search.uniform_scores(step, objective)
    return search.outcome(step, objective, search.uniform(step, int(scores.argmax())))


def _ranked_start(step: Any, objective: Any) -> Any:
    price = objective.price_at(float(search.uniform_scores(step, objective).max()))
    return search.outcome(step, objective, search.best_prefix(step, objective, price)[0])


def _first_ways(step: Any, price: float) -> Iterator[Any]:
    yield step.first_ways


def _always_probes(self: Any) -> bool:
    return True


ACCEPT, GUARD, BUDGET = acceptance._Kind, guard.Guard, guard.ProbeBudget
TRUST, FIT = acceptance._Trust, regression.RidgeRegression
SAME = _always(None)
NO_PROBES = (BUDGET, "allows", _always(False))
NO_GUARD = (
    (GUARD, "observe", _always(None)),
    (GUARD, "wants_reference", _always(False)),
)

MECHANISMS = (
    Mechanism("acceptance by position", [(ACCEPT, "shared_profile", _flat_profile)]),
    Mechanism("trust: always 1", [(TRUST, "observe", _fixed_trust(1.0))]),
    Mechanism("trust: always 0.5", [(TRUST, "observe", _fixed_trust(0.5))]),
    Mechanism("estimates of each request", [(TRUST, "observe", _fixed_trust(0.0))]),
    Mechanism("change detection (CUSUM)", [(request_counts, "ALARM", 1e9)]),
    Mechanism("kinds by prompt prefix", has_kinds=False),
    Mechanism(
        "learned spread of requests",
        [(ACCEPT, "weight_of_mean", lambda self, mean: self.prior_trials)],
    ),
    Mechanism(
        "learned spread, 32 for look-ups as well",
        [(ACCEPT, "weight_of_mean", lambda self, mean: acceptance.PRIOR_TRIALS)],
    ),
    Mechanism("hindsight of look-ups", [(drafters.Drafters, "_hindsight", _always((0, 0)))]),
    Mechanism("cost corrections", [(CostCorrections, "observe", _only_profile)]),
    Mechanism("corrections by rows", [(corrections, "ROWS_SDS", (1e-6, 1e-6))]),
    Mechanism("host time of the last run", has_host=False),
    Mechanism("forgetting at changes of cost", [(FIT, "_has_changed", False)]),
    Mechanism("stall filter of costs", [(FIT, "_tamed", _believed)]),
    Mechanism("heavy tails of the ridge", [(regression, "TAIL", 1e12)]),
    Mechanism("guard", NO_GUARD),
    Mechanism("stall filter of the guard", [(guard._StallFilter, "put", lambda self, step: step)]),
    Mechanism("guard and stall filter of costs", [*NO_GUARD, (FIT, "_tamed", _believed)]),
    Mechanism("probes", [NO_PROBES]),
    Mechanism("probes for costs", [(CostCorrections, "wants_contrast", _always(False))]),
    Mechanism("probes of the guard", [(GUARD, "wants_reference", _always(False))]),
    Mechanism("budget of probes", [(BUDGET, "allows", _always(True))]),
    Mechanism("plan budget", [(plan_budget.PlanBudget, "allows", _always(True))]),
    Mechanism("price of waiting prompts", [(controller.Controller, "plan", _undelayed)]),
    Mechanism("prompt budget by expected tokens", [(batcher.Batcher, "prefills", _one_a_row)]),
    Mechanism("changes of single sequences", [(search, "improved", lambda s, o, start: start)]),
    Mechanism(
        "changes, and uniform start",
        [(search, "improved", lambda s, o, start: start), (search, "_start", _ranked_start)],
    ),
    Mechanism("ranked start", [(search, "_start", _uniform_start)]),
    Mechanism("choice of ways in the start", [(search, "_selections", _first_ways)]),
    Mechanism("lengths of their own (goodput_global)", policy="goodput_global"),
    Mechanism("(no speculation)", policy="none"),
)

BASE = Mechanism("")
MEASURES = [field.name for field in fields(Measured)]


class Runs:
    def __init__(self) -> None:
        self._base: dict[tuple[str, int], Measured] = {}
        numbers = seeds()
        self._seeds = [next(numbers) for _ in range(MAX_SEEDS)]

    def ratios(self, mechanism: Mechanism, condition: Condition) -> dict[str, Any]:
        """By measure, of without to with: mean, and its standard error."""
        logs: list[list[float]] = []
        for seed in self._seeds:
            key = condition.name, seed
            if key not in self._base:
                self._base[key] = BASE.run(condition, seed)
            base, other = self._base[key], mechanism.run(condition, seed)
            logs.append([float(np.log(getattr(other, m) / getattr(base, m))) for m in MEASURES])
            if len(logs) >= MIN_SEEDS and _is_enough(logs, condition):
                break
        found = np.array(logs)
        errors = found.std(axis=0, ddof=1) / np.sqrt(len(found))
        return {
            m: [float(np.exp(mean)), float(error)]
            for m, mean, error in zip(MEASURES, found.mean(axis=0), errors, strict=True)
        } | {"seeds": len(found)}


def _is_enough(logs: Sequence[Sequence[float]], condition: Condition) -> bool:
    found = np.array(logs)[:, : 2 if condition.is_open else 1]
    return bool((found.std(axis=0, ddof=1) / np.sqrt(len(found)) < ENOUGH).all())


def main() -> None:
    started = perf_counter()
    runs, every = Runs(), conditions()
    wanted = sys.argv[2:]
    for mechanism in MECHANISMS:
        if wanted and not any(w in mechanism.name for w in wanted):
            continue
        print(f"## {mechanism.name}")
        for condition in every:
            found = runs.ratios(mechanism, condition)
            shown = MEASURES if condition.is_open else MEASURES[:1]
            cells = " ".join(f"{m}={found[m][0]:.4f}±{found[m][1]:.4f}" for m in shown)
            print(f"{condition.name:32s} {found['seeds']} {cells} [{perf_counter()-started:.0f}s]", flush=True)


if __name__ == "__main__":
    main()
