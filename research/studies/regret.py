"""Regret on real acceptance: an oracle trace of the shipped pair, replayed under each policy.

Whether a draft is right depends on the text alone, so the trace tells for every draft length what a
step would have gained, and regret is exact. Each workload's texts are served in a closed loop of 1
and of 32 rows, by the server's own loop in the simulator, with passes that cost what was measured
or published. What decoding takes is counted, prompts left out: they cost every policy the same.

    best fixed    the k of all texts of the workload that is fastest in hindsight
    clairvoyant   at each step the planner is told how many drafts of each sequence are right; it
                  never drafts one too many. Nobody can know that
    bound         one row only: the least seconds by which a text can be written at all, choosing k
                  freely at every position (dynamic programming, draft caches always up to date)
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from smartspec_bench.progress import tracked
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SequenceView
from smartspec_py.serving.config import DRAFT_MODEL
from smartspec_py.serving.profile import load_cost
from smartspec_py.serving.step import Decision
from smartspec_sim.acceptance import DraftRuns
from smartspec_sim.engine import PROPOSERS
from smartspec_sim.hardware import gpu_hardware
from smartspec_sim.simulate import SimLimits, Simulation
from smartspec_sim.traces.oracle import OracleSequence, read_oracle
from smartspec_sim.workload import SimRequest, only
from studies.adaptation import FrozenController, decoding_s
from studies.document import publish, table

TRACES = Path(__file__).parents[2] / "docs" / "results" / "traces"
TRACE, MEASURED = TRACES / "tiny-oracle.jsonl", TRACES / "profile-88m.json"

MAX_DRAFT_LEN = 7
ROWS = (1, 32)
ROUNDS = {1: 1, 32: 4}
"""Times that each text is served: with many rows, so that they are full for most of the time."""

CPU, GPU = "88 M + 4 M, CPU", "llama-3-8b + EAGLE, h100"
FIXED = tuple(f"fixed:{k}" for k in range(1, MAX_DRAFT_LEN + 1))
ADAPTIVE = ("batch_table", "goodput_global", "goodput")
CLAIRVOYANT = "clairvoyant"
MIXED = "mixed"


@dataclass(frozen=True)
class Case:
    """workload: one of the trace's, or all of them in turn."""

    hardware: str
    batch_size: int
    workload: str


def cost_of(hardware: str) -> CostModel:
    if hardware == CPU:
        return load_cost(MEASURED)
    return gpu_hardware("h100", 1, "llama-3-8b", "eagle", max(ROWS)).cost


def texts_of(workload: str) -> list[OracleSequence]:
    """In the trace's order; of all workloads one of each in turn."""
    texts = [text for text in read_oracle(TRACE)[1] if text.num_generated > 1]
    if workload != MIXED:
        return [text for text in texts if text.workload == workload]
    groups = [texts_of(name) for name in workloads()]
    return [text for turn in zip(*groups, strict=False) for text in turn]


def workloads() -> list[str]:
    return list(dict.fromkeys(text.workload for text in read_oracle(TRACE)[1]))


def requests_of(case: Case) -> list[SimRequest]:
    """All are there from the start: whenever one ends, the next begins."""
    texts = texts_of(case.workload) * ROUNDS[case.batch_size]
    return [
        SimRequest(
            number,
            0.0,
            text.num_prompt,
            text.num_generated,
            only(DRAFT_MODEL, DraftRuns(text.proposers[DRAFT_MODEL].accepted)),
            cohort=text.workload,
        )
        for number, text in enumerate(texts, start=1)
    ]


class Clairvoyant(FrozenController):
    """Told by the trace what is right; costs are as the profile has them."""

    def __init__(self, cost: CostModel, batch_size: int, requests: Sequence[SimRequest]) -> None:
        super().__init__(cost, batch_size, has_guard=False)
        self._requests = {request.sequence: request for request in requests}

    def plan(
        self, views: Sequence[SequenceView], num_prefilling: int = 0, num_background: int = 0
    ) -> Decision:
        return super().plan([self._told(view) for view in views], num_prefilling, num_background)

    def _told(self, view: SequenceView) -> SequenceView:
        request, (option,) = self._requests[view.sequence], view.options
        most = option.max_draft_len
        acceptance = request.acceptances[PROPOSERS.index(DRAFT_MODEL)]
        assert acceptance is not None
        right = acceptance.accepted(view.context_len - request.prompt_len, most)
        probs = np.array([1.0] * right + [0.0] * (most - right))
        return replace(view, options=(option._replace(accept_probs=probs),))


def decoding_goodput(case: Case, policy: str) -> float:
    """Tokens a second of decoding, prompts and the tokens that come with them left out."""
    cost, requests = cost_of(case.hardware), requests_of(case)
    limits = SimLimits(case.batch_size, max_draft_len=MAX_DRAFT_LEN)
    name = "goodput" if policy == CLAIRVOYANT else policy
    simulation = Simulation(requests, name, cost, limits)
    if policy == CLAIRVOYANT:
        simulation.loop.controller = Clairvoyant(cost, case.batch_size, requests)
    records = simulation.loop.records = deque()
    simulation.run()
    num_tokens = sum(request.output_len - 1 for request in requests)
    return num_tokens / sum(decoding_s(cost, records))


def bound(case: Case) -> float:
    """Tokens a second of one row that nothing can exceed."""
    cost = cost_of(case.hardware)
    texts = texts_of(case.workload)
    seconds = sum(least_s(cost, text) for text in texts)
    return sum(text.num_generated - 1 for text in texts) / seconds


def least_s(cost: CostModel, text: OracleSequence) -> float:
    """The fastest way through a text, from its last position to its first."""
    end = text.num_generated
    least = [0.0] * (end + 1)
    lengths = np.arange(MAX_DRAFT_LEN + 1)
    for pos in range(end - 1, 0, -1):
        passes_s = cost.targets_s(1, lengths + 1.0, text.num_prompt + pos)
        passes_s = passes_s + lengths * cost.draft_s(1)
        most = min(MAX_DRAFT_LEN, end - pos - 1)
        least[pos] = min(
            float(passes_s[k]) + least[pos + 1 + text.accepted(DRAFT_MODEL, pos, k)]
            for k in range(most + 1)
        )
    return least[1]


@dataclass(frozen=True)
class Found:
    """Goodput of decoding in tokens/s, by policy, and the bound where there is one row."""

    case: Case
    goodputs: Mapping[str, float]
    bound: float | None

    @property
    def best_fixed(self) -> str:
        """In hindsight; no speculation is a fixed length as well."""
        return max(("none", *FIXED), key=lambda policy: self.goodputs[policy])

    def ratio(self, policy: str, base: str) -> float:
        return self.goodputs[policy] / self.goodputs[base]


def measured(case: Case) -> Found:
    policies = ("none", *FIXED, *ADAPTIVE, CLAIRVOYANT)
    goodputs = {policy: decoding_goodput(case, policy) for policy in policies}
    return Found(case, goodputs, bound(case) if case.batch_size == 1 else None)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


HEADER = ("costs", "rows", "workload", "best fixed", "none", *ADAPTIVE, CLAIRVOYANT, "bound")


def line(found: Found) -> list[object]:
    best, case = found.best_fixed, found.case
    limit = "" if found.bound is None else f"{found.bound / found.goodputs[best]:.3f}"
    ratios = (found.ratio(policy, best) for policy in ("none", *ADAPTIVE, CLAIRVOYANT))
    return [case.hardware, case.batch_size, case.workload, best, *ratios, limit]


def verdict(results: Sequence[Found]) -> str:
    lost = [1 - found.ratio("goodput", found.best_fixed) for found in results]
    held = sum(value <= 0.02 for value in lost)
    told = [1 - found.ratio("goodput", CLAIRVOYANT) for found in results]
    uniform = [found.ratio("goodput_global", found.best_fixed) for found in results]
    worst = max(results, key=lambda found: 1 - found.ratio("goodput", found.best_fixed)).case
    return (
        f"How much does `goodput` lose to the best fixed length in hindsight? With the real "
        f"acceptance of the shipped pair, {_percent(sum(lost) / len(lost))} of decoding goodput on "
        f"average over {len(results)} cases, from {_percent(min(lost))} (a gain) to "
        f"{_percent(max(lost))} ({worst.workload}, {worst.batch_size} rows, {worst.hardware}). At "
        f"most 2 % was asked, which {held} of {len(lost)} cases meet. One length for all "
        f"(`goodput_global`) reaches {min(uniform):.3f} to {max(uniform):.3f} of the best fixed "
        f"length. Compared with a planner that knows which drafts are right it loses "
        f"{_percent(min(told))} to {_percent(max(told))}, which no estimate by rates can avoid."
    )


MISSED = """\
With 32 rows on the CPU, no speculation is best by a little. The loss there comes from catch-up of
the draft caches: 3 to 8 % of the time in `qa`."""

MADE = """\
Tokens per second over those of the best fixed length, which may be 0. *clairvoyant* maximizes each
step with known acceptance. *bound* is the shortest way through each text, which no policy can
beat.

The oracle trace is `traces/tiny-oracle.jsonl`: `smartspec trace --oracle --prompts 40
--temperatures 0,1.0 --seed 7000003` of the shipped pair in float32, 320 texts of at most 64
tokens. No constant was chosen on its prompts. Only the draft model drafts. The server's own loop
serves the texts in the [simulator](../evaluate/simulator.md): each once with one row, or four
times with 32 rows. Costs: `traces/profile-88m.json`, measured on one of 2 CPU cores beside other
work, and the published fit of Llama 3 8B with EAGLE on an H100. Decoding is counted, with the
prompts that draft caches read, but without the target's prompts."""


def main() -> None:
    names = [*workloads(), MIXED]
    cases = [Case(h, rows, name) for h in (CPU, GPU) for rows in ROWS for name in names]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        results = list(tracked("regret", pool.map(measured, cases), "cases", len(cases)))
    rows = [
        asdict(found.case)
        | {"tokens_per_s": found.goodputs, "bound": found.bound, "best_fixed": found.best_fixed}
        for found in results
    ]
    title = "Regret on an oracle trace of the shipped pair"
    publish(
        Path(sys.argv[1]),
        "regret",
        title,
        [verdict(results), table(HEADER, map(line, results)), MISSED, MADE],
        {"rows": rows},
    )


if __name__ == "__main__":
    main()
