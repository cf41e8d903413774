"""What trees from several sources could gain, by arithmetic on real drafts.

Texts and drafts are those of the shipped pair, its heads and prompt lookup, greedy. For each
position of a text, the study records which guess of each source is right. From this follows what
any tree would have accepted there. Step times are modelled: Llama 3 8B with a draft model of 1B on
one H100 by roofline, and a profile that was measured on a CPU. No clock is involved.

Each arm is a set of drafts that may be chosen. The choice depends on the workload and on the match
of prompt lookup, and it has the best goodput for the known mean acceptance of each such class. So
the figures are upper bounds for a planner that must learn acceptance, equally for all arms.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from smartspec_bench.prompts import PROMPT_SEED, generated
from smartspec_bench.workloads import WORKLOADS
from smartspec_cli.commands.quickstart import REPOSITORY, SHIPPED_PAIR
from smartspec_cli.commands.settings import checked_config
from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.trees import TreeSpace
from smartspec_py.core.types import ROOT, SamplingParams, Tree
from smartspec_py.engines.base import DraftTask
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.tree import depths
from smartspec_py.proposers.prompt_lookup import PromptLookupProposer
from smartspec_py.serving.build import build_engine
from smartspec_py.serving.config import DRAFT_MODEL, HEADS
from smartspec_py.serving.profile import load_cost
from smartspec_sim.acceptance import NO_RANK, GuessRanks
from smartspec_sim.hardware import gpu_hardware
from studies.document import publish, table

Array = NDArray[Any]

NO_SAMPLING = SamplingParams()

GPU, TARGET, DRAFT = "h100", "llama-3-8b", "llama-3.2-1b"
CPU_PROFILE = REPOSITORY / "docs" / "results" / "traces" / "profile-88m.json"
HEADS_S = {"H100": 0.3e-3, "CPU": 0.5e-3}
SLOTS = (1, 2, 8, 32)
NUM_TEXTS, MAX_TOKENS, CONTEXT_LEN = 40, 64, 128
DEPTH, TREE_DEPTH, WIDTH = 6, 4, 4
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LOOKUP_LENS = (1, 2, 3, 4, 6, 8, 12)
MATCHES = 3
NUM_ROUNDS = 6
"""Choices, each with the classes as often as they were met under the one before."""


class Text(NamedTuple):
    """workload. By position: kinds of the best match; ranks of the draft model's and the heads'
    right guesses, [positions, depth]; accepted drafts of each of the best matches."""

    workload: str
    kinds: list[str]
    draft: Array
    heads: Array
    lookups: list[list[int]]


class Drafts(NamedTuple):
    """What an arm can choose for a step. num: drafts. rows: rows of each draft pass. has_heads:
    whether heads are computed. accepted: by text and position."""

    name: str
    num: int
    rows: tuple[int, ...]
    has_heads: bool
    accepted: list[Array]
    fits: Callable[[str], bool] = bool


def texts() -> Iterator[Text]:
    pair = SHIPPED_PAIR
    engine = {
        "kind": "torch",
        "model": str(pair / "target"),
        "draft": str(pair / "draft"),
        "heads": str(pair / "heads"),
        "runtime": "torch",
        "dtype": "float32",
    }
    limits = {"max_sequences": 2, "max_context_len": 256, "profile_s": 0.0}
    built = build_engine(checked_config({"engine": engine, "limits": limits}), Path.cwd())
    target: Any = built.target
    draft, heads = (cast(Any, built.proposers[name]) for name in (DRAFT_MODEL, HEADS))
    for workload in WORKLOADS:
        for prompt in islice(generated(workload, PROMPT_SEED), NUM_TEXTS):
            known = built.tokenizer.encode(prompt.text).ids
            runners = target.runner, draft.runner, heads.heads
            yield _text(workload, known, built.end_tokens, *runners)


@torch.inference_mode()
def _text(
    workload: str, prompt: list[int], ends: Sequence[int], target: Any, draft: Any, heads: Any
) -> Text:
    known = list(prompt)
    read, hidden = 0, []
    while len(known) <= len(prompt) + MAX_TOKENS and known[-1] not in ends:
        out = target.forward([RowInput(0, read, known[read:], 1)])
        read = len(known)
        hidden.append(out.hidden[-1])
        known.append(int(out.logits[-1].argmax()))
    # Position i is the draft after the tokens known[: start + i]; the first token has no state.
    start, drawn = len(prompt) + 1, known[len(prompt) + 1 :]
    logits = draft.forward([RowInput(0, 0, known[:-1], len(drawn))]).logits
    ranks = _ranks(logits.topk(WIDTH).indices.tolist(), drawn)
    shifted = [ranks[i : i + DEPTH] + [NO_RANK] * DEPTH for i in range(len(drawn))]
    guesses = heads.logits(torch.stack(hidden[:-1]).float()).topk(WIDTH).indices.tolist()
    of_heads = [_ranks(one, drawn[i:]) for i, one in enumerate(guesses)]
    found = [_lookups(known, start + i) for i in range(len(drawn))]
    return Text(
        workload,
        [kind for kind, _ in found],
        np.array([one[:DEPTH] for one in shifted]),
        np.array([one + [NO_RANK] * (heads.num_heads - len(one)) for one in of_heads]),
        [[_num_right(one, drawn[i:]) for one in many] for i, (_, many) in enumerate(found)],
    )


def _ranks(guesses: Sequence[Sequence[int]], true: Sequence[int]) -> list[int]:
    pairs = zip(guesses, true, strict=False)
    return [of_one.index(token) if token in of_one else NO_RANK for of_one, token in pairs]


def _num_right(drafts: Sequence[int], true: Sequence[int]) -> int:
    pairs = enumerate(zip(drafts, true, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafts), len(true)))


def _lookups(known: Sequence[int], end: int) -> tuple[str, list[list[int]]]:
    """The kind of the best match, and what followed the best matches with different next tokens:
    longer matches first, later ones first."""
    text, most = list(known[:end]), LOOKUP_LENS[-1]
    proposer, task = PromptLookupProposer(most), DraftTask(0, text, 0, most, NO_SAMPLING)
    if not proposer.num_available(0, text):
        return "none", []
    found = [list(proposer.propose([task])[0].tokens)]
    for n in (4, 3, 2):
        for at in range(end - 1, n - 1, -1):
            is_new = all(text[at] != one[0] for one in found)
            if is_new and text[at - n : at] == text[-n:]:
                found.append(text[at : at + most])
    return proposer.cohort(0), found[:MATCHES]


def _shapes(ranks: Array, width: int) -> Iterator[Tree]:
    """The best trees of each number of nodes, by how often each rank is right. ranks: [positions,
    depth]."""
    depth = ranks.shape[1]
    best, others = np.zeros((1, depth)), np.zeros((depth, width))
    known = ranks
    for at in range(depth):
        wrong = known[known[:, at] != 0, at]
        best[0, at] = 1.0 - len(wrong) / len(known)
        others[at] = [(wrong == rank).mean() for rank in range(width)]
        known = known[known[:, at] == 0]
    space = TreeSpace(depth, width)
    (nodes,), _ = space.ranked(best, np.maximum(others, 1e-6), NODES[-1])
    for num in NODES:
        if num <= len(nodes):
            yield space.tree(nodes[:num].tolist())


def _rows(tree: Tree) -> tuple[int, ...]:
    """Rows of each draft pass: the nodes that have children, by depth."""
    of_nodes = depths(tree.parents)
    inner = [of_nodes[parent + 1] for parent in set(tree.parents)]
    return tuple(inner.count(depth) for depth in range(max(of_nodes)))


def _drafts(of_one: Sequence[Text]) -> dict[str, list[Drafts]]:
    """By source, what it can draft on one workload. `none` is no draft."""

    def tree(name: str, shape: Tree, rows: tuple[int, ...] = ()) -> Drafts:
        sources = [one.heads if name == "heads" else one.draft for one in of_one]
        found = [
            np.array([len(GuessRanks(ranks).path(i, shape)) for i in range(len(ranks))])
            for ranks in sources
        ]
        return Drafts(name, len(shape.ranks), rows, name == "heads", found)

    def lookup(lengths: Sequence[int]) -> Drafts:
        found = [
            np.array(
                [
                    max((min(k, n) for k, n in zip(right, lengths, strict=False)), default=0)
                    for right in one.lookups
                ]
            )
            for one in of_one
        ]
        return Drafts("lookup", sum(lengths), (), False, found, lambda kind: kind != "none")

    drafted, guessed = (np.concatenate([getattr(t, n) for t in of_one]) for n in ("draft", "heads"))
    found: dict[str, list[Drafts]] = {
        "none": [Drafts("none", 0, (), False, [np.zeros(len(one.kinds)) for one in of_one])],
        "chain": [
            tree("draft", Tree(tuple(range(ROOT, k - 1)), (0,) * k), (1,) * k)
            for k in range(1, DEPTH + 1)
        ],
        "lookup": [lookup((n,)) for n in LOOKUP_LENS],
        "lookups": [
            lookup((n, *(more,) * num))
            for n in LOOKUP_LENS
            for more in (1, 2, 4)
            for num in range(1, MATCHES)
            if more <= n
        ],
        "heads": [tree("heads", one) for one in _shapes(guessed, WIDTH)],
        "tree": [tree("draft", one, _rows(one)) for one in _shapes(drafted[:, :TREE_DEPTH], WIDTH)],
    }
    for one, other in (("lookup", "heads"), ("lookup", "chain"), ("heads", "chain")):
        found[f"{one}+{other}"] = [_merged(a, b) for a in found[one] for b in found[other]]
    return found


def _merged(one: Drafts, other: Drafts) -> Drafts:
    """One tree of both. Nodes that they share count twice."""
    pairs = zip(one.accepted, other.accepted, strict=True)
    return Drafts(
        f"{one.name}+{other.name}",
        one.num + other.num,
        one.rows or other.rows,
        one.has_heads or other.has_heads,
        [np.maximum(a, b) for a, b in pairs],
        one.fits,
    )


class Times(NamedTuple):
    """Of one number of sequences: seconds of a target pass by its tokens, from 0; of a draft pass
    by its rows, from 0; of the heads."""

    target: Array
    draft: Array
    heads: float


def times_of(cost: CostModel, num_slots: int, heads_s: float) -> Times:
    """A pass that only some steps run is charged in proportion."""
    most = num_slots * (2 * NODES[-1])
    target = [cost.target_s(num_slots, max(n, num_slots), CONTEXT_LEN) for n in range(most + 1)]
    draft = [0.0, *(cost.draft_s(n) for n in range(1, 8 * num_slots + 1))]
    return Times(np.array(target), np.array(draft), heads_s)


class Mixture:
    """Steps of num_slots sequences whose drafts are chosen by class."""

    def __init__(self, choices: Sequence[Drafts], times: Times, num_slots: int) -> None:
        self.choices, self.times, self.num_slots = choices, times, num_slots
        self.nums = np.array([one.num for one in choices], dtype=float)
        self.rows = np.array([[*one.rows, *[0] * (DEPTH - len(one.rows))] for one in choices])
        self.has_heads = np.array([one.has_heads for one in choices], dtype=float)

    def seconds(self, weights: Array) -> Array:
        """Of a step, given how often each choice is made; weights: [cases, choices]."""
        slots, times = self.num_slots, self.times
        at = np.arange(len(times.target))
        if slots == 1:
            verify = weights @ np.interp(1 + self.nums, at, times.target)
        else:
            verify = np.interp(slots * (1 + weights @ self.nums), at, times.target)
        rows = slots * (weights @ self.rows)
        passes = np.interp(rows, np.arange(len(times.draft)), times.draft).sum(axis=-1)
        heads = times.heads * np.minimum(1.0, slots * (weights @ self.has_heads))
        return np.asarray(verify + passes + heads)

    def best(self, shares: Mapping[str, float], gains: Mapping[str, Array]) -> dict[str, int]:
        """The choice of each class with the best goodput, by improving one class at a time. It
        starts from the best choice for all classes together."""
        tokens = 1.0 + sum(share * np.maximum(gains[kind], 0) for kind, share in shares.items())
        alike = int((tokens / self.seconds(np.eye(len(self.choices)))).argmax())
        chosen = {kind: alike if gains[kind][alike] >= 0 else 0 for kind in shares}
        for _ in range(3):
            for kind, share in shares.items():
                weights = np.zeros(len(self.choices))
                tokens = 1.0
                for other, at in chosen.items():
                    if other != kind:
                        weights[at] += shares[other]
                        tokens += shares[other] * gains[other][at]
                cases = weights + share * np.eye(len(self.choices))
                scores = (tokens + share * gains[kind]) / self.seconds(cases)
                chosen[kind] = int(scores.argmax())
        return chosen


def goodput(of_one: Sequence[Text], mixture: Mixture) -> tuple[float, float]:
    """Tokens and seconds per step. Each half of the texts is drafted for as is best for the
    other half."""
    halves = [range(half, len(of_one), 2) for half in (0, 1)]
    tokens = seconds = 0.0
    for own, other in (halves, halves[::-1]):
        chosen: dict[str, int] = defaultdict(int)
        rounds = []
        for _ in range(NUM_ROUNDS):
            met, *ratio = _walk(of_one, mixture, other, chosen)
            rounds.append((ratio[0] / ratio[1], chosen))
            total = sum(map(len, met.values()))
            shares = {kind: len(at) / total for kind, at in met.items()}
            chosen = chosen | mixture.best(shares, _gains(mixture, met))
        _, chosen = max(rounds, key=itemgetter(0))
        _, of_half, half_s = _walk(of_one, mixture, own, chosen)
        tokens, seconds = tokens + of_half, seconds + half_s
    return tokens, seconds


def _walk(
    of_one: Sequence[Text], mixture: Mixture, numbers: range, chosen: Mapping[str, int]
) -> tuple[dict[str, list[tuple[int, int]]], float, float]:
    """By class, the text and position of each step; then the mean tokens and seconds of a step."""
    met: dict[str, list[tuple[int, int]]] = defaultdict(list)
    weights, gained = np.zeros(len(mixture.choices)), 0
    for number in numbers:
        kinds, position = of_one[number].kinds, 0
        while position < len(kinds):
            kind = kinds[position]
            met[kind].append((number, position))
            weights[chosen[kind]] += 1
            accepted = int(mixture.choices[chosen[kind]].accepted[number][position])
            gained += accepted
            position += 1 + accepted
    num_steps = weights.sum()
    return met, 1 + gained / num_steps, float(mixture.seconds(weights[None] / num_steps)[0])


def _gains(mixture: Mixture, met: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, Array]:
    """Mean accepted drafts of each choice, by class; less than 0 where it cannot be chosen."""
    return {
        kind: np.array(
            [
                np.mean([one.accepted[n][i] for n, i in at]) if one.fits(kind) else -9.0
                for one in mixture.choices
            ]
        )
        for kind, at in met.items()
    }


PAIRED = ("none", "chain", "lookup")
HEADED = ("none", "heads", "lookup")
ABOUT = """Greedy texts of the shipped models, with modelled step times: Llama 3 8B and a draft
model of 1B on one H100, and the 88 M pair on a CPU by its measured profile. For each match of
prompt lookup and workload, drafts have the best goodput for their known mean acceptance, taken
from other texts. A planner that has to learn acceptance reaches less.

Each cell has chat, sql, summarize and qa: tokens per second for *draft model, lookup*, *heads,
lookup* and *all*; for the others the ratio to the arm above that they extend."""
ALL = ("none", "chain", "tree", "heads", "lookup")
ARMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "draft model, lookup": (PAIRED, PAIRED),
    "with trees of the draft model": ((*PAIRED, "tree"), PAIRED),
    "with several matches of lookup": ((*PAIRED, "lookups"), PAIRED),
    "with trees of draft model and lookup": ((*PAIRED, "lookup+chain"), PAIRED),
    "heads, lookup": (HEADED, HEADED),
    "with trees of heads and lookup": ((*HEADED, "lookup+heads"), HEADED),
    "all": (ALL, ALL),
    "all, with trees of two sources": (
        (*ALL, "lookup+heads", "lookup+chain", "heads+chain"),
        ALL,
    ),
}
"""Sources of each arm, and of the arm that it is compared with."""


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    found = list(texts())
    machines = {
        "H100": gpu_hardware(GPU, 1, TARGET, DRAFT, max(SLOTS)).cost,
        "CPU": load_cost(CPU_PROFILE),
    }
    rates: dict[tuple[str, int, str, tuple[str, ...]], float] = {}
    for workload in WORKLOADS:
        of_one = [one for one in found if one.workload == workload]
        drafts = _drafts(of_one)
        for machine, cost in machines.items():
            for num_slots in SLOTS:
                times = times_of(cost, num_slots, HEADS_S[machine])
                for sources in {one for pair in ARMS.values() for one in pair}:
                    choices = [one for name in sources for one in drafts[name]]
                    tokens, seconds = goodput(of_one, Mixture(choices, times, num_slots))
                    rates[machine, num_slots, workload, sources] = num_slots * tokens / seconds
        print(workload, file=sys.stderr, flush=True)
    sections, figures = [ABOUT], {}
    for machine in machines:
        rows = []
        for name, (sources, base) in ARMS.items():
            row = [name]
            for num_slots in SLOTS:
                ratios = [
                    rates[machine, num_slots, w, sources] / rates[machine, num_slots, w, base]
                    if sources != base
                    else rates[machine, num_slots, w, sources]
                    for w in WORKLOADS
                ]
                figures[f"{machine}, {num_slots}, {name}"] = ratios
                row.append(", ".join(f"{r:.3f}" if r < 9 else f"{r:.0f}" for r in ratios))
            rows.append(row)
        header = [machine, *(f"{num_slots} at once" for num_slots in SLOTS)]
        sections.append(table(header, rows))
    publish(folder, "tree_sources", "Trees from several sources", sections, figures)


if __name__ == "__main__":
    main()
