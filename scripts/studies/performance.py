"""Where a pass of the PyTorch engine spends its time on this CPU, against the least it can take.

Run by `scripts/study performance`, two minutes on a quiet machine, on the pair that `scripts/bench`
makes. The floor of a pass is the longer of two: its bytes over the rate at which one core reads,
and its multiplications over the rate of a large product. Both are measured in the same run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from smartspec_py.engines.runner import CausalRunner, RunnerConfig, load_runner
from smartspec_py.progress import tracked
from studies.document import publish, table

NUM_THREADS = 1
"""What the server takes of two cores."""

NUM_ROWS, ROW_LEN, CONTEXT_LEN, VOCAB_SIZE = 32, 512, 192, 2048
SHAPES = ((1, 1), (1, 4), (1, 8), (8, 1), (8, 4), (32, 1), (32, 4), (32, 8))
"""Sequences, and tokens of each."""

NUM_REPEATS = 7
KINDS: Mapping[str, tuple[str, ...]] = {
    "linear layers": ("mkl::_mkl_linear", "aten::mm", "aten::addmm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::bmm"),
    "keys and values": ("aten::index_copy_",),
}
"""Operators by what they are for; the rest is `other operators`, and what none took `host`."""

READ_BYTES, PRODUCT_SIZE = 1 << 28, 2048


@dataclass(frozen=True)
class Rates:
    """read_gb_s: of a product of one row, which reads its matrix once. gflops: of a large one."""

    read_gb_s: float
    gflops: float


@dataclass(frozen=True)
class Pass:
    """Milliseconds of one pass. shares: of it, by kind. floor_ms: see the module."""

    model: str
    num_rows: int
    tokens_per_row: int
    ms: float
    floor_ms: float
    bound: str
    shares: Mapping[str, float]


def best_s(run: Callable[[], object]) -> float:
    run()
    found = []
    for _ in range(NUM_REPEATS):
        start_s = time.perf_counter()
        run()
        found.append(time.perf_counter() - start_s)
    return min(found)


def rates() -> Rates:
    width = 2048
    matrix, row = torch.ones(READ_BYTES // 4 // width, width), torch.ones(width)
    square = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    return Rates(
        READ_BYTES / best_s(lambda: matrix @ row) / 1e9,
        2 * PRODUCT_SIZE**3 / best_s(lambda: square @ square) / 1e9,
    )


def floor(model: torch.nn.Module, shape: tuple[int, int], rates: Rates) -> tuple[float, str]:
    """Seconds, and which of the two rates bounds it."""
    num_rows, tokens = shape
    sizes = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    config = model.config
    num_heads, head_dim = config.num_attention_heads, config.head_dim
    keys = 2 * config.num_hidden_layers * num_heads * head_dim * (CONTEXT_LEN + tokens) * num_rows
    num_tokens = num_rows * tokens
    bytes_s = 4 * (sum(sizes) + keys) / (1e9 * rates.read_gb_s)
    flops_s = 2 * (sum(sizes) * num_tokens + keys * tokens) / (1e9 * rates.gflops)
    return max((bytes_s, "bytes"), (flops_s, "multiplications"))


def shares(runner: CausalRunner, shape: tuple[int, int]) -> dict[str, float]:
    """Of a pass's time, by kind. Taken apart from the timing: the profiler itself takes some."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        start_s = time.perf_counter()
        for _ in range(NUM_REPEATS):
            runner.time_pass(*shape, CONTEXT_LEN)
        whole_us = 1e6 * (time.perf_counter() - start_s)
    own_us = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    result = {
        kind: sum(own_us.pop(name, 0.0) for name in names) / whole_us
        for kind, names in KINDS.items()
    }
    result["other operators"] = sum(own_us.values()) / whole_us
    return result | {"host": max(0.0, 1.0 - sum(result.values()))}


def passes(name: str, folder: Path, rates: Rates) -> list[Pass]:
    config = RunnerConfig(folder, torch.device("cpu"), torch.float32, NUM_ROWS, ROW_LEN, VOCAB_SIZE)
    runner = load_runner(config)
    found = []
    for shape in tracked(name, SHAPES, "shapes"):
        seconds = best_s(lambda shape=shape: runner.time_pass(*shape, CONTEXT_LEN))
        floor_s, bound = floor(runner.model, shape, rates)
        found.append(Pass(name, *shape, 1e3 * seconds, 1e3 * floor_s, bound, shares(runner, shape)))
    return found


def shown(found: list[Pass]) -> str:
    kinds = list(found[0].shares)
    header = ["sequences", "tokens each", "ms", "floor, ms", "bound by", "times the floor", *kinds]
    return table(
        header,
        [
            [
                one.num_rows,
                one.tokens_per_row,
                f"{one.ms:.1f}",
                f"{one.floor_ms:.1f}",
                one.bound,
                f"{one.ms / one.floor_ms:.2f}",
                *(f"{100 * one.shares[kind]:.0f} %" for kind in kinds),
            ]
            for one in found
        ],
    )


def main() -> None:
    torch.set_num_threads(NUM_THREADS)
    pair = Path(".smartspec/bench")
    measured = rates()
    target = passes("target, 88 M", pair / "88m", measured)
    draft = passes("draft, 4 M", pair / "4m", measured)
    publish(
        Path(sys.argv[1]),
        "performance",
        "Where a pass of the PyTorch engine spends its time",
        [
            f"float32, {NUM_THREADS} thread, {CONTEXT_LEN} tokens of context; best of "
            f"{NUM_REPEATS}. Read by a product of one row: {measured.read_gb_s:.1f} GB/s; large "
            f"product: {measured.gflops:.0f} GFLOP/s. docs/performance.md explains it.",
            "## Target, 88 M",
            shown(target),
            "## Draft, 4 M",
            shown(draft),
        ],
        {"rates": asdict(measured), "passes": [asdict(one) for one in target + draft]},
    )


if __name__ == "__main__":
    main()
