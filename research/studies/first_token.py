"""The value of prompts in a plan, and what requests lose to each other under load.

Speculation makes steps longer. A request whose prompt is read in the step gains nothing by that,
and one with few accepted drafts little. The server's own loop and controller run in the simulator,
on the same requests, with `none`, fixed lengths, `goodput`, and `goodput` with other rules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from smartspec_bench.progress import tracked
from smartspec_py.core.plan import search, step
from studies.ablation_loads import LOAD, Condition, Measured, conditions, saturated
from studies.document import publish, table

SEEDS = (1, 2, 3)
Changes = Sequence[tuple[Any, str, Any]]

RULES: dict[str, tuple[str, Changes]] = {
    "none": ("none", ()),
    "fixed:1": ("fixed:1", ()),
    "fixed:3": ("fixed:3", ()),
    "goodput": ("goodput", ()),
    "a prompt counts 0": ("goodput", [(step, "PREFILLING_TOKENS", 0.0)]),
    "a prompt counts 4": ("goodput", [(step, "PREFILLING_TOKENS", 4.0)]),
    "a prompt counts 16": ("goodput", [(step, "PREFILLING_TOKENS", 16.0)]),
    "the step's rate": ("goodput", [(search, "_weighed", lambda step, alike, seconds: step)]),
}
MEASURES = {
    "latency_s": "mean latency",
    "ttft_s": "mean first token",
}


def loads() -> list[Condition]:
    return [one for one in conditions() if one.group == LOAD] + saturated()


def of_load(index: int) -> dict[str, list[float]]:
    """By rule the measures of `Measured`, as ratios to `none`: geometric means over the seeds."""
    load = loads()[index]
    found: dict[str, list[list[float]]] = {name: [] for name in RULES}
    for seed in SEEDS:
        for name, (policy, changes) in RULES.items():
            load.requests(seed)  # its rate is measured on the rules as they are
            with ExitStack() as stack:
                for change in changes:
                    stack.enter_context(patch.object(*change))
                run = load.run(seed, policy)
            found[name].append([getattr(run, field.name) for field in fields(Measured)])
    logs = {name: np.mean(np.log(runs), axis=0) for name, runs in found.items()}
    return {name: np.exp(log - logs["none"]).round(4).tolist() for name, log in logs.items()}


def main() -> None:
    """argv: the folder to write to."""
    every = loads()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = pool.map(of_load, range(len(every)))
        found = list(tracked("first_token", runs, "loads", len(every)))
    names = [field.name for field in fields(Measured)]
    open_loads = [(load, ratios) for load, ratios in zip(every, found, strict=True) if load.is_open]
    shown = [rule for rule in RULES if rule not in ("none", "the step's rate")]
    tables = [
        table(
            [f"{title}, over none", *shown],
            [
                [load.name, *(ratios[rule][names.index(measure)] for rule in shown)]
                for load, ratios in open_loads
            ],
        )
        for measure, title in MEASURES.items()
    ]
    publish(
        Path(sys.argv[1]),
        "first_token",
        "First tokens under load",
        [ANSWER, *tables, METHOD],
        {"loads": {load.name: ratios for load, ratios in zip(every, found, strict=True)}},
    )


ANSWER = """\
How long does speculation delay the first token? A request whose prompt is read counts as 8 tokens
of every step (`core/plan/step.py`). With few running requests nothing is drafted beside a prompt,
and with many they draft as before."""

METHOD = f"""\
*a prompt counts 0*: 0 instead of 8 tokens. The server's own loop in the simulator, with Poisson
arrivals at shares of the rate at which `none` is saturated, prompts and outputs of about 120
tokens, and an acceptance of 0.67 with a standard deviation of 0.1 between requests, unless a load
says otherwise. Geometric means over {len(SEEDS)} seeds. The JSON file also has p99 latency and the
throughput at saturation."""


if __name__ == "__main__":
    main()
