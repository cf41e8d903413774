"""Medusa heads beside the draft model and prompt lookup, on the shipped pair, expanded.

Each side has its own engine, step loop and clock, in lockstep (`smartspec_bench.lockstep`). All get
the same prompts of the four workloads in turn. Rates are generated tokens per second of the loop,
prompts included. The first round of a size is not counted.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from smartspec_bench.expand import PRESETS, expand_medusa
from smartspec_bench.lockstep import Side, SlotFeed, serve
from smartspec_bench.prompts import MIXED, PROMPT_SEED, generated
from smartspec_cli.commands.quickstart import CACHE, SHIPPED_PAIR, expanded_pair
from smartspec_cli.commands.settings import checked_config, torch_settings
from smartspec_py.serving.build import build_engine
from studies.document import publish, table

MAX_TOKENS, NUM_ROUNDS, NUM_THREADS = 64, 2, 1
SIZES = {1: 20, 8: 40, 32: 64}
"""Requests at once, and requests of a round."""

QUESTION = f"""\
What do Medusa heads bring on a CPU? The shipped pair and its heads, expanded to 88 M and 4 M, in
float32 on one thread, all in lockstep. Answers of {MAX_TOKENS} tokens from the four workloads in
turn, {NUM_ROUNDS} rounds. *lookup*: prompt lookup."""


class Arm(NamedTuple):
    """has_draft, has_heads: what the engine loads. proposer: auto leaves the choice to goodput.
    width: most guesses for one position; 1 drafts chains, which is the default on CPUs."""

    name: str
    policy: str
    proposer: str
    has_draft: bool
    has_heads: bool
    width: int = 1


ARMS = (
    Arm("no speculation", "none", "auto", True, False),
    Arm("draft model, 3 drafts", "fixed:3", "draft_model", True, False),
    Arm("heads, 3 drafts", "fixed:3", "heads", False, True),
    Arm("goodput: draft model, lookup", "goodput", "auto", True, False),
    Arm("goodput: heads, lookup", "goodput", "auto", False, True),
    Arm("goodput: heads, lookup, trees", "goodput", "auto", False, True, 4),
    Arm("goodput: all three", "goodput", "auto", True, True),
    Arm("goodput: all three, trees", "goodput", "auto", True, True, 4),
)


def side_of(arm: Arm, pair: Path, heads: Path, num_slots: int) -> Side:
    engine: dict[str, Any] = torch_settings(
        pair / "target",
        pair / "draft",
        dtype="float32",
        num_threads=NUM_THREADS,
        profile_cache=str(CACHE / "profiles"),
    )
    if not arm.has_draft:
        engine["draft"] = None
    if arm.has_heads:
        engine["heads"] = str(heads)
    limits = {
        "max_sequences": max(8, num_slots),
        "max_context_len": 512,
        "max_tree_width": arm.width,
    }
    config = checked_config({"engine": engine, "limits": limits})
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "reuse_prefix": False}
    if arm.proposer != "auto":
        fields["proposer"] = arm.proposer
    return Side(arm.policy, build_engine(config, Path.cwd()), config, fields)


def measure(sides: list[Side], num_slots: int, num_requests: int) -> list[list[float]]:
    """Tokens per second of each side in each round."""
    rounds = []
    for number in range(NUM_ROUNDS + 1):
        for side in sides:
            prompts = islice(generated(MIXED, PROMPT_SEED + number), num_requests)
            side.begin(SlotFeed(prompts, num_slots))
        serve(sides)
        rates = [
            sum(sum(exchange.chunk_tokens) for exchange in side.exchanges) / side.served_s
            for side in sides
        ]
        print(f"{num_slots} at once, round {number}: {rates}", file=sys.stderr, flush=True)
        rounds.append(rates)
    return rounds[1:]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    pair = expanded_pair(Console(stderr=True))
    found: dict[str, Any] = {"arms": [arm.name for arm in ARMS], "tokens_per_s": {}}
    rows = [[arm.name] for arm in ARMS]
    with tempfile.TemporaryDirectory() as between:
        heads = Path(between) / "heads"
        expand_medusa(SHIPPED_PAIR / "heads", heads, PRESETS["88m"]["hidden_size"])
        for num_slots, num_requests in SIZES.items():
            sides = [side_of(arm, pair, heads, num_slots) for arm in ARMS]
            rounds = measure(sides, num_slots, num_requests)
            found["tokens_per_s"][num_slots] = rounds
            for index, row in enumerate(rows):
                ratios = [rates[index] / rates[0] for rates in rounds]
                mean = statistics.mean(rates[index] for rates in rounds)
                low, high = min(ratios), max(ratios)
                row += [f"{mean:.1f}", f"{statistics.mean(ratios):.2f} ({low:.2f} to {high:.2f})"]
    header = ["drafts"]
    for num_slots in SIZES:
        header += [f"{num_slots} at once, tokens/s", "over no speculation (rounds)"]
    publish(folder, "heads", "Medusa heads", [QUESTION, table(header, rows)], found)


if __name__ == "__main__":
    main()
