"""Trees of drafts on the shipped models, with the step times of larger models on a GPU.

Texts, drafts and acceptance are real: the shipped target with its draft model and its Medusa heads.
Step times are modelled: those of Llama 3 8B with a draft model of 1B on one H100, by roofline. No
GPU is needed, and none was used. Rates are generated tokens per second of modelled time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt

from smartspec_bench.lockstep import Side, SlotFeed
from smartspec_bench.prompts import PROMPT_SEED, generated
from smartspec_bench.workloads import WORKLOADS
from smartspec_cli.commands.quickstart import CACHE, SHIPPED_PAIR
from smartspec_cli.commands.settings import checked_config, torch_settings
from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.base import (
    Draft,
    DraftTask,
    Event,
    Proposer,
    ProposerCapabilities,
    Target,
    TargetCapabilities,
    Verify,
    Work,
)
from smartspec_py.engines.torch.tree import depths
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.config import DRAFT_MODEL, HEADS
from smartspec_py.serving.step import StepRecord
from smartspec_sim.engine import drafting_s
from smartspec_sim.hardware import gpu_hardware
from smartspec_testing.clock import VirtualStopwatch
from studies.document import publish, table

GPU, TARGET, DRAFT = "h100", "llama-3-8b", "llama-3.2-1b"
HEADS_S = 0.3e-3
"""Seconds of four heads on one H100: 0.13 GB of blocks and 1 GB of LM head, read at 3.35 TB/s."""

PLOTTED = (
    "goodput: trees of draft model",
    "goodput: tree of heads",
    "goodput: all, trees",
)

NUM_DRAFTS = 32
SLOTS = (1, 2, 4, 8, 16, 32)
REQUESTS_PER_SLOT, FEWEST_REQUESTS = 4, 24
MAX_TOKENS = 64


class Arm(NamedTuple):
    """width: guesses for one position, 1 for chains."""

    name: str
    policy: str
    proposer: str
    width: int = 4


NONE = Arm("no speculation", "none", "auto")
ARMS = (
    NONE,
    Arm("draft model, 3 drafts", "fixed:3", DRAFT_MODEL),
    Arm("heads, chain of 4", "fixed:4", HEADS, 1),
    Arm("heads, tree of 8", "fixed:8", HEADS),
    Arm("heads, tree of 32", "fixed:32", HEADS),
    Arm("goodput: draft model", "goodput", DRAFT_MODEL, 1),
    Arm("goodput: trees of draft model", "goodput", DRAFT_MODEL),
    Arm("goodput: chain of heads", "goodput", HEADS, 1),
    Arm("goodput: tree of heads", "goodput", HEADS),
    Arm("goodput: all, chains", "goodput", "auto", 1),
    Arm("goodput: all, trees", "goodput", "auto"),
)


class ModelledTarget(Target):
    """A target whose passes take the seconds of a cost model."""

    def __init__(self, inner: Target, cost: CostModel, watch: VirtualStopwatch) -> None:
        self._inner, self._cost, self._watch = inner, cost, watch
        self._context_lens: dict[SequenceId, int] = {}
        self._work: list[Work] = []

    @property
    def capabilities(self) -> TargetCapabilities:
        return self._inner.capabilities

    def begin(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        num_prompt: int,
        sampling: SamplingParams,
        reuses_prefix: bool = True,
    ) -> int:
        self._context_lens[sequence] = len(tokens)
        return self._inner.begin(sequence, tokens, num_prompt, sampling, reuses_prefix)

    def submit(self, work: Sequence[Work]) -> None:
        self._work = list(work)
        self._inner.submit(work)

    def poll(self, timeout_s: float) -> list[Event]:
        events = self._inner.poll(timeout_s)
        if not events:
            return []
        num_tokens = sum(
            len(one.drafts) + 1 if isinstance(one, Verify) else len(getattr(one, "tokens", (0,)))
            for one in self._work
        )
        context = sum(self._context_lens[one.sequence] for one in self._work) / len(self._work)
        pass_s = self._cost.target_s(len(self._work), num_tokens, context)
        self._watch.sleep(pass_s + self._cost.step_host_s(len(self._work)))
        for event in events:
            self._context_lens[event.sequence] += len(event.tokens)
        return [event._replace(pass_s=pass_s) for event in events]

    def cancel(self, sequence: SequenceId) -> None:
        self._inner.cancel(sequence)

    def release(self, sequence: SequenceId) -> None:
        self._inner.release(sequence)

    def close(self) -> None:
        self._inner.close()


class ModelledProposer:
    """A proposer whose drafting takes the seconds of a cost model."""

    def __init__(
        self,
        inner: Proposer,
        cost: CostModel,
        watch: VirtualStopwatch,
        draft_s: tuple[float, float] | None,
    ) -> None:
        """draft_s: of the capabilities; None if it drafts with passes."""
        self._inner, self._cost, self._watch, self._draft_s = inner, cost, watch, draft_s
        given = inner.capabilities
        self.capabilities: ProposerCapabilities = replace(given, draft_s=draft_s or given.draft_s)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        if self._draft_s is None:
            lags = [self._inner.draft_lag(one.sequence, len(one.tokens)) for one in tasks]
            self._watch.sleep(drafting_s(self._cost, list(map(_num_passes, tasks)), lags))
        else:
            self._watch.sleep(max(self._draft_s[0], self._draft_s[1] * len(tasks)))
        return self._inner.propose(tasks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _num_passes(task: DraftTask) -> int:
    return task.draft_len if task.tree is None else max(depths(task.tree.parents))


class CountingSide(Side):
    """nodes: drafts of each verification. num_decoded: sequences in all steps."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.nodes: list[int] = []
        self.num_accepted = self.num_decoded = 0

    def _count(self, step: StepRecord) -> None:
        super()._count(step)
        self.nodes += [num_drafted for num_drafted, _ in step.verifications]
        self.num_accepted += sum(num_accepted for _, num_accepted in step.verifications)
        self.num_decoded += len(step.verifications) + step.num_undrafted


def side_of(arm: Arm, num_slots: int) -> CountingSide:
    settings = torch_settings(
        SHIPPED_PAIR / "target",
        SHIPPED_PAIR / "draft",
        dtype="float32",
        profile_cache=str(CACHE / "profiles"),
    )
    engine: dict[str, Any] = {**settings, "heads": str(SHIPPED_PAIR / "heads"), "runtime": "torch"}
    limits = {
        "max_sequences": num_slots,
        "max_context_len": 256,
        "max_draft_len": NUM_DRAFTS,
        "max_tree_width": arm.width,
        "profile_s": 0.0,
    }
    config = checked_config({"engine": engine, "limits": limits})
    built = build_engine(config, Path.cwd())
    watch = VirtualStopwatch()
    cost = gpu_hardware(GPU, 1, TARGET, DRAFT, max(num_slots, 8)).cost
    heads_s = {HEADS: (HEADS_S, HEADS_S / num_slots)}
    proposers: dict[str, Any] = {
        name: ModelledProposer(
            one, cost, watch, None if name == DRAFT_MODEL else heads_s.get(name, (0.0, 0.0))
        )
        for name, one in built.proposers.items()
    }
    modelled = replace(
        built, target=ModelledTarget(built.target, cost, watch), proposers=proposers, cost=cost
    )
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "reuse_prefix": False}
    if arm.proposer != "auto":
        fields["proposer"] = arm.proposer
    return CountingSide(arm.policy, modelled, config, fields, watch)


def measure(side: CountingSide, num_slots: int) -> dict[str, dict[str, float]]:
    """By workload: tokens per second, drafts and accepted drafts per sequence and step."""
    found = {}
    num_requests = max(FEWEST_REQUESTS, REQUESTS_PER_SLOT * num_slots)
    for number, workload in enumerate(("mixed", *WORKLOADS)):
        if number == 0:  # warm up
            _serve(side, islice(generated(workload, PROMPT_SEED + 1), num_slots + 8), num_slots)
        side.nodes, side.num_accepted, side.num_decoded = [], 0, 0
        start_s = side.watch.now()
        _serve(side, islice(generated(workload, PROMPT_SEED), num_requests), num_slots)
        num_tokens = sum(sum(exchange.chunk_tokens) for exchange in side.exchanges)
        found[workload] = {
            "tokens_per_s": num_tokens / (side.watch.now() - start_s),
            "drafts": sum(side.nodes) / side.num_decoded,
            "accepted": side.num_accepted / side.num_decoded,
        }
    return found


def _serve(side: Side, prompts: Any, num_slots: int) -> None:
    side.begin(SlotFeed(prompts, num_slots))
    while not side.is_over:
        side.step()


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Drafts per request and step that goodput chose, against the number of requests."""
    names, slots = figures["arms"], figures["slots"]
    points = [
        {"requests": int(num), "drafts": found[names.index(name)]["mixed"]["drafts"], "by": name}
        for num, found in slots.items()
        for name in PLOTTED
    ]
    scale = alt.Scale(type="log", base=2)
    alt.Chart(alt.InlineData(values=points)).mark_line(point=True).encode(
        x=alt.X("requests:Q", title="requests at once", scale=scale),
        y=alt.Y("drafts:Q", title="drafts per request and step", scale=scale),
        color=alt.Color("by:N", title=None, sort=None),
    ).properties(width=420, height=260).save(path)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    figures: dict[str, Any] = {"arms": [arm.name for arm in ARMS], "slots": {}}
    for num_slots in SLOTS:
        found = [measure(side_of(arm, num_slots), num_slots) for arm in ARMS]
        figures["slots"][num_slots] = found
        print(num_slots, [one["mixed"] for one in found], file=sys.stderr, flush=True)
    write(folder, figures)


def write(folder: Path, figures: dict[str, Any]) -> None:
    """The page and its plot. figures: by number of requests, what each arm reached."""
    names, slots = figures["arms"], figures["slots"]
    rates, drafts = ([[name] for name in names] for _ in range(2))
    for found in slots.values():
        for index, one in enumerate(found):
            ratios = [one[w]["tokens_per_s"] / found[0][w]["tokens_per_s"] for w in one]
            low, high = min(ratios[1:]), max(ratios[1:])
            rates[index].append(f"{ratios[0]:.2f} ({low:.2f} to {high:.2f})")
            mixed = one["mixed"]
            drafts[index].append(f"{mixed['drafts']:.1f}, {mixed['accepted']:.2f}")
    header = ["drafts", *(f"{num_slots} at once" for num_slots in SLOTS)]
    about = (
        f"{TARGET} with {DRAFT} on one {GPU}: step times by roofline, heads {HEADS_S * 1e3:g} ms. "
        "Texts and acceptance are those of the shipped models. Nothing ran on a GPU."
    )
    sections = [
        about,
        "Tokens per second over no speculation, mixed texts (lowest to highest of four workloads):",
        table(header, rates),
        "Drafts and accepted drafts per sequence and step, mixed texts:",
        table(header, drafts),
        "Drafts per request and step that goodput chose, mixed texts:",
        "![Drafts per request and step against the number of requests](trees.svg)",
    ]
    publish(folder, "trees", "Trees of drafts", sections, figures)
    plot(figures, folder / "trees.svg")


if __name__ == "__main__":
    main()
