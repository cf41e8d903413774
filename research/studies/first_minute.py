"""How soon is `goodput` right? A fresh server's first requests, one at a time.

Each policy has an engine, a step loop and a clock of its own, in lockstep
(`smartspec_bench.lockstep`), and begins with what a server without any stored state knows: the
profile. All get the same prompts, from the four workloads in turn. Rates are tokens a second over
the requests of a group, the prompts' time included; a round is another draw of prompts, and begins
anew.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console

from smartspec_bench.lockstep import Side, SlotFeed, serve
from smartspec_bench.prompts import MIXED, PROMPT_SEED, Prompt, generated
from smartspec_cli.commands.quickstart import CACHE, expanded_pair
from smartspec_cli.commands.settings import checked_config, pair_settings
from smartspec_py.serving.build import build_engine
from studies.document import publish, table

POLICIES = ("none", "fixed:3", "goodput")
GROUPS = {"1 to 5": (0, 5), "6 to 20": (5, 20), "21 to 60": (20, 60)}
ASKED = {"1 to 5": 0.90, "6 to 20": 0.97, "21 to 60": 1.0}
NUM_REQUESTS, MAX_TOKENS, NUM_ROUNDS = 60, 48, 3
SEED_STEP = 1000


def sides_of(policies: Sequence[str], dtype: str) -> dict[str, Side]:
    pair = expanded_pair(Console(stderr=True))
    settings = pair_settings(pair / "target", pair / "draft", dtype, 0)
    limits = {"max_sequences": 8, "max_context_len": 1024}
    config = checked_config(
        {"engine": {**settings, "profile_cache": str(CACHE / "profiles")}, "limits": limits}
    )
    fields = {"max_tokens": MAX_TOKENS, "reuse_prefix": False}
    return {name: Side(name, build_engine(config, Path.cwd()), config, fields) for name in policies}


def measure(sides: Mapping[str, Side], prompts: Sequence[Prompt]) -> dict[str, list[float]]:
    """Tokens a second of each group, by policy."""
    for side in sides.values():
        side.begin(SlotFeed(iter(prompts), 1))
    serve(list(sides.values()))
    found = {}
    for name, side in sides.items():
        starts = [exchange.scheduled_s for exchange in side.exchanges]
        ends = [exchange.chunk_s[-1] for exchange in side.exchanges]
        spent = [end - start for start, end in zip(starts, ends, strict=True)]
        num = [sum(exchange.chunk_tokens) for exchange in side.exchanges]
        found[name] = [sum(num[a:b]) / sum(spent[a:b]) for a, b in GROUPS.values()]
    return found


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    policies = tuple(sys.argv[2].split(",")) if len(sys.argv) > 2 else POLICIES
    dtype = sys.argv[3] if len(sys.argv) > 3 else "float32"
    first = sides_of(policies, dtype)
    rounds = []
    for number in range(NUM_ROUNDS):
        # The engines stay; what was learned goes.
        sides = {name: side.renewed() for name, side in first.items()}
        prompts = list(islice(generated(MIXED, PROMPT_SEED + SEED_STEP * number), NUM_REQUESTS))
        rounds.append(measure(sides, prompts))
        print(f"round {number + 1} of {NUM_ROUNDS}: {rounds[-1]}", file=sys.stderr, flush=True)
    rows = []
    for index, group in enumerate(GROUPS):
        rates = {p: statistics.mean(one[p][index] for one in rounds) for p in policies}
        ratios = [
            one[policies[-1]][index] / max(one[p][index] for p in policies[:-1]) for one in rounds
        ]
        rows.append(
            [
                group,
                *(f"{rates[p]:.1f}" for p in policies),
                f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{ASKED[group]:.2f}",
            ]
        )
    header = ["requests", *(f"{p}, tokens/s" for p in policies)]
    header += [f"{policies[-1]} / the best of the others (rounds)", "asked"]
    publish(folder, "first_minute", "The first minute", [table(header, rows)], {"rounds": rounds})


if __name__ == "__main__":
    main()
