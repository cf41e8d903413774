"""What does each part of the controller bring? The simulator with one part left out at a time.

Both runs of a pair have the same requests and texts. The server's own loop and controller run on a
virtual clock, so results do not depend on the machine. `python -m smartspec_bench.ablation` prints
tokens per second without the part, divided by tokens per second with it: below 1, it helps.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import numpy as np

from smartspec_py.config import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn.acceptance import AcceptanceSettings, AcceptanceTracker
from smartspec_py.core.learn.corrections import CostCorrections, predicted
from smartspec_py.core.learn.guard import Guard, ProbeBudget
from smartspec_py.core.plan import search
from smartspec_sim.acceptance import runs_of
from smartspec_sim.hardware import published
from smartspec_sim.simulate import SimLimits, Simulation
from smartspec_sim.workload import (
    KindSpec,
    LengthSpec,
    PhaseSpec,
    SimRequest,
    WorkloadSpec,
    draw,
)

NUM_SEEDS = 2
ROWS = 32
CHAT = KindSpec(
    name="",
    prompt=LengthSpec(mean=120, sd=60, most=400),
    output=LengthSpec(mean=120, sd=60, most=400),
    accept=0.67,
    accept_sd=0.1,
)

CPU = CostModel(
    target=PassTable((1, 8, 32), (1, 8), ((0.020, 0.030), (0.035, 0.120), (0.090, 0.420))),
    draft=PassTable((1, 8, 32), (1,), ((0.002,), (0.003,), (0.006,))),
)
"""An 88 M target and a 4 M draft on two cores, rounded; seconds by rows and tokens per row."""

H100 = published().cost

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mechanism:
    """A part of the controller. patches: arguments of `patch.object` that leave it out, or a policy
    that does not have it."""

    name: str
    patches: Sequence[Patch] = ()
    policy: str = "goodput"


@dataclass(frozen=True)
class Condition:
    """requests: by seed. cost: of steps. believed: the planner's cost model at the start, if it
    differs."""

    name: str
    requests: Callable[[int], Sequence[SimRequest]]
    cost: CostModel
    batch_size: int
    believed: CostModel | None = None

    def tokens_per_s(self, mechanism: Mechanism, seed: int) -> float:
        """Generated tokens over the time until the last request begins to decode: the end of a run
        depends on the lengths of the last requests."""
        limits = SimLimits(max_sequences=self.batch_size)
        with ExitStack() as stack:
            for target, attribute, new in mechanism.patches:
                stack.enter_context(patch.object(target, attribute, new))
            simulation = Simulation(
                self.requests(seed), mechanism.policy, self.cost, limits, believed=self.believed
            )
            timings = simulation.run().timings
        end_s = max(one.first_s or 0.0 for one in timings)
        num_tokens = 0.0
        for one in timings:
            assert one.first_s is not None, "a request was not served"
            assert one.last_s is not None, "a request was not served"
            share = (end_s - one.first_s) / max(one.last_s - one.first_s, 1e-9)
            num_tokens += one.num_tokens * min(1.0, max(0.0, share))
        return num_tokens / end_s


def _experts(*experts: tuple[float, float]) -> list[Patch]:
    """Acceptance estimates with these weights and decay factors only."""
    *others, _ = AcceptanceTracker.__init__.__defaults__ or (None,)
    changed = (*others, replace(AcceptanceSettings(), experts=experts))
    return [(AcceptanceTracker.__init__, "__defaults__", changed)]


def _profile_only(self: CostCorrections, step: Any) -> Any:
    return predicted(self._profile, step)


def _nothing(self: Any, *_: Any) -> None:
    return None


def _never(self: Any) -> bool:
    return False


SELECTIONS = search._selections
QUICK, SLOW = AcceptanceSettings().experts[0], AcceptanceSettings().experts[-1]

MECHANISMS = (
    Mechanism("cost corrections", [(CostCorrections, "observe", _profile_only)]),
    Mechanism("estimates of each request", _experts((1e12, 0.98))),
    Mechanism("the quick estimate", _experts(SLOW)),
    Mechanism("the slow estimate", _experts(QUICK)),
    Mechanism(
        "choice among proposers",
        [(search, "_selections", lambda *args: islice(SELECTIONS(*args), 1))],
    ),
    Mechanism("probes", [(ProbeBudget, "allows", _never)]),
    Mechanism("guard", [(Guard, "observe", _nothing)]),
    Mechanism("a length for each request", policy="goodput_global"),
    Mechanism("speculation", policy="none"),
)
"""The plan budget is not here: planning takes no time on the virtual clock."""

BASE = Mechanism("")


def conditions() -> list[Condition]:
    slow_draft = replace(CPU, draft=_scaled(CPU.draft, 4.0))
    slow_target = replace(CPU, target=_scaled(CPU.target, 2.0))
    bad: dict[str, Any] = {"accept": 0.1, "accept_sd": 0.05}
    return [
        Condition("1 request", partial(_waiting, 15), CPU, 1),
        Condition("8 requests", partial(_waiting, 60), CPU, 8),
        Condition("32 requests", partial(_waiting, 150), CPU, ROWS),
        Condition("32 requests, H100", partial(_waiting, 150), H100, ROWS),
        Condition("mixed texts, 8", _mixed, CPU, 8),
        Condition("texts that change, 8", _changing, CPU, 8),
        Condition("lookup in half of the texts, 8", _with_lookup, CPU, 8),
        Condition("changing load", _arriving, CPU, ROWS),
        Condition("useless draft, 8", partial(_waiting, 50, **bad), CPU, 8),
        Condition("draft takes 4 times the profile, 8", partial(_waiting, 60), slow_draft, 8, CPU),
        Condition("target takes twice the profile, 8", partial(_waiting, 60), slow_target, 8, CPU),
    ]


def _scaled(table: PassTable | None, factor: float) -> PassTable:
    assert table is not None
    return replace(table, seconds=tuple(tuple(factor * s for s in line) for line in table.seconds))


def _waiting(num: int, seed: int, **changes: Any) -> list[SimRequest]:
    """All requests are there from the start."""
    kind = CHAT.model_copy(update=changes)
    return [kind.draw(n, 0.0, np.random.default_rng([seed, n])) for n in range(1, num + 1)]


def _mixed(seed: int) -> list[SimRequest]:
    """Half of the requests have a high acceptance, half a low one."""
    good, bad = (_waiting(60, seed, accept=a, accept_sd=0.05) for a in (0.9, 0.3))
    is_good = np.random.default_rng(seed).random(len(good)) < 0.5
    return [a if first else b for a, b, first in zip(good, bad, is_good, strict=True)]


def _changing(seed: int) -> list[SimRequest]:
    """The acceptance of each text changes between 0.9 and 0.2 every 60 tokens."""
    found = []
    for request in _waiting(40, seed):
        rng = np.random.default_rng([seed, request.sequence, 1])
        offset = int(rng.integers(2))
        accept = [(0.9, 0.2)[(i // 60 + offset) % 2] for i in range(300)]
        runs = runs_of((rng.random(300) < np.array(accept)).tolist())
        found.append(replace(request, output_len=300, runs={DRAFT_MODEL: runs}))
    return found


def _with_lookup(seed: int) -> list[SimRequest]:
    """Lookup finds drafts for half of the tokens. They are right in half of the texts."""
    found = []
    for request in _waiting(60, seed):
        rng = np.random.default_rng([seed, request.sequence, 2])
        share = 0.5 if rng.integers(2) else 0.03
        runs = runs_of((rng.random(request.output_len) < share**0.2).tolist())
        found.append(replace(request, runs={**request.runs, PROMPT_LOOKUP: runs}))
    return found


def _arriving(seed: int) -> list[SimRequest]:
    """Poisson arrivals, alternately at a third and at 1.5 times of about 2.5 requests per second,
    which saturates the server without speculation."""
    phases = tuple(PhaseSpec(duration_s=15.0, rate=2.5 * share) for share in (0.3, 1.5, 0.3, 1.5))
    return draw(WorkloadSpec(kinds=(CHAT,), phases=phases, seed=seed))


def ratios(index: int) -> list[float]:
    """For each mechanism, the ratio in a condition: geometric mean over the seeds."""
    condition = conditions()[index]
    seeds = range(1, NUM_SEEDS + 1)
    base = [condition.tokens_per_s(BASE, seed) for seed in seeds]
    found = []
    for mechanism in MECHANISMS:
        other = [condition.tokens_per_s(mechanism, seed) for seed in seeds]
        logs = [math.log(a / b) for a, b in zip(other, base, strict=True)]
        found.append(math.exp(sum(logs) / len(logs)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = [condition.name for condition in conditions()]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        columns = []
        for name, column in zip(names, pool.map(ratios, range(len(names))), strict=True):
            print(name, file=sys.stderr, flush=True)
            columns.append(column)
    print("| left out | mean | lowest | highest |\n|---|---|---|---|")
    for row, mechanism in enumerate(MECHANISMS):
        cells = sorted((column[row], name) for column, name in zip(columns, names, strict=True))
        mean = math.exp(sum(math.log(value) for value, _ in cells) / len(cells))
        low, high = (f"{value:.3f} ({name})" for value, name in (cells[0], cells[-1]))
        print(f"| {mechanism.name} | {mean:.3f} | {low} | {high} |")


if __name__ == "__main__":
    main()
