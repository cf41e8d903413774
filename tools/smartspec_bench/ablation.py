"""What does each part of the controller bring? The simulator with one part left out at a time.

Both runs of a pair have the same requests and texts. The server's own loop and controller run on a
virtual clock, so results do not depend on the machine. `python -m smartspec_bench.ablation` prints
tokens per second without the part, divided by tokens per second with it: below 1, it helps.
"""

from __future__ import annotations

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

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn import acceptance
from smartspec_py.core.learn.corrections import CostCorrections
from smartspec_py.core.learn.guard import Guard, ProbeBudget
from smartspec_py.core.plan import search
from smartspec_py.defaults import DRAFT_MODEL, PROMPT_LOOKUP
from smartspec_sim.acceptance import runs_of
from smartspec_sim.simulate import SimLimits, Simulation
from smartspec_sim.workload import (
    KindSpec,
    LengthSpec,
    PhaseSpec,
    SimRequest,
    WorkloadSpec,
    draw,
)

SEEDS = (1, 2)
LENGTHS = LengthSpec(mean=120, sd=60, most=400)
CHAT = KindSpec(name="", prompt=LENGTHS, output=LENGTHS, accept=0.67, accept_sd=0.1)

TARGET = PassTable((1, 8, 32), (1, 8), ((0.020, 0.030), (0.035, 0.120), (0.090, 0.420)))
DRAFT = PassTable((1, 8, 32), (1,), ((0.002,), (0.003,), (0.006,)))
CPU = CostModel(target=TARGET, draft=DRAFT)
"""An 88 M target and a 4 M draft on two cores, rounded; seconds by rows and tokens per row."""

SLOW = replace(CPU, target=replace(TARGET, seconds=((0.04, 0.06), (0.07, 0.24), (0.18, 0.84))))
"""The target takes twice as long."""


@dataclass(frozen=True)
class Condition:
    """requests: by seed. cost: of steps; the planner's cost model at the start is `CPU`."""

    name: str
    requests: Callable[[int], Sequence[SimRequest]]
    batch_size: int = 8
    cost: CostModel = CPU

    def tokens_per_s(
        self, seed: int, patches: Sequence[Any] = (), policy: str = "goodput"
    ) -> float:
        """Generated tokens over the time until the last request begins to decode: the end of a run
        depends on the lengths of the last requests."""
        limits = SimLimits(max_sequences=self.batch_size)
        with ExitStack() as stack:
            for change in patches:
                stack.enter_context(patch.object(*change))
            requests = self.requests(seed)
            simulation = Simulation(requests, policy, self.cost, limits, believed=CPU)
            timings = simulation.run().timings
        end_s = max(one.first_s or 0.0 for one in timings)
        num_tokens = 0.0
        for one in timings:
            assert one.first_s is not None, "a request was not served"
            assert one.last_s is not None, "a request was not served"
            share = (end_s - one.first_s) / max(one.last_s - one.first_s, 1e-9)
            num_tokens += one.num_tokens * min(1.0, max(0.0, share))
        return num_tokens / end_s


def _nothing(self: Any, *_: Any) -> None:
    return None


SELECTIONS = search._selections
FIRST_SELECTION = (search, "_selections", lambda *args: islice(SELECTIONS(*args), 1))
QUICK, LONG_TERM = acceptance.EXPERTS

PARTS: dict[str, dict[str, Any]] = {
    "cost corrections": {"patches": [(CostCorrections, "observe", _nothing)]},
    "estimates of each request": {"patches": [(acceptance, "EXPERTS", ((1e12, 0.98),))]},
    "the quick estimate": {"patches": [(acceptance, "EXPERTS", (LONG_TERM,))]},
    "the slow estimate": {"patches": [(acceptance, "EXPERTS", (QUICK,))]},
    "choice among proposers": {"patches": [FIRST_SELECTION]},
    "probes": {"patches": [(ProbeBudget, "allows", lambda self: False)]},
    "guard": {"patches": [(Guard, "observe", _nothing)]},
    "a length for each request": {"policy": "goodput_global"},
    "speculation": {"policy": "none"},
}
"""What leaves a part out: patches, as arguments of `patch.object`, or a policy without it. The plan
budget is not here: planning takes no time on the virtual clock."""


def conditions() -> list[Condition]:
    useless = partial(_waiting, 50, accept=0.1, accept_sd=0.05)
    return [
        Condition("1 request", partial(_waiting, 15), 1),
        Condition("8 requests", partial(_waiting, 60)),
        Condition("32 requests", partial(_waiting, 150), 32),
        Condition("mixed texts, 8", _mixed),
        Condition("texts that change, 8", _changing),
        Condition("lookup in half of the texts, 8", _with_lookup),
        Condition("changing load", _arriving, 32),
        Condition("useless draft, 8", useless),
        Condition("target takes twice the profile, 8", partial(_waiting, 60), cost=SLOW),
    ]


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
    """For each part, the ratio in a condition: geometric mean over the seeds."""
    condition = conditions()[index]
    base = [condition.tokens_per_s(seed) for seed in SEEDS]
    found = []
    for change in PARTS.values():
        other = [condition.tokens_per_s(seed, **change) for seed in SEEDS]
        logs = [math.log(a / b) for a, b in zip(other, base, strict=True)]
        found.append(math.exp(sum(logs) / len(logs)))
    return found


def main() -> None:
    names = [condition.name for condition in conditions()]
    columns = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for name, column in zip(names, pool.map(ratios, range(len(names))), strict=True):
            print(name, file=sys.stderr, flush=True)
            columns.append(column)
    print("| left out | mean | lowest | highest |\n|---|---|---|---|")
    for row, part in enumerate(PARTS):
        cells = sorted((column[row], name) for column, name in zip(columns, names, strict=True))
        mean = math.exp(sum(math.log(value) for value, _ in cells) / len(cells))
        low, high = (f"{value:.3f} ({name})" for value, name in (cells[0], cells[-1]))
        print(f"| {part} | {mean:.3f} | {low} | {high} |")


if __name__ == "__main__":
    main()
