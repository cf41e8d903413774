"""Ablation: what each mechanism of the controller contributes, by leaving it out.

The server's own loop and controller run in the simulator, once unchanged and once with one
mechanism patched away, on the same requests and texts. `ablation_loads` has the conditions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from smartspec_bench.progress import tracked
from smartspec_py.core.learn.acceptance import AcceptanceSettings, AcceptanceTracker
from smartspec_py.core.learn.corrections import CorrectionSettings, CostCorrections, predicted
from smartspec_py.core.learn.guard import Guard, GuardSettings, ProbeBudget
from smartspec_py.core.learn.regression import RidgeRegression
from smartspec_py.core.plan import ranking, search
from smartspec_py.core.plan import step as step_module
from smartspec_py.core.plan.plan_budget import PlanBudget
from smartspec_py.serving import speculation
from studies.ablation_loads import (
    COST,
    DRAFT,
    LOAD,
    SHORT_STEPS,
    STEADY,
    TEXTS,
    Condition,
    Measured,
    conditions,
)
from studies.document import publish, table

MIN_SEEDS, MAX_SEEDS = 2, 3
ENOUGH = 0.003
"""A ratio is exact enough with this standard error."""


@dataclass(frozen=True)
class Mechanism:
    """name: what is left out. groups: of conditions in which it is tried. changes: the arguments of
    `patch.object`."""

    name: str
    groups: Sequence[str]
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


def _flat_rates(self: Any, cohorts: Sequence[str], num_positions: int) -> Any:
    rates, trials = RATES(self, cohorts, num_positions)
    return np.broadcast_to(self._means(cohorts)[:, None], rates.shape), trials


def _with(learner: Any, settings: Any) -> tuple[Any, str, Any]:
    """Let a learner start with these settings, the last argument of its constructor."""
    *others, _ = learner.__init__.__defaults__
    return learner.__init__, "__defaults__", (*others, settings)


def _experts(*experts: tuple[float, float]) -> Sequence[tuple[Any, str, Any]]:
    return [_with(AcceptanceTracker, AcceptanceSettings(experts=experts))]


def _no_drafts(self: Any, name: str, request: Any, event: Any) -> tuple[int, int]:
    return 0, 0


def _only_profile(self: CostCorrections, step: Any) -> Any:
    return predicted(self._profile, step)


def _always(answer: Any) -> Any:
    return lambda self, *_: answer


def _believed(self: Any, error: float) -> tuple[float, float]:
    self._recent.append(error)
    self._median = sorted(self._recent)[len(self._recent) // 2]
    return error, 1.0


def _gaussian(self: RidgeRegression) -> Any:
    ridge = (self._settings.noise / self._sds) ** 2
    return self._evidence + np.diag(ridge)


def _uniform(step: Any) -> Any:
    scores = ranking.uniform_scores(step)
    return ranking.uniform(step, int(scores.argmax())), float(scores.max())


def _ranked(step: Any) -> Any:
    price = float(ranking.uniform_scores(step).max())
    return ranking.best_prefix(step, price)


def _first_ways(step: Any, price: float) -> Iterator[Any]:
    yield step.first_ways


def _without_catch_up(self: CostCorrections, batch_size: int) -> Any:
    return replace(CORRECTED(self, batch_size), catch_up_s=0.0)


RATES, CORRECTED = AcceptanceTracker._rates, CostCorrections._make_corrected
NO_GUARD = (Guard, "observe", _always(None))
NO_TAMING = (RidgeRegression, "_tamed", _believed)
NO_CHANGE = (RidgeRegression, "_has_changed", False)
ONE_FOR_ALL_ROWS = CorrectionSettings(rows_sds=(1e-6, 1e-6))

OF_TEXT, OF_COST, OF_PLAN = (STEADY, TEXTS), (COST, DRAFT), (STEADY, TEXTS, LOAD)
ALL = (STEADY, TEXTS, LOAD, COST, DRAFT, SHORT_STEPS)

MECHANISMS = (
    Mechanism("acceptance by position", OF_PLAN, [(AcceptanceTracker, "_rates", _flat_rates)]),
    Mechanism("estimates of each request", OF_PLAN, _experts((1e12, 0.98))),
    Mechanism("experts: the quick one alone", OF_TEXT, _experts((8.0, 0.85))),
    Mechanism("experts: without the quick one", OF_TEXT, _experts((8.0, 0.98), (64.0, 0.99))),
    Mechanism("experts: the last one alone", OF_TEXT, _experts((64.0, 0.99))),
    Mechanism("cohorts by workload", (TEXTS,), has_kinds=False),
    Mechanism(
        "hindsight of look-ups", (TEXTS,), [(speculation.Speculation, "_hindsight", _no_drafts)]
    ),
    Mechanism("cost corrections", (*OF_COST, LOAD), [(CostCorrections, "observe", _only_profile)]),
    Mechanism("corrections by rows", (*OF_COST, LOAD), [_with(CostCorrections, ONE_FOR_ALL_ROWS)]),
    Mechanism("host time of the last run", (COST,), has_host=False),
    Mechanism("forgetting at changes of cost", OF_COST, [NO_CHANGE]),
    Mechanism("stall filter of costs", OF_COST, [NO_TAMING]),
    Mechanism("both of the last two", OF_COST, [NO_TAMING, NO_CHANGE]),
    Mechanism("heavy tails of the ridge", OF_COST, [(RidgeRegression, "_matrix", _gaussian)]),
    Mechanism("guard", ALL, [NO_GUARD]),
    Mechanism(
        "stall filter of the guard",
        (*OF_COST, TEXTS),
        [_with(Guard, GuardSettings(long_step=1e9))],
    ),
    Mechanism("both stall filters, and the guard", OF_COST, [NO_GUARD, NO_TAMING]),
    Mechanism("probes", (*OF_COST, TEXTS), [(ProbeBudget, "allows", _always(False))]),
    Mechanism("probes with drafts", OF_COST, [(CostCorrections, "wants_drafts", _always(False))]),
    Mechanism("probes without drafts", OF_COST, [(Guard, "wants_reference", _always(False))]),
    Mechanism("budget of probes", OF_COST, [(ProbeBudget, "allows", _always(True))]),
    Mechanism(
        "plan budget",
        (STEADY, DRAFT, SHORT_STEPS),
        [(PlanBudget, "allows", _always(True))],
    ),
    Mechanism("price of prompts", (STEADY, LOAD), [(step_module, "PREFILLING_TOKENS", 0.0)]),
    Mechanism(
        "rates of their own", OF_PLAN, [(search, "_weighed", lambda step, alike, seconds: step)]
    ),
    Mechanism(
        "charge for catching up", OF_PLAN, [(CostCorrections, "_make_corrected", _without_catch_up)]
    ),
    Mechanism("catching up spread over steps", OF_PLAN, [(step_module, "TOKENS_A_STEP", 1e9)]),
    Mechanism("best uniform length", (STEADY, TEXTS), [(search, "_of_one_way", _ranked)]),
    Mechanism("ranked slots", OF_PLAN, [(search, "_of_one_way", _uniform)]),
    Mechanism("choice among three ways to draft", (TEXTS,), [(search, "_selections", _first_ways)]),
    Mechanism("a length for each (goodput_global)", OF_PLAN, policy="goodput_global"),
    Mechanism("speculation (none)", ALL, policy="none"),
)

BASE = Mechanism("", ALL)
MEASURES = [field.name for field in fields(Measured)]
Found = Mapping[str, Any]


def ratios(mechanism: Mechanism, condition: Condition, base: dict[int, Measured]) -> Found:
    """For each measure the ratio of without to with: geometric mean over seeds, and its standard
    error. base: results with everything, by seed; missing seeds are added."""
    logs: list[list[float]] = []
    for seed in range(1, MAX_SEEDS + 1):
        if seed not in base:
            base[seed] = BASE.run(condition, seed)
        other = mechanism.run(condition, seed)
        pairs = [(getattr(other, name), getattr(base[seed], name)) for name in MEASURES]
        logs.append([float(np.log(ours / theirs)) for ours, theirs in pairs])
        if len(logs) >= MIN_SEEDS and _errors(logs)[: 2 if condition.is_open else 1].max() < ENOUGH:
            break
    means = np.exp(np.mean(logs, axis=0))
    found = {
        name: [round(float(mean), 5), round(float(error), 5)]
        for name, mean, error in zip(MEASURES, means, _errors(logs), strict=True)
    }
    return {"mechanism": mechanism.name, "condition": condition.label, "seeds": len(logs)} | {
        name: found[name] for name in (MEASURES if condition.is_open else MEASURES[:1])
    }


def _errors(logs: Sequence[Sequence[float]]) -> Any:
    return np.std(logs, axis=0, ddof=1) / np.sqrt(len(logs))


def of_condition(index: int) -> list[Found]:
    """All mechanisms that are tried in the condition's group."""
    condition = conditions()[index]
    base: dict[int, Measured] = {}
    return [ratios(m, condition, base) for m in MECHANISMS if condition.group in m.groups]


def main() -> None:
    """argv: the folder to write to."""
    num = len(conditions())
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        every = tracked("ablation", pool.map(of_condition, range(num)), "conditions", num)
        found = [cell for cells in every for cell in cells]
    write(Path(sys.argv[1]), found)


def write(folder: Path, found: Sequence[Found]) -> None:
    header = ("left out", "mean", "lowest", "highest", "latency")
    rows = [_summary(found, mechanism) for mechanism in MECHANISMS]
    sections = [VERDICT, table(header, rows), NOTES]
    publish(folder, "ablation", "What each mechanism brings", sections, {"cells": list(found)})


VERDICT = """\
What does each mechanism of the controller contribute? Most bring more than 1 % in some condition
and nothing in most. Two brought less than 1 % everywhere and were removed after this run: kinds by
prompt prefix, and the guard's own filter of stalls. Four bring little here and were kept:

- acceptance by position, and the experts beside the first: on recorded drafts of the shipped pair
  they predict up to 1 % better, and drafts of heads get worse with each position,
- the host time of the last run: the table of `batch_table` is made with it,
- the best uniform length: with it, no uniform length is better than the plan.

The table shows tokens per second without the mechanism divided by tokens per second with it: above
1, the controller does better without. *Latency* is the same ratio of mean latencies under open
loads: below 1, it does better without."""


NOTES = f"""\
The server's own loop and controller ran in the simulator, on the same requests and texts with and
without the mechanism. Values are geometric means over {MIN_SEEDS} seeds, or {MAX_SEEDS} where the
standard error of two is above {ENOUGH:.1%}. The 88 M pair on a CPU by its profile, unless a
condition says otherwise. *H100*: an 8B with an EAGLE head, by a published fit. *H200*: an 8B with
a 1B, by a roofline. A draft is right with a probability that differs between requests. Planning
time is charged in the conditions with steps of 8 ms only, with 2 ms per plan. The JSON file has
every condition, with seeds, errors and times to first token."""


def _summary(found: Sequence[Found], mechanism: Mechanism) -> list[object]:
    cells = [cell for cell in found if cell["mechanism"] == mechanism.name]
    ordered = sorted(cells, key=lambda cell: cell["tokens_per_s"][0])
    mean = float(np.exp(np.mean([np.log(cell["tokens_per_s"][0]) for cell in cells])))
    latencies = [cell["latency_s"][0] for cell in cells if "latency_s" in cell]
    worst, best = ordered[0], ordered[-1]
    return [
        mechanism.name,
        mean,
        *(f"{one['tokens_per_s'][0]:.3f} ({one['condition']})" for one in (worst, best)),
        f"{min(latencies):.3f} to {max(latencies):.3f}" if latencies else "",
    ]


if __name__ == "__main__":
    main()
