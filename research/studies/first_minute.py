"""How soon is `goodput` right? The first requests of a fresh server, one at a time.

Each policy has its own engine, step loop and clock, in lockstep (`smartspec_bench.lockstep`). It
starts with the knowledge of a server without stored state: the profile. A second `goodput` starts
as after a restart, with what `goodput` had learned by the end of the previous round. All get the
same prompts, alternating between the four workloads. Rates are tokens per second over the requests
of a group, including the time of the prompts. Each round uses other prompts and starts without
learned estimates. The first round only provides estimates for the restart.
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
from smartspec_py.serving.learned import MOST_KEPT
from studies.document import publish, table

POLICIES = ("none", "fixed:3", "goodput")
RESTARTED = "goodput, restarted"
GROUPS = {"1 to 5": (0, 5), "6 to 20": (5, 20), "21 to 60": (20, 60)}
ASKED = {"1 to 5": (0.90, 1.0), "6 to 20": (0.97, 1.0), "21 to 60": (1.0, 1.0)}
"""Of `goodput`, and of the same after a restart."""

NUM_REQUESTS, MAX_TOKENS, NUM_ROUNDS = 60, 48, 3
SEED_STEP = 1000

QUESTION = f"""\
How soon is `goodput` right? A fresh server gets {NUM_REQUESTS} requests, one at a time, from the
four workloads in turn, with the 88 M and 4 M pair in lockstep. *restarted*: with half of the
evidence that `goodput` had stored after other prompts. Means over {NUM_ROUNDS} rounds; *asked* is
the goal."""


def sides_of(policies: Sequence[str], dtype: str) -> dict[str, Side]:
    pair = expanded_pair(Console(stderr=True))
    settings = pair_settings(pair / "target", pair / "draft", dtype, 0)
    limits = {"max_sequences": 8, "max_context_len": 1024}
    config = checked_config(
        {"engine": {**settings, "profile_cache": str(CACHE / "profiles")}, "limits": limits}
    )
    fields = {"max_tokens": MAX_TOKENS, "reuse_prefix": False}
    return {
        name: Side(name.partition(",")[0], build_engine(config, Path.cwd()), config, fields)
        for name in policies
    }


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
    sides = sides_of((*policies, RESTARTED), dtype)
    rounds: list[dict[str, list[float]]] = []
    for number in range(NUM_ROUNDS + 1):
        # The engines stay. What was learned is dropped, except for what a restart keeps.
        learned = sides["goodput"].state()
        sides = {name: side.renewed() for name, side in sides.items()}
        if number:
            sides[RESTARTED].restore(learned, MOST_KEPT)
        prompts = list(islice(generated(MIXED, PROMPT_SEED + SEED_STEP * number), NUM_REQUESTS))
        rounds.append(measure(sides, prompts))
        print(f"round {number} of {NUM_ROUNDS}: {rounds[-1]}", file=sys.stderr, flush=True)
    rounds = rounds[1:]
    rows = []
    for index, group in enumerate(GROUPS):
        named = (*policies, RESTARTED)
        rates = {p: statistics.mean(one[p][index] for one in rounds) for p in named}
        cells = [group, *(f"{rates[p]:.1f}" for p in named)]
        for name, asked in zip((policies[-1], RESTARTED), ASKED[group], strict=True):
            ratios = [
                one[name][index] / max(one[p][index] for p in policies[:-1]) for one in rounds
            ]
            mean = statistics.mean(ratios)
            cells += [f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})", f"{asked:.2f}"]
        rows.append(cells)
    header = ["requests", *(f"{p}, tokens/s" for p in named)]
    for name in (policies[-1], RESTARTED):
        header += [f"{name} / the better of the others (rounds)", "asked"]
    sections = [QUESTION, table(header, rows)]
    publish(folder, "first_minute", "The first minute", sections, {"rounds": rounds})


if __name__ == "__main__":
    main()
