"""Adaptation: costs change during the run, so that another draft length becomes the best.

The server's own loop runs in the simulator, with as many long requests as rows, so that the number
of rows is constant and no prompt is read beside decoding. After some steps the cost of passes
changes, unknown to the controller. Three are compared: the usual controller, one whose cost
corrections never learn, and the latter with the guard.

Regret is 1 - seconds of the best fixed k / seconds, both for the same number of tokens of the same
texts. Whether a draft is right depends on the text only, so the steps of a fixed k can be computed
from the state at the change. The best fixed k is the fastest over the whole time after the change.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smartspec_bench.progress import tracked
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn.corrections import CostCorrections, Predicted, predicted
from smartspec_py.core.learn.guard import Guard, ProbeBudget
from smartspec_py.core.types import MeasuredStep, SequenceId
from smartspec_py.engines.base import SHORT_LAG
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.controller import Controller
from smartspec_py.serving.profile import load_cost
from smartspec_py.serving.step import Reason, StepRecord
from smartspec_sim.acceptance import DraftRuns, draw_runs
from smartspec_sim.hardware import Hardware, check_fits, gpu_hardware
from smartspec_sim.scenario import Deviation
from smartspec_sim.simulate import CostChange, SimLimits, Simulation
from smartspec_sim.workload import SimRequest, only
from studies.document import publish, table

Floats = NDArray[np.float64]

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "traces" / "profile-88m.json"

MAX_DRAFT_LEN = 7
PROMPT_LEN, CONTEXT_LEN = 64, 300
BEFORE, AFTER, WINDOW = 150, 400, 50
"""Steps before the change, about; after it; and of a stretch of which the regret is told."""

NUM_SEEDS = 5
NOISE, STALL_SHARE, STALL = 0.05, 0.01, 20.0
ASKED, ASKED_STEPS = 0.03, 200
FROZEN_ASKED = 0.05

FROZEN, FROZEN_GUARD, OURS, OURS_NOISY = "frozen", "frozen, guard", "ours", "ours, noise"
ARMS = (FROZEN, FROZEN_GUARD, OURS, OURS_NOISY)


@dataclass(frozen=True)
class Setting:
    """What is served on which hardware, and what changes. models: GPU, their number, target and
    draft. None is the measured profile of this project's 88 M pair."""

    change: str
    deviation: Deviation
    models: tuple[str, int, str, str] | None
    batch_size: int
    accept_prob: float

    @property
    def label(self) -> str:
        if self.models is None:
            return f"88 M + 4 M, CPU, {self.batch_size} rows, a = {self.accept_prob}"
        gpu, _, target, draft = self.models
        return f"{target} + {draft}, {gpu}, {self.batch_size} rows, a = {self.accept_prob}"

    @property
    def cost(self) -> CostModel:
        """Costs at a constant context of CONTEXT_LEN. A growing context would change the best k by
        itself. Raises HardwareError if this context does not fit."""
        if self.models is None:
            hardware = Hardware(load_cost(MEASURED))
        else:
            hardware = gpu_hardware(*self.models, max_rows=self.batch_size)
            check_fits(hardware, self.batch_size, CONTEXT_LEN)
        cost = hardware.cost
        assert cost.draft is not None
        return replace(
            cost,
            target=at_context(cost.target, CONTEXT_LEN),
            draft=at_context(cost.draft, CONTEXT_LEN),
        )


DRAFT, SLOPE, FIXED = "draft x 2", "verify slope x 1.5", "+ 5 ms a pass"
SMALL = ("llama-3.2-3b", "llama-3.2-1b")
SETTINGS = (
    Setting(DRAFT, Deviation(draft=2.0), ("h100", 1, "llama-3-8b", "llama-3.2-1b"), 8, 0.5),
    Setting(DRAFT, Deviation(draft=2.0), ("h100", 1, *SMALL), 16, 0.4),
    Setting(SLOPE, Deviation(slope=1.5), ("a100-80gb", 2, "vicuna-13b", "llama-160m"), 48, 0.95),
    Setting(SLOPE, Deviation(slope=1.5), None, 32, 0.5),
    Setting(FIXED, Deviation(extra_ms=5.0), ("h100", 1, *SMALL), 40, 0.6),
    Setting(
        FIXED, Deviation(extra_ms=5.0), ("a100-80gb", 1, "llama-3.2-3b", "llama-160m"), 48, 0.9
    ),
)
"""Settings in which the best k changes and was clearly best before. If several lengths are equally
good, a frozen profile may lose nothing."""


def at_context(table: PassTable, context_len: int) -> PassTable:
    """Passes that take the time of this context, whatever the context is."""
    seconds = tuple(
        tuple(s + table.context_s * rows * (context_len - table.context_len) for s in line)
        for rows, line in zip(table.rows, table.seconds, strict=True)
    )
    return PassTable(table.rows, table.tokens_per_row, seconds, context_len)


class NeverLearns(CostCorrections):
    """Always uses the profile, and requests no probe."""

    def observe(self, step: MeasuredStep) -> Predicted:
        return predicted(self._profile, step)

    def wants_drafts(self) -> bool:
        return False


class NeverForbids(Guard):
    def observe(self, step: MeasuredStep) -> None: ...

    def allows(self, batch_size: int, context_len: float) -> bool:
        return True

    def wants_reference(self, batch_size: int, context_len: float) -> bool:
        return False


class FrozenController(Controller):
    """Plans by the profile, whatever steps take."""

    def __init__(self, profile: CostModel, batch_size: int, has_guard: bool) -> None:
        super().__init__(profile, MAX_DRAFT_LEN, batch_size)
        self._corrections = NeverLearns(profile)
        if not has_guard:
            self._guard = NeverForbids(profile, ProbeBudget())


@dataclass(frozen=True)
class NoisyCost(CostModel):
    """Passes that vary by 5 %; one in a hundred takes 20 times as long. excess: seconds of each
    pass that are noise."""

    rng: random.Random = field(default_factory=random.Random, compare=False)
    excess: list[float] = field(default_factory=list, compare=False)

    def target_s(self, batch_size: int, num_tokens: int, context_len: float) -> float:
        return self._scattered(super().target_s(batch_size, num_tokens, context_len))

    def draft_s(self, batch_size: int) -> float:
        return self._scattered(super().draft_s(batch_size))

    def _scattered(self, seconds: float) -> float:
        noise = self.rng.gauss(1.0, NOISE)
        found = seconds * noise * (STALL if self.rng.random() < STALL_SHARE else 1.0)
        self.excess.append(found - seconds)
        return found


def noisy(cost: CostModel, seed: int) -> NoisyCost:
    return NoisyCost(**vars_of(cost), rng=random.Random(seed))


def vars_of(cost: CostModel) -> dict[str, Any]:
    """The fields; not the tables that a cost model has worked out for itself."""
    return {name: getattr(cost, name) for name in CostModel.__dataclass_fields__}


def decoding_s(cost: CostModel, records: Iterable[StepRecord]) -> list[float]:
    """Seconds of each of the steps by this cost, without noise and without prompt chunks. records:
    from the first step on that drafted, so that what draft caches miss is known."""
    num_read: dict[SequenceId, int] = {}
    seconds = []
    for record in records:
        known = {view.sequence: view.context_len for view in record.decision.views}
        lengths, lags = [], []
        for event in record.events:
            if event.num_drafted:
                context_len = known[event.sequence]
                lengths.append(event.num_drafted)
                lags.append(max(0, context_len - 1 - num_read.get(event.sequence, 0)))
                # The last draft was proposed, but never read.
                kept = min(event.num_accepted, event.num_drafted - 1)
                num_read[event.sequence] = context_len + kept
        passes = [sum(k >= p for k in lengths) for p in range(1, max(lengths, default=0) + 1)]
        late = [lag for lag in lags if lag > SHORT_LAG]
        batch_size = len(known)
        mean_context = sum(known.values()) / max(1, batch_size)
        seconds.append(
            cost.target_s(batch_size, batch_size + sum(lengths), mean_context)
            + sum(cost.draft_s(n) for n in passes)
            + cost.draft_s(len(late))
            + cost.catch_up_s * sum(late)
            + cost.step_host_s(batch_size)
        )
    return seconds


def walk(
    cost: CostModel,
    texts: Sequence[DraftRuns],
    starts: Sequence[int],
    draft_len: int,
    num_tokens: float,
) -> tuple[Floats, Floats]:
    """Tokens and seconds after each step of a server with this draft length, summed up from 0 to at
    least num_tokens. starts: generated tokens of each text at the beginning."""
    positions, batch_size = list(starts), len(starts)
    tokens, seconds = [0.0], [0.0]
    while tokens[-1] < num_tokens:
        context_len = PROMPT_LEN + sum(positions) / batch_size
        took_s = cost.target_s(batch_size, batch_size * (draft_len + 1), context_len)
        took_s += draft_len * cost.draft_s(batch_size)
        kept = [t.accepted(p, draft_len) for t, p in zip(texts, positions, strict=True)]
        positions = [p + k + 1 for p, k in zip(positions, kept, strict=True)]
        tokens.append(tokens[-1] + sum(kept) + batch_size)
        seconds.append(seconds[-1] + took_s + cost.step_host_s(batch_size))
    return np.array(tokens), np.array(seconds)


def fastest(
    cost: CostModel, texts: Sequence[DraftRuns], starts: Sequence[int], num_tokens: float
) -> tuple[int, Floats, Floats]:
    """The draft length that generates this many tokens fastest, and its steps."""
    walks = [(k, *walk(cost, texts, starts, k, num_tokens)) for k in range(MAX_DRAFT_LEN + 1)]
    return min(walks, key=lambda found: float(np.interp(num_tokens, found[1], found[2])))


class Case:
    """A setting under one seed: texts, costs, and when they change."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.seed = setting, seed
        self.profile = setting.cost
        self.true = setting.deviation.applied_to(self.profile)
        most = (1 - setting.accept_prob ** (MAX_DRAFT_LEN + 1)) / (1 - setting.accept_prob)
        self.output_len = int(1.2 * (BEFORE + AFTER) * most)
        rngs = [np.random.default_rng([seed, row]) for row in range(setting.batch_size)]
        self.texts = [draw_runs(rng, self.output_len, setting.accept_prob, 0.0) for rng in rngs]
        starts = [1] * setting.batch_size
        self.best_before, _, seconds = fastest(
            self.profile, self.texts, starts, BEFORE * setting.batch_size
        )
        self.change_s = BEFORE * float(seconds[-1]) / (len(seconds) - 1)

    def simulation(self, arm: str) -> Simulation:
        """A request for each row, longer than the measured steps."""
        requests = [
            SimRequest(row, 0.0, PROMPT_LEN, self.output_len, only(DRAFT_MODEL, text))
            for row, text in enumerate(self.texts, start=1)
        ]
        costs = self.profile, self.true
        if arm == OURS_NOISY:
            costs = noisy(self.profile, self.seed), noisy(self.true, self.seed)
        found = Simulation(
            requests,
            "goodput",
            costs[0],
            SimLimits(self.setting.batch_size, max_draft_len=MAX_DRAFT_LEN),
            believed=self.profile,
            changes=[CostChange(self.change_s, costs[1])],
        )
        if arm in (FROZEN, FROZEN_GUARD):
            batch_size, has_guard = self.setting.batch_size, arm == FROZEN_GUARD
            found.loop.controller = FrozenController(self.profile, batch_size, has_guard)
        return found


class EnoughSteps(Exception):
    """There are as many as are looked at."""


def recorded(case: Case, arm: str) -> tuple[list[StepRecord], list[StepRecord]]:
    """The steps before the change, and AFTER of them after it."""
    simulation = case.simulation(arm)
    records = simulation.loop.records = deque()

    def stop(num_over: int) -> None:
        if len(records) > AFTER and records[-1 - AFTER].start_s >= case.change_s:
            raise EnoughSteps

    with suppress(EnoughSteps):
        simulation.run(stop)
    num_before = sum(record.start_s < case.change_s for record in records)
    return list(records)[:num_before], list(records)[num_before : num_before + AFTER]


@dataclass(frozen=True)
class Found:
    """Of one arm under one seed. draft_lens: mean of the 100 steps before the change, and of the
    last 100. seconds, best_s: of each window after the change, as it was, and of the best fixed k
    for the same tokens. num_probes, num_guarded: of the steps after the change."""

    best_before: int
    best_after: int
    draft_lens: tuple[float, float]
    seconds: list[float]
    best_s: list[float]
    num_probes: int
    num_guarded: int


def measured(setting: Setting, arm: str, seed: int) -> Found:
    case = Case(setting, seed)
    before, after = recorded(case, arm)
    assert len(after) == AFTER, f"{len(after)} steps after the change"
    assert all(r.batch_size == setting.batch_size and not r.num_prefill_tokens for r in after)
    starts = [view.context_len - PROMPT_LEN for view in after[0].decision.views]
    tokens = np.cumsum([0.0] + [record.num_generated for record in after])
    seconds = np.cumsum([0.0, *decoding_s(case.true, [*before, *after])[-AFTER:]])
    if arm != OURS_NOISY:
        end_s = after[-1].start_s + after[-1].total_s
        assert abs(end_s - after[0].start_s - seconds[-1]) < 1e-6 * end_s, "as the simulator's"
    best_after, best_tokens, best_seconds = fastest(
        case.true, case.texts, starts, float(tokens[-1])
    )
    best_s = np.interp(tokens, best_tokens, best_seconds)
    return Found(
        case.best_before,
        best_after,
        (_mean_draft_len(before[-100:]), _mean_draft_len(after[-100:])),
        np.diff(seconds[::WINDOW]).tolist(),
        np.diff(best_s[::WINDOW]).tolist(),
        sum(record.decision.reason is Reason.PROBE for record in after),
        sum(record.decision.reason is Reason.GUARD for record in after),
    )


def _mean_draft_len(records: Sequence[StepRecord]) -> float:
    return sum(r.num_drafted for r in records) / sum(r.batch_size for r in records)


def regret(found: Sequence[Found], first: int, last: int) -> float:
    """Of steps first to last after the change, over all of these runs; multiples of WINDOW."""
    windows = slice(first // WINDOW, last // WINDOW)
    best_s = sum(sum(one.best_s[windows]) for one in found)
    return 1.0 - best_s / sum(sum(one.seconds[windows]) for one in found)


def steps_until(found: Sequence[Found], bound: float) -> int | None:
    """Steps after the change from which the regret of every window is below the bound."""
    ends = range(0, AFTER, WINDOW)
    above = [first for first in ends if regret(found, first, first + WINDOW) >= bound]
    until = max(above) + WINDOW if above else 0
    return until if until < AFTER else None


Results = Mapping[tuple[Setting, str], Sequence[Found]]


def all_results() -> Results:
    jobs = [(s, arm, seed) for s in SETTINGS for arm in ARMS for seed in range(NUM_SEEDS)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = pool.map(measured, *zip(*jobs, strict=True))
        runs = list(tracked("adaptation", found, "runs", len(jobs)))
    return {
        (setting, arm): [
            run for job, run in zip(jobs, runs, strict=True) if job[:2] == (setting, arm)
        ]
        for setting in SETTINGS
        for arm in ARMS
    }


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _range(values: Sequence[float]) -> str:
    return f"{_percent(min(values))} to {_percent(max(values))}"


def _several(values: Iterable[int]) -> str:
    return "/".join(str(value) for value in sorted(set(values)))


def _best(found: Sequence[Found]) -> list[str]:
    """Before the change and after it, over the seeds."""
    return [_several(f.best_before for f in found), _several(f.best_after for f in found)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def overview(results: Results) -> str:
    """A line a setting: regrets of steps 200 to 400 after the change, and how soon."""
    rows = []
    for setting in SETTINGS:
        late = {arm: regret(results[setting, arm], ASKED_STEPS, AFTER) for arm in ARMS}
        ours = results[setting, OURS]
        until = steps_until(ours, ASKED)
        rows.append(
            [
                setting.change,
                setting.label,
                " -> ".join(_best(ours)),
                *(_percent(late[arm]) for arm in ARMS),
                "never" if until is None else f"{until}",
            ]
        )
    header = ["change", "served", "best k", *ARMS, f"ours below {_percent(ASKED)} after steps"]
    return table(header, rows)


def verdict(results: Results) -> str:
    """What was asked, and where it holds."""
    late = {
        arm: [regret(results[setting, arm], ASKED_STEPS, AFTER) for setting in SETTINGS]
        for arm in ARMS
    }
    num_ours = sum(value < ASKED for value in late[OURS])
    num_frozen = sum(value > FROZEN_ASKED for value in late[FROZEN])
    soon = [steps_until(results[setting, OURS], ASKED) for setting in SETTINGS]
    num_soon = sum(until is not None and until <= ASKED_STEPS for until in soon)
    return (
        f"How soon does the controller adapt after a change of costs? A regret below "
        f"{_percent(ASKED)} within {ASKED_STEPS} steps was asked, where a frozen profile "
        f"stays above {_percent(FROZEN_ASKED)}. In windows of {WINDOW} steps, {num_soon} of "
        f"{len(SETTINGS)} settings meet it. From step {ASKED_STEPS} to {AFTER}, the controller "
        f"loses {_range(late[OURS])}, below the bound in {num_ours} of {len(SETTINGS)}; the frozen "
        f"profile loses {_range(late[FROZEN])}, above its bound in {num_frozen}."
    )


def figures(results: Results) -> dict[str, Any]:
    rows = [
        {
            "change": setting.change,
            "served": setting.label,
            "arm": arm,
            "best_k": _best(found),
            "mean_draft_len": [_mean([f.draft_lens[i] for f in found]) for i in (0, 1)],
            "regret_by_window": [regret(found, f, f + WINDOW) for f in range(0, AFTER, WINDOW)],
            "regret_late": regret(found, ASKED_STEPS, AFTER),
            "regret_late_by_seed": [regret([f], ASKED_STEPS, AFTER) for f in found],
            "steps_until_below": steps_until(found, ASKED),
        }
        for (setting, arm), found in results.items()
    ]
    return {"window": WINDOW, "num_seeds": NUM_SEEDS, "rows": rows}


MISSED = """\
Where the best k after the change is 0, a few windows are above the bound: drafting resumes now and
then, reads what the draft caches have missed, and does not pay. With noise, a probe may stall and
then teaches nothing; the next one comes 200 steps later."""

MADE = f"""\
Regrets are those from step {ASKED_STEPS} to {AFTER}: 1 - seconds of the best fixed k / seconds,
for the same tokens of the same texts. The best k is chosen in hindsight for all {AFTER} steps.
*frozen* plans by the profile forever and has no guard. *frozen, guard* has one. *ours, noise* has
passes that vary by 5 %, and one in a hundred takes 20 times as long. Values are sums over
{NUM_SEEDS} seeds.

The server's own loop ran in the [simulator](../evaluate/simulator.md) with the policy `goodput`
and one long request per row; a draft is right with probability a at each position. About {BEFORE}
steps after the start, passes begin to cost something else. Costs of GPUs are a published fit or a
roofline, costs of the CPU are the measured profile `traces/profile-88m.json`. All are charged at a
context of {CONTEXT_LEN} tokens. Settings were chosen so that the change moves the best k, and so
that the k before was clearly best. The JSON file has the regret of each window."""


def main() -> None:
    results = all_results()
    publish(
        Path(sys.argv[1]),
        "adaptation",
        "Costs that change in mid-run",
        [
            verdict(results),
            overview(results),
            MISSED,
            MADE,
        ],
        figures(results),
    )


if __name__ == "__main__":
    main()
