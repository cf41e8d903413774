"""Lockstep on a CUDA device: `scripts/bench --gpu`. Never run on a GPU.

Needs PyTorch, Transformers, tokenizers and safetensors only, because the Python of a GPU image
often has no more. So the configuration is in plain classes here, without pydantic.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from smartspec_bench.expand import PRESETS, expand
from smartspec_bench.lockstep import Side, run
from smartspec_bench.plan import CLOSED, STEADY, STEP, Settings
from smartspec_bench.report import markdown, page
from smartspec_bench.results import BenchError, Recorder, described
from smartspec_py.defaults import PROMPT_LOOKUP, ConfigError
from smartspec_py.engines.engine import Engine
from smartspec_py.engines.prompt_lookup import PromptLookupProposer
from smartspec_py.engines.torch.build import build_torch

SHIPPED = Path(__file__).resolve().parents[2] / "engines_build" / "tiny"
PAIR = {"target": "1b", "draft": "40m"}
COPY_BYTES, NUM_COPIES = 1 << 30, 20

FULL = Settings(shapes=(CLOSED, STEADY, STEP), seconds=5.0, saturation_s=5.0, num_closed=8)
DRY_RUN = replace(
    FULL,
    policies=("none", "fixed:3", "goodput"),
    shapes=(CLOSED, STEADY),
    loads=(0.7,),
    repeats=2,
    seconds=0.2,
    saturation_s=0.2,
    num_closed=2,
    max_tokens=16,
)


@dataclass(frozen=True)
class PlainLimits:
    """The fields of `LimitsConfig` that the PyTorch engine and the loop read."""

    max_sequences: int
    max_context_len: int | None = 512
    max_queue: int = 4096
    max_draft_len: int = 7
    max_tree_width: int | None = None
    prefill_chunk: int | None = None
    max_cache_tokens: int | None = None
    reuse_prefixes: bool = True
    profile_s: float = 60.0

    @property
    def context_len(self) -> int:
        assert self.max_context_len is not None
        return self.max_context_len

    def model_copy(self, update: dict[str, Any]) -> PlainLimits:
        """As pydantic's."""
        return replace(self, **update)


@dataclass(frozen=True)
class PlainEngine:
    """The fields of `TorchEngineConfig`."""

    model: str
    draft: str | None
    dtype: str
    device: str
    heads: str | None = None
    devices: None = None
    draft_devices: None = None
    num_threads: int = 0
    runtime: str = "torch"
    weights: str = "stored"
    cuda_graphs: bool = True
    profile_cache: str | None = None


def engine_of(config: PlainEngine, limits: PlainLimits) -> Engine:
    """The engine with prompt lookup. Raises ConfigError."""
    of_engine: Any = config
    of_limits: Any = limits
    engine = build_torch(of_engine, of_limits, Path.cwd())
    lookup = PromptLookupProposer(limits.max_draft_len, 4, 2)
    return replace(engine, proposers={**engine.proposers, PROMPT_LOOKUP: lookup})


def expanded_pair(folder: Path) -> tuple[Path, Path]:
    """The shipped pair at the cost of 1 B and 40 M parameters, made once in `folder`."""
    for role, preset in PAIR.items():
        if not (folder / role).is_dir():
            part = folder / f"{role}.part"
            expand(SHIPPED / role, part, PRESETS[preset])
            part.rename(folder / role)
    return folder / "target", folder / "draft"


def copy_gb_per_s() -> float:
    """Copy bandwidth within the GPU's memory: the best of several, bytes read plus written."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    to, best_s = torch.empty_like(source), math.inf
    for _ in range(NUM_COPIES):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        to.copy_(source)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * COPY_BYTES / best_s / 1e9


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} finds no CUDA device; --dry-run needs none")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    device, dtype = ("cpu", "float32") if options.dry_run else ("cuda", "bfloat16")
    about = described("Lockstep on a GPU", dtype=dtype, torch=torch.__version__)
    model, draft = options.model, options.draft
    if options.dry_run:
        about["note"] = "dry run on a CPU: the figures mean nothing"
        model, draft = model or SHIPPED / "target", draft or SHIPPED / "draft"
    else:
        about |= {"device": torch.cuda.get_device_name(), "copy_gb_per_s": copy_gb_per_s()}
        if model is None:
            _say("expanding the shipped pair")
            model, draft = expanded_pair(folder / "pair")
    settings = DRY_RUN if options.dry_run else FULL
    limits = PlainLimits(4 if options.dry_run else 32, profile_s=1.0 if options.dry_run else 60.0)
    cache = str((folder / "profiles").resolve())
    named = str(draft) if draft else None
    config = PlainEngine(str(model), named, dtype, device, profile_cache=cache)
    recorder = Recorder({**about, "model": str(model)}, folder / "gpu.json", _say)
    fields = {"max_tokens": settings.max_tokens, "reuse_prefix": False}
    any_limits: Any = limits
    try:
        sides = {}
        for policy in settings.policies:
            _say(f"engine for {policy}")
            sides[policy] = Side(policy, engine_of(config, limits), any_limits, fields)
        run(sides, limits.max_sequences, settings, recorder, options.minutes, _say)
    except (BenchError, ConfigError) as error:
        sys.exit(str(error))
    (folder / "gpu.html").write_text(page(recorder.document), encoding="utf-8")
    print(markdown(recorder.document))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench --gpu", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".smartspec/gpu"))
    parser.add_argument("--dry-run", action="store_true", help="the shipped pair on the CPU")
    parser.add_argument("--model", type=Path, help="default: the shipped pair, expanded to 1 B")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0, help="no phase begins later")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
