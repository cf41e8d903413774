"""By what should a step's plan be judged: E/T, or E - price * T, when prompts share the steps?

The server's own loop in the simulator, with a controller that changes nothing but the objective.
Requests arrive at random (Poisson) at shares of what the machine can serve; all objectives see the
same arrivals and texts, and are compared with E/T by mean request latency, time to the first token
and p99.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from smartspec_py.core.cost import CostModel
from smartspec_py.core.planner import ObjectiveName, PlannerSettings, plan
from smartspec_py.core.types import SequenceView, SpecPlan
from smartspec_py.progress import tracked
from smartspec_py.serving.controller import Controller
from smartspec_py.serving.loop import StepLoop
from smartspec_py.serving.request import RequestState
from smartspec_py.serving.step import Decision, Reason, StepRecord
from smartspec_py.sim.hardware import Hardware
from smartspec_py.sim.simulate import SimLimits, SimResult, Simulation
from smartspec_py.sim.workload import KindSpec, LengthSpec, PhaseSpec, WorkloadSpec, draw
from studies.closed_loop import FITTED, ROOFLINE, hardware_of, weighed
from studies.document import publish, table

NUM_ROWS = 32
NUM_REQUESTS = 100
SEEDS = (1, 2)
SHARES = (0.3, 0.6, 0.85, 1.0)
RECENT_KEPT = 0.95
"""Kept of the recent token goodput at each step: it is 20 steps long."""


class Price(StrEnum):
    """What a second costs, in tokens. NONE: E/T."""

    NONE = "E/T"
    RECENT = "E - recent T"
    OWN = "E - own T"
    DELAY = "E - own (1 + W/B) T"


@dataclass(frozen=True)
class Variant:
    """is_weighed: see `closed_loop.WeighedController`."""

    price: Price
    counts_prompts: bool
    is_weighed: bool = False

    @property
    def name(self) -> str:
        prompts = "counted" if self.counts_prompts else "left out"
        return f"{self.price}, prompts {prompts}" + (", weighed" if self.is_weighed else "")


RATIO, RATIO_COUNTED = Variant(Price.NONE, False), Variant(Price.NONE, True)
RECENT_LEFT_OUT, RECENT = Variant(Price.RECENT, False), Variant(Price.RECENT, True)
OWN, DELAY_LEFT_OUT = Variant(Price.OWN, True), Variant(Price.DELAY, False)
DELAY, DELAY_WEIGHED = Variant(Price.DELAY, True), Variant(Price.DELAY, True, True)
VARIANTS = (
    RATIO,
    RATIO_COUNTED,
    RECENT_LEFT_OUT,
    RECENT,
    OWN,
    DELAY_LEFT_OUT,
    DELAY,
    Variant(Price.OWN, True, True),
    DELAY_WEIGHED,
)


@dataclass(frozen=True)
class Load:
    """A machine and what is asked of it. chunk: prompt tokens a step at most."""

    machine: str
    prompt_len: int
    output_len: int
    chunk: int = 512

    @property
    def name(self) -> str:
        return f"{self.machine}, {self.prompt_len}:{self.output_len}, chunks of {self.chunk}"

    @property
    def limits(self) -> SimLimits:
        return SimLimits(max_sequences=NUM_ROWS, prefill_chunk=self.chunk)

    def spec(self, rate: float, seed: int) -> WorkloadSpec:
        kind = KindSpec(
            prompt=LengthSpec(mean=self.prompt_len, sd=self.prompt_len / 2, most=8192),
            output=LengthSpec(mean=self.output_len, sd=self.output_len / 2, most=1024),
        )
        phase = PhaseSpec(duration_s=NUM_REQUESTS / rate, rate=rate)
        return WorkloadSpec(kinds=(kind,), phases=(phase,), seed=seed)


LOADS = [
    Load(machine, prompt_len, output_len, chunk)
    for machine in (FITTED, ROOFLINE)
    for prompt_len, output_len, chunk in ((256, 128, 512), (1024, 128, 2048), (4096, 64, 512))
]


class PricedController(Controller):
    """The server's, with another objective; reads the loop's batcher for what the step will hold.

    W: requests whose prompts are being read, B: sequences that decode. A second of the step delays
    them all, a token brings only its own request forward; so with W of them a second is worth
    1 + W/B times what it is worth to those that decode.
    """

    def __init__(self, loop: StepLoop, hardware: Hardware, variant: Variant) -> None:
        limits = SimLimits()
        super().__init__(hardware.cost, limits.max_draft_len, NUM_ROWS)
        self._loop = loop
        self._variant = variant
        self._tokens, self._decoding_s = 0.0, 0.0

    def observe(self, step: StepRecord) -> None:
        super().observe(step)
        if step.decision.views:
            prompts_s = self._corrections.at(step.num_rows).prefill_s(step.num_prefill_tokens)
            self._tokens = RECENT_KEPT * self._tokens + step.num_generated
            self._decoding_s = RECENT_KEPT * self._decoding_s
            self._decoding_s += step.between_s + step.total_s - prompts_s

    def _decide(
        self,
        views: Sequence[SequenceView],
        settings: PlannerSettings,
        reason: Reason = Reason.PLANNED,
    ) -> Decision:
        settings = replace(self.settings, forced=settings.forced)
        found = super()._decide(views, settings, reason)
        is_free = bool(views) and all(view.policy == "goodput" for view in views)
        if settings.forced or not is_free:  # a probe, or the guard
            return found
        return replace(found, plan=self._priced_plan(views, found.plan, found.cost))

    def _priced_plan(
        self, views: Sequence[SequenceView], own: SpecPlan, cost: CostModel
    ) -> SpecPlan:
        """own: by E/T, chunks left out."""
        batcher, variant = self._loop._batcher, self._variant
        chunks = batcher.prefills()
        num_tokens = sum(len(chunk.tokens) for chunk in chunks) if variant.counts_prompts else 0
        settings = replace(self.settings, num_prefill_tokens=num_tokens)
        if variant.price is Price.NONE:
            return plan(views, cost, settings)
        if variant.price is Price.RECENT:
            price = self._tokens / self._decoding_s if self._decoding_s > 0 else 0.0
            return plan(views, cost, _priced(settings, price))
        factor = 1.0
        if variant.price is Price.DELAY:
            reading = sum(r.state is RequestState.PREFILLING for r in batcher.live)
            factor += reading / len(views)
        if variant.is_weighed:
            return weighed(views, own, cost, settings, factor)
        return plan(views, cost, _priced(settings, factor * own.goodput)) if chunks else own


def _priced(settings: PlannerSettings, price: float) -> PlannerSettings:
    return replace(settings, objective=ObjectiveName.LAGRANGIAN, token_goodput=price)


def saturation_rate(load: Load) -> float:
    """Requests a second when all rows are always full, under the server's objective."""
    requests = [replace(r, arrival_s=0.0) for r in draw(load.spec(1.0, seed=1))]
    result = Simulation(
        requests, "goodput", hardware_of(load.machine, NUM_ROWS).cost, load.limits
    ).run()
    ends = sorted(t.last_s for t in result.timings if t.last_s is not None)
    # Rows are full until about the last NUM_ROWS requests.
    full = ends[: len(ends) - NUM_ROWS]
    return len(full) / full[-1]


def simulate(load: Load, rate: float, seed: int, variant: Variant) -> SimResult:
    hardware = hardware_of(load.machine, NUM_ROWS)
    run = Simulation(draw(load.spec(rate, seed)), "goodput", hardware.cost, load.limits)
    run.loop.controller = PricedController(run.loop, hardware, variant)
    return run.run()


@dataclass(frozen=True)
class Latencies:
    """Of one run, in seconds from when requests were due; p99 over 100 requests is the second
    longest. mean_draft_len: of a decoding step and sequence."""

    e2e: float
    ttft: float
    e2e_p99: float
    ttft_p99: float
    mean_draft_len: float
    mean_rows: float


METRICS = ("e2e", "ttft", "e2e_p99", "ttft_p99")


@dataclass(frozen=True)
class Task:
    load: Load
    share: float
    rate: float
    seed: int

    def run(self) -> list[Latencies]:
        """For each of `VARIANTS`."""
        runs = (simulate(self.load, self.rate, self.seed, variant) for variant in VARIANTS)
        return [_latencies(run) for run in runs]


def _latencies(run: SimResult) -> Latencies:
    start_s = np.array([t.scheduled_s for t in run.timings])
    e2e = np.array([t.last_s for t in run.timings], float) - start_s
    ttft = np.array([t.first_s for t in run.timings], float) - start_s
    return Latencies(
        float(e2e.mean()),
        float(ttft.mean()),
        float(np.percentile(e2e, 99)),
        float(np.percentile(ttft, 99)),
        run.mean_draft_len,
        run.mean_rows,
    )


Found = Sequence[tuple[Task, list[Latencies]]]


def _relative(found: Found, variant: int, metric: str) -> tuple[float, float]:
    """Geometric mean over runs of a metric over that of `RATIO`, and its standard error."""
    logs = [math.log(getattr(ls[variant], metric) / getattr(ls[0], metric)) for _, ls in found]
    error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return math.exp(float(np.mean(logs))), error


def _cell(found: Found, variant: int, metric: str) -> str:
    value, error = _relative(found, variant, metric)
    return f"{value:.3f} ± {error:.3f}" if variant else "1"


def _overall(found: Found) -> str:
    header = ["judged by", "mean latency", "mean TTFT", "p99 latency", "p99 TTFT", "mean k"]
    rows = []
    for number, variant in enumerate(VARIANTS):
        drafts = float(np.mean([latencies[number].mean_draft_len for _, latencies in found]))
        rows.append([variant.name, *(_cell(found, number, m) for m in METRICS), f"{drafts:.2f}"])
    return table(header, rows)


def _by_share(found: Found, metric: str) -> str:
    header = ["judged by", *(f"{share:g} of saturation" for share in SHARES)]
    rows = []
    for number, variant in enumerate(VARIANTS):
        parts = ([f for f in found if f[0].share == share] for share in SHARES)
        rows.append([variant.name, *(_cell(part, number, metric) for part in parts)])
    return table(header, rows)


def _by_load(found: Found, metric: str) -> str:
    header = ["load", "req/s at saturation", *(variant.name for variant in VARIANTS[1:])]
    rows: list[list[object]] = []
    for load in LOADS:
        part = [f for f in found if f[0].load == load]
        rate = next(task.rate for task, _ in part if task.share == 1.0)
        cells = [_cell(part, number, metric) for number in range(1, len(VARIANTS))]
        rows.append([load.name, f"{rate:.1f}", *cells])
    return table(header, rows)


def _run(task: Task) -> list[Latencies]:
    return task.run()


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        saturations = pool.map(saturation_rate, LOADS)
        rates = list(tracked("saturation rates", saturations, "loads", len(LOADS)))
        tasks = [
            Task(load, share, share * rate, seed)
            for load, rate in zip(LOADS, rates, strict=True)
            for share in SHARES
            for seed in SEEDS
        ]
        runs_found = tracked("objective", pool.map(_run, tasks), "runs", len(tasks))
        found = list(zip(tasks, runs_found, strict=True))
    runs: list[dict[str, Any]] = [
        {"load": task.load.name, "share": task.share, "rate": task.rate, "seed": task.seed}
        | {v.name: asdict(found) for v, found in zip(VARIANTS, latencies, strict=True)}
        for task, latencies in found
    ]
    publish(Path(sys.argv[1]), "objective", TITLE, _sections(found), {"runs": runs})


TITLE = "What a step's plan is judged by when prompts share the steps"


def _sections(found: Found) -> list[str]:
    by_machine = [
        section
        for machine in (FITTED, ROOFLINE)
        for section in (machine, _overall([f for f in found if f[0].load.machine == machine]))
    ]
    return [
        _answer(found),
        "All loads and rates, relative to E/T with prompts left out (geometric mean of pairs):",
        _overall(found),
        *by_machine,
        "Mean latency by rate:",
        _by_share(found, "e2e"),
        "Mean time to the first token by rate:",
        _by_share(found, "ttft"),
        "Mean latency by load (prompt:output tokens):",
        _by_load(found, "e2e"),
        METHOD,
    ]


def _answer(found: Found) -> str:
    def told(variant: Variant) -> str:
        number = VARIANTS.index(variant)
        e2e, ttft = (_relative(found, number, metric)[0] for metric in METRICS[:2])
        return f"mean latency {e2e:.3f}, mean TTFT {ttft:.3f}"

    number = VARIANTS.index(DELAY_LEFT_OUT)
    by_load = [
        (_relative([f for f in found if f[0].load == load], number, "e2e")[0], load.name)
        for load in LOADS
    ]
    (least, where), most = min(by_load), max(by_load)[0]
    return (
        f"The default is E - lambda T with lambda the E/T of the step's own best plan, times 1 + "
        f"W/B for the W requests whose prompts are read beside B that decode, and prompt chunks "
        f"left out of T. Relative to E/T with chunks left out: {told(DELAY_LEFT_OUT)}; by load its "
        f"mean latency is {least:.3f} ({where}) to {most:.3f}. Most is gained where prompts are "
        f"long against outputs and near saturation, where speculation keeps prompts waiting. "
        f"Chunks counted in T as well bring a little more ({told(DELAY)}), and each sequence "
        f"judged by its own rate again ({told(DELAY_WEIGHED)}). E - lambda T with lambda the "
        f"recent token goodput is worse than E/T (chunks counted: {told(RECENT)}; left out: "
        f"{told(RECENT_LEFT_OUT)}): the goodput of the last steps is that of other rows, and with "
        f"lambda from the step itself it is better ({told(OWN)}). E/T with chunks counted is worst "
        f"({told(RATIO_COUNTED)}): it speculates most when requests queue."
    )


METHOD = f"""How it was made. The server's own loop in the simulator, {NUM_ROWS} rows, policy
`goodput`, with a controller that changes nothing but the objective. {NUM_REQUESTS} requests arrive
at random (Poisson) at {", ".join(f"{share:g}" for share in SHARES)} of what the machine serves when
all rows are full; lengths vary (log-normal, standard deviation half of the mean), acceptance is 0.7
with 0.1 between requests. All objectives see the same arrivals and texts; seeds
{", ".join(map(str, SEEDS))}. Prompts are read whole, in chunks beside the decoding of others, and
by the draft model when it is first asked. {FITTED}: published fit and EAGLE head, where a token
costs the same whatever shares the pass. {ROOFLINE}: roofline, 1B draft, where drafts are free while
a pass is bound by memory and are not once a prompt chunk fills it.

E/T is the step's expected tokens over its seconds. *left out*, *counted*: whether the time that the
prompt chunk adds is in T. *recent*: tokens a second of decoding over about 20 steps, chunks left
out. *own*: E/T of the plan that this step would have without the chunk, so that the plan depends on
the step alone. 1 + W/B: W requests whose prompts are being read wait for the step to end and gain
nothing by its tokens, B sequences decode; so a second is worth that much more. Without a chunk in
the step, *own* is E/T. *weighed*: each sequence is judged by its own rate instead of by the
step's (`spread.md`), with or without a chunk. p99 of {NUM_REQUESTS} requests is about the second
longest. Errors are over pairs of runs, and mostly say how loads differ, not how sure a mean is."""


if __name__ == "__main__":
    main()
