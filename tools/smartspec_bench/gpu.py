"""Served texts on a GPU: policies under load, and tokens that differ. One table for each load.

    python3 -m smartspec_bench.gpu [PART ...] [--dry-run] [--model FOLDER] [--heads FOLDER]

The parts are `policies`, `trees`, `float8`, `texts`, in this order, and each table is printed as it
ends. Without a model, it is the shipped tiny pair, expanded to 1 B and 40 M; `trees` has its Medusa
heads instead of its draft model. Needs the packages of `scripts/bench --gpu`, see
docs/evaluate/benchmarks.md. With --dry-run, loads are tiny and the tiny pair itself runs on a CPU,
to try the script.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from smartspec_bench.exactness import (
    NO_SPECULATION,
    CheckArm,
    check_pair_exactness,
    force_drafting,
    reference,
)
from smartspec_bench.expand import PRESETS, expand, expand_medusa
from smartspec_bench.lockstep import NONE, Feed, Side, serve
from smartspec_bench.plan import Due
from smartspec_bench.prompts import MIXED, PROMPT_SEED, TINY, Prompt, chat_template, generated
from smartspec_bench.report import markdown_table
from smartspec_bench.results import phase_of
from smartspec_launch import paths
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import ServerConfig
from smartspec_py.engines.runtimes.pytorch.float8 import has_float8
from smartspec_py.serving.build import build_engine
from smartspec_testing.local import serving

TINY_PAIR = Path(__file__).parents[2] / "engines_build" / "tiny"
EXPANDED = Path(".smartspec") / "gpu_pair"

GOODPUT, CHAINS = "goodput", "goodput without trees"
FIXED = ("fixed:1", "fixed:3", "fixed:7")

NUM_REQUESTS = {1: 12, 64: 256, 8: 32, 32: 128, 4: 16}
"""By the number at once, as in docs/research/performance-gpu.md."""

CHECKED = {"float32": 5_000, "bfloat16": 200_000, "fp8": 200_000}
"""Tokens that are compared, at least."""

COLUMNS = ("policy", "time", "tokens/s", "mean, ms", "p99", "first token", "drafts", "texts differ")
PARTS_OF_STEP = ("plan", "drafts", "pass", "other")


@dataclass(frozen=True)
class Served:
    """What is served. draft: a model. heads: used where there is no draft. workload: see
    `prompts`."""

    model: Path
    draft: Path | None
    heads: Path | None
    workload: str
    is_dry: bool

    def config(self, num_rows: int, precision: str = "bfloat16") -> ServerConfig:
        """precision: of the weights."""
        is_float8, dtype = precision == "fp8", precision
        engine = {
            "kind": "local",
            "model": str(self.model.absolute()),
            "draft": None if self.draft is None else str(self.draft.absolute()),
            "heads": None if self.draft or not self.heads else str(self.heads.absolute()),
            "device": "cpu" if self.is_dry else "cuda",
            "num_threads": int(self.is_dry),  # several would wait for each other
            "runtime": "torch",
            "dtype": "float32" if self.is_dry else "bfloat16" if is_float8 else dtype,
            "weights": "fp8" if is_float8 and not self.is_dry else "stored",
            "profile_cache": str(paths.profile_cache().absolute()),
        }
        limits: dict[str, Any] = {"max_sequences": num_rows, "max_queue": 4096}
        limits |= {"max_context_len": 512} | ({"profile_s": 0.0} if self.is_dry else {})
        return ServerConfig.model_validate({"engine": engine, "limits": limits})

    def sides(
        self, names: Sequence[str], num_rows: int, precision: str = "bfloat16"
    ) -> dict[str, Side]:
        """Policies on one engine, each with a cost model of its own. They cannot run in turns."""
        config = self.config(num_rows, precision)
        engine = build_engine(config, Path.cwd())
        fields = {"max_tokens": 8 if self.is_dry else 96, "reuse_prefix": False}
        sides = {}
        for name in names:
            proposers = {key: copy(proposer) for key, proposer in engine.proposers.items()}
            if name == CHAINS:
                for proposer in proposers.values():
                    able = replace(proposer.capabilities, tree_context_len=None)
                    proposer.capabilities = able
            own = replace(engine, proposers=proposers, cost=deepcopy(engine.cost))
            policy = GOODPUT if name == CHAINS else name
            sides[name] = Side(policy, own, config.limits, fields)
        return sides

    def prompts(self, num: int, seed: int) -> list[Prompt]:
        template = str if self.workload == TINY else chat_template(self.model)
        return list(islice(generated(self.workload, PROMPT_SEED + seed, template), num))


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table in Markdown."""
    cells = ([f"{one:.3g}" if isinstance(one, float) else str(one) for one in row] for row in rows)
    print(f"\n### {title}\n\n{markdown_table(head, cells)}", flush=True)


def policies(served: Served) -> None:
    """No speculation, fixed lengths and goodput; with heads, also goodput without trees. Loops keep
    what they learned, so the load rises and falls."""
    names = (NONE, *FIXED, GOODPUT) if served.draft else (NONE, *FIXED, CHAINS, GOODPUT)
    _compare(served, names, (1, 64, 8, 32))


def trees(served: Served) -> None:
    """Goodput with trees of drafts and with chains only."""
    _compare(replace(served, draft=None), (NONE, CHAINS, GOODPUT), (1, 4, 8))


def float8(served: Served) -> None:
    """Weights of 8 bits beside bfloat16."""
    if not served.is_dry and not has_float8(torch.device("cuda")):
        print("\nno float8 on this device")
        return
    num_rows = 2 if served.is_dry else 32
    sides = {
        f"{policy}, {precision}": side
        for precision in ("bfloat16", "fp8")
        for policy, side in served.sides((NONE, GOODPUT), num_rows, precision).items()
    }
    _run(served, sides, (1, 8, 32))


def _compare(served: Served, names: Sequence[str], loads: Sequence[int]) -> None:
    num_rows = 2 if served.is_dry else max(loads)
    _run(served, served.sides(names, num_rows), loads)


def _run(served: Served, sides: Mapping[str, Side], loads: Sequence[int]) -> None:
    """A table for each load, after a warm-up. Times are shares of that of the first side."""
    _serve(sides, served.prompts(2, seed=0), 2)
    for load in (1, 2) if served.is_dry else loads:
        num_requests = 3 if served.is_dry else NUM_REQUESTS[load]
        _serve(sides, served.prompts(num_requests, seed=load), load)
        first = next(iter(sides.values()))
        rows = [
            (name, side.served_s / first.served_s, *_figures(side, first), *_step_ms(side))
            for name, side in sides.items()
        ]
        columns = *COLUMNS, *(f"{part}, ms a step" for part in PARTS_OF_STEP)
        table(f"{num_requests} requests, {load} at once", columns, rows)


def _serve(sides: Mapping[str, Side], prompts: Sequence[Prompt], num_at_once: int) -> None:
    """One policy after another: a GPU is as fast for the last as for the first, and one engine
    starts sooner than five."""
    for side in sides.values():
        side.begin(Feed([Due(0.0, prompt) for prompt in prompts], num_at_once))
        serve([side])


def _figures(side: Side, first: Side) -> tuple[Any, ...]:
    phase = phase_of(side.policy, ("at once", "", 0.0), 0, side.exchanges)
    num_tokens = sum(map(len, side.tokens))
    num_different = sum(a != b for a, b in zip(side.tokens, first.tokens, strict=True))
    mean_ms, p99_ms, first_ms = phase.e2e_ms["mean"], phase.e2e_ms["p99"], phase.ttft_ms["mean"]
    speed = num_tokens / side.served_s
    return speed, mean_ms, p99_ms, first_ms, phase.mean_draft_len, num_different


def _step_ms(side: Side) -> list[float]:
    """Where the time of the last steps went, as in PARTS_OF_STEP."""
    parts = [
        (one.views_s + one.plan_s, one.draft_s, one.target_s, one.total_s) for one in side.records
    ]
    plan_s, draft_s, pass_s, total_s = (fmean(part) for part in zip(*parts, strict=True))
    return [1e3 * s for s in (plan_s, draft_s, pass_s, total_s - plan_s - draft_s - pass_s)]


def texts(served: Served) -> None:
    """Tokens that differ from those without speculation, by precision."""
    for precision, num_tokens in CHECKED.items():
        if precision == "fp8" and not served.is_dry and not has_float8(torch.device("cuda")):
            continue
        config = served.config(2 if served.is_dry else 32, precision)
        engine = build_engine(config, Path.cwd())
        requests = [
            GenerateParams(prompt.text, 8 if served.is_dry else 64, temperature=temperature)
            for prompt in served.prompts(1 if served.is_dry else 16, seed=1)
            for temperature in (0.0, 0.7)
        ]
        requests = [replace(one, seed=i, return_log_probs=True) for i, one in enumerate(requests)]
        arms = [NO_SPECULATION, CheckArm("fixed:3"), CheckArm(GOODPUT)]
        with serving(engine, config) as server:
            force_drafting(server, config)
            cases = reference(server, requests)
            wanted = 1 if served.is_dry else num_tokens
            reports = check_pair_exactness(server, cases, arms, wanted)
        counts = ("tokens", "drafted", "accepted", "bits")
        rows = [
            (report.arm, report.mode, *map(report.counts.get, counts), len(report.divergences))
            for report in reports
        ]
        table(f"Texts in {precision}", ("policy", "run", *counts, "texts differ"), rows)


PARTS: dict[str, Callable[[Served], None]] = {
    part.__name__: part for part in (policies, trees, float8, texts)
}


def _expanded() -> Path:
    """The tiny pair at the cost of larger models."""
    pair, size = EXPANDED, PRESETS["1b"]
    if not pair.is_dir():
        expand(TINY_PAIR / "target", pair / "target", size)
        expand(TINY_PAIR / "draft", pair / "draft", PRESETS["40m"])
        expand_medusa(TINY_PAIR / "heads", pair / "heads", size["hidden_size"])
    return pair


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """A wrong option ends the program before it takes time on a GPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all, or of {', '.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--heads", type=Path)
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"PART: got {name!r}, must be one of {', '.join(PARTS)}")
    for name in ("model", "heads"):
        if (folder := getattr(options, name)) and not folder.is_dir():
            parser.error(f"--{name}: {folder} is no folder")
    return options


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    is_dry = options.dry_run
    if options.model:
        served = Served(options.model, None, options.heads, MIXED, is_dry)
    else:
        pair = TINY_PAIR if is_dry else _expanded()
        served = Served(pair / "target", pair / "draft", pair / "heads", TINY, is_dry)
    for name in options.parts or PARTS:
        start = time.perf_counter()
        try:
            PARTS[name](served)
        except Exception as error:  # the other parts do not fail
            print(f"\n{name} failed: {type(error).__name__}: {error}", flush=True)
            if is_dry:
                raise
        gc.collect()  # models and their graphs
        print(f"\n({name}: {time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
