"""What decides the design of the GPU engine, measured on a GPU: one table for each part.

    python3 -m smartspec_bench.gpu [PART ...] [--dry-run]

The parts are `device`, `attention`, `products`, `products_without_splits`, `passes`, `drafts`, in
this order, and each prints its tables as it ends. Models have the shape of Llama 3.1 8B and random
weights. Needs torch with CUDA, transformers, and no network. With --dry-run, everything is tiny and
runs on a CPU, to try the script itself, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig

from smartspec_py.core.types import NO_TOKEN
from smartspec_py.engines.drafts.eagle.head import FLAGS, EagleConfig, EagleHead, empty_head
from smartspec_py.engines.drafts.eagle.runner import EagleRunner
from smartspec_py.engines.runtimes.pytorch.causal import CausalModel
from smartspec_py.engines.runtimes.pytorch.compiled import compile_parts, merge_products
from smartspec_py.engines.runtimes.pytorch.float8 import Float8Linear, has_float8, use_float8
from smartspec_py.engines.runtimes.pytorch.graphs import GraphRunner
from smartspec_py.engines.runtimes.pytorch.layout import SHORT, SPLIT_KEYS, Tiling, lay_out, size_of
from smartspec_py.engines.runtimes.pytorch.packed import (
    ATTENTION_NAME,
    NUM_SCRATCH,
    RowCache,
    pack,
)
from smartspec_py.engines.runtimes.runner import RowInput, RunnerConfig

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
}

NUM_CALLS = 20
"""In a CUDA graph of which one call is timed."""


@dataclass(frozen=True)
class Run:
    """Where and what is measured. model: a configuration. rounds: of each timing."""

    device: torch.device
    dtype: torch.dtype
    model: dict[str, Any]
    rounds: int

    @property
    def is_dry(self) -> bool:
        return self.device.type == "cpu"

    def wait(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    def ms(self, call: Callable[[], Any]) -> float:
        """Median milliseconds of a call, after two warm-ups, until the device is done."""
        times = []
        for _ in range(self.rounds + 2):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times[2:])

    def kernel_ms(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call without its launches: in a CUDA graph of several calls."""
        if self.is_dry:
            return self.ms(call)
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(NUM_CALLS):
                call()
        return self.ms(graph.replay) / NUM_CALLS

    def config(self, num_rows: int, max_len: int) -> RunnerConfig:
        vocab_size = self.model["vocab_size"]
        return RunnerConfig(Path("random"), self.device, self.dtype, num_rows, max_len, vocab_size)

    def hf_config(self) -> LlamaConfig:
        config = LlamaConfig(**self.model)
        config._attn_implementation = ATTENTION_NAME
        return config


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table in Markdown."""
    print(f"\n### {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        cells = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row]
        print(f"| {' | '.join(cells)} |", flush=True)


def device(run: Run) -> None:
    """Copy and read bandwidth, and versions."""
    num = (1 << 16) if run.is_dry else (1 << 30)
    source = torch.zeros(num, dtype=torch.bfloat16, device=run.device)
    copied = torch.empty_like(source)
    copy_ms = run.ms(lambda: copied.copy_(source))
    read_ms = run.ms(lambda: source.view(torch.int16).amax())
    name = "CPU" if run.is_dry else torch.cuda.get_device_name()
    about = f"{name}, torch {torch.__version__}"
    rows = [[about, 4 * num / copy_ms / 1e9, 2 * num / read_ms / 1e9]]
    table("Bandwidth", ["device", "copy, TB/s", "read, TB/s"], rows)


class OneLayer:
    """Attention of one layer over random keys: by the kernel, and by PyTorch."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.num_heads, num_kv_heads = (
            run.model[name] for name in ("num_attention_heads", "num_key_value_heads")
        )
        self.head_dim = run.model["hidden_size"] // self.num_heads
        self.num_shared = self.num_heads // num_kv_heads
        self.num_rows, self.max_len = (4, 256) if run.is_dry else (64, 8192)
        self._generator = torch.Generator(run.device).manual_seed(0)
        num_slots = self.num_rows * self.max_len + NUM_SCRATCH
        storage = self._some(1, 2, num_slots, num_kv_heads, self.head_dim)
        self.cache = RowCache(storage, self.num_rows)
        self.tiling = Tiling.of(self.num_rows, self.num_shared)

    def _some(self, *sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, generator=self._generator, device=self.run.device)
        return made.to(self.run.dtype)

    def queries(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        return self._some(sum(len(item.tokens) for item in inputs), self.num_heads, self.head_dim)

    def kernel(self, inputs: Sequence[RowInput], queries: torch.Tensor) -> Callable[[], Any]:
        from smartspec_py.engines.runtimes.pytorch.attention import attend

        size = size_of(inputs)
        assert size is not None
        made, _ = lay_out(inputs, size, self.tiling, self.max_len, self.cache.scratch_slot)
        longest = max(item.position + len(item.tokens) for item in inputs)
        padded = queries.new_zeros(size, *queries.shape[1:])
        padded[: len(queries)] = queries
        return partial(
            attend,
            padded,
            *self.cache.by_slot[0],
            torch.from_numpy(made).to(self.run.device),
            tiling=self.tiling,
            max_len=self.max_len,
            context_len=SPLIT_KEYS if longest <= SPLIT_KEYS else self.max_len,
        )

    def pytorch(self, inputs: Sequence[RowInput], queries: torch.Tensor) -> Callable[[], Any]:
        packed, _ = pack(inputs, self.cache, self.run.device)
        return partial(packed.attention, 0, queries)

    def exact(self, item: RowInput, queries: torch.Tensor) -> torch.Tensor:
        """In float64, of one input."""
        first = item.row * self.max_len
        last = first + item.position + len(item.tokens)
        keys, values = (
            held[first:last].double().repeat_interleave(self.num_shared, 1).transpose(0, 1)
            for held in self.cache.by_slot[0]
        )
        mask = torch.arange(last - first, device=self.run.device)
        mask = mask[None] <= torch.tensor(item.positions, device=self.run.device)[:, None]
        tokens = queries.double().transpose(0, 1)
        out = scaled_dot_product_attention(tokens, keys, values, attn_mask=mask)
        return out.transpose(0, 1).flatten(1)

    def in_chunks(self, item: RowInput, queries: torch.Tensor) -> torch.Tensor:
        """By the kernel, as a prompt that is read in two parts."""
        half, parts = len(item.tokens) // 2, []
        for start, own in zip((0, half), (queries[:half], queries[half:]), strict=True):
            chunk = RowInput(item.row, item.position + start, [0] * len(own), 1)
            parts.append(self.kernel([chunk], own)()[: len(own)])
        return torch.cat(parts)


def attention(run: Run) -> None:
    """The kernel against float64, its bits, and its time beside PyTorch's attention."""
    layer, rng, worst = OneLayer(run), random.Random(0), 0.0
    alone, chunked = list[bool](), list[bool]()
    for _ in range(2 if run.is_dry else 12):
        inputs = []
        for row in rng.sample(range(layer.num_rows), rng.randint(1, min(8, layer.num_rows))):
            num = rng.choice([1, 1, 2, 5, 8, 60])
            inputs.append(RowInput(row, rng.randrange(layer.max_len - num), [0] * num, 1))
        counts = [len(item.tokens) for item in inputs]
        queries = layer.queries(inputs)
        found = layer.kernel(inputs, queries)()[: len(queries)]
        parts = zip(inputs, torch.split(queries, counts), torch.split(found, counts), strict=True)
        for item, own, together in parts:
            worst = max(worst, float((together.double() - layer.exact(item, own)).abs().max()))
            alone.append(torch.equal(layer.kernel([item], own)()[: len(own)], together))
            if len(own) > 2 * SHORT:
                chunked.append(torch.equal(layer.in_chunks(item, own), together))
    same = [f"{sum(equal)} of {len(equal)}" for equal in (alone, chunked)]
    head = ["largest error", "inputs whose bits are those alone", "prompts, in chunks"]
    table("Attention: random passes", head, [[worst, *same]])
    mixes = {
        f"{num} x {width} after {context_len}": _rows(num, width, context_len)
        for num, width in [(1, 1), (1, 8), (8, 1), (8, 8), (32, 1), (32, 4), (64, 1), (64, 8)]
        for context_len in (400, 7900)
    }
    if run.is_dry:
        mixes = {"2 x 3 after 100": _rows(2, 3, 100)}
    last = layer.num_rows - 1
    for num in (1, 8):
        prompt = RowInput(last, 0, [0] * 100, 1)
        mixes[f"{last} x {num} and a prompt of 100"] = [*_rows(last, num, 100), prompt]
    rows = []
    for name, inputs in mixes.items():
        queries = layer.queries(inputs)
        ways = layer.kernel(inputs, queries), layer.pytorch(inputs, queries)
        rows.append([name, *(1e3 * run.kernel_ms(way) for way in ways)])
    table("Attention: one layer, us", ["rows x tokens", "kernel", "PyTorch"], rows)


def products(run: Run) -> None:
    """Matrix products of a layer by number of tokens: apart, merged and in float8; and how many
    numbers of tokens leave the bits of the first token as they are alone."""
    hidden, inner = run.model["hidden_size"], run.model["intermediate_size"]
    kv = hidden * run.model["num_key_value_heads"] // run.model["num_attention_heads"]
    shapes = {
        "q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
        "q k v": (hidden + 2 * kv, hidden), "gate up": (2 * inner, hidden),
    }  # fmt: skip
    sizes = (1, 8) if run.is_dry else (1, 8, 16, 32, 64, 128, 256, 512)
    rows: list[list[Any]] = []

    def times(layer: torch.nn.Module, tokens: torch.Tensor) -> list[float]:
        return [1e3 * run.kernel_ms(partial(layer, tokens[:num])) for num in sizes]

    for name, (num_out, num_in) in shapes.items():
        layer = torch.nn.Linear(num_in, num_out, bias=False, dtype=run.dtype, device=run.device)
        tokens = torch.randn(sizes[-1], num_in, device=run.device).to(run.dtype)
        alone = layer(tokens[:8])[0]
        num_same = sum(torch.equal(layer(tokens[:num])[0], alone) for num in sizes)
        rows.append([name, *times(layer, tokens), num_same])
        if has_float8(run.device):
            of_float8 = Float8Linear(layer)
            compile_parts(of_float8)
            rows.append([f"{name}, float8", *times(of_float8, tokens), "-"])
    table("Products, us", ["product", *map(str, sizes), "sizes with equal bits"], rows)


def products_without_splits(run: Run) -> None:
    """The same where cuBLAS has no memory to divide the sums of a product."""
    command = [sys.executable, "-m", "smartspec_bench.gpu", products.__name__]
    command += ["--dry-run"] * run.is_dry
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    print(done.stdout or done.stderr, flush=True)


def passes(run: Run) -> None:
    """Passes of the whole model in captured graphs: as Transformers has it, with merged products,
    and in float8."""
    for name in ("plain", "merged", "merged, float8"):
        if "float8" in name and not has_float8(run.device):
            continue
        runner = _runner(run, merged="merged" in name, is_float8="float8" in name)
        print(f"\n{name}: {runner.about}", flush=True)
        widths = (1, 2, 4, 8, 16)
        rows: list[list[Any]] = []
        for num_rows in (1, 8, 32, 64) if not run.is_dry else (1, 4):
            fitting = [width for width in widths if num_rows * width <= 512]
            times = [_pass_ms(run, runner, _rows(num_rows, width)) for width in fitting]
            rows.append([num_rows, *times, *["-"] * (len(widths) - len(fitting))])
        table(f"Passes, {name}, ms", ["rows", *map(str, widths)], rows)
        top = runner.config.num_rows
        prompts = [RowInput(top - 1 - i, 0, [0] * 100, 1) for i in range(2)]
        mixes = {
            "rows of 1 to 7": [RowInput(i, 400, [0] * (i + 1), i + 1) for i in range(7)],
            "33 rows of 7": _rows(33, 7),
            "a prompt of 100": prompts[:1],
            "31 rows and a prompt of 100": [*_rows(31, 1), *prompts[:1]],
            "62 rows and two prompts of 100": [*_rows(62, 1), *prompts],
        }
        for context_len in (2000, 7900):
            mixes[f"1 row after {context_len}"] = _rows(1, 1, context_len)
            mixes[f"4 rows after {context_len}"] = _rows(4, 1, context_len)
        if run.is_dry:
            mixes = {"2 rows of 3": _rows(2, 3)}
        rows = [[mix, _pass_ms(run, runner, inputs)] for mix, inputs in mixes.items()]
        table(f"Other passes, {name}", ["pass", "ms"], rows)
        del runner
        if not run.is_dry:
            torch.cuda.empty_cache()


def drafts(run: Run) -> None:
    """An EAGLE-3 head that drafts k tokens for some rows: waiting for each, and for all at once."""
    layer_ids = (1,) if run.is_dry else (2, 16, 29)
    of = EagleConfig(
        folder=Path("random"),
        layer=LlamaConfig(**run.model | {"num_hidden_layers": 1}),
        layer_ids=layer_ids,
        states_width=len(layer_ids) * run.model["hidden_size"],
        num_drafted=run.model["vocab_size"] // 4,
        **dict.fromkeys(FLAGS, False),
    )
    module = empty_head(of, run.hf_config()).to_empty(device=run.device).to(run.dtype)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    merge_products(module)
    config = run.config(4 if run.is_dry else 64, 512)
    head = EagleRunner(EagleHead(module, of, None).to(run.device).eval(), config)
    head.warm()
    rows = []
    for num in (1, 8, 32, 64) if not run.is_dry else (1, 4):
        inputs = [RowInput(row, 400, [0], 1, first=1) for row in range(num)]
        unknown = [replace(item, tokens=[NO_TOKEN]) for item in inputs]
        for num_drafts in (1, 3, 7):
            ways = partial(_waiting, head, inputs), partial(_following, head, inputs, unknown)
            times = [run.ms(partial(way, num_drafts)) / num_drafts for way in ways]
            rows.append([num, num_drafts, *times])
    table("A head's drafts, ms each", ["rows", "drafts", "waiting for each", "for all"], rows)


def _waiting(head: EagleRunner, inputs: Sequence[RowInput], num_drafts: int) -> None:
    for _ in range(num_drafts):
        head.forward(inputs).logits.argmax(-1).tolist()


def _following(
    head: EagleRunner, known: Sequence[RowInput], inputs: Sequence[RowInput], num_drafts: int
) -> None:
    """known: of the first draft. inputs: of the others, whose tokens are only on the device."""
    tokens, levels = None, []
    for level in range(num_drafts):
        tokens = head.forward(inputs if level else known, tokens).logits.argmax(-1)
        levels.append(tokens)
    torch.cat(levels).tolist()


def _runner(run: Run, *, merged: bool, is_float8: bool) -> GraphRunner:
    config = run.config(4, 512) if run.is_dry else run.config(64, 8192)
    torch.manual_seed(0)
    with torch.device(run.device):
        maker: Any = AutoModelForCausalLM
        model = maker.from_config(run.hf_config(), dtype=run.dtype).eval()
    if merged:
        merge_products(model)
    if is_float8:
        use_float8(model)
    runner = GraphRunner(CausalModel(model, config), config)
    runner.warm()
    return runner


def _rows(num_rows: int, width: int, context_len: int = 400) -> list[RowInput]:
    return [RowInput(row, context_len, [0] * width, width) for row in range(num_rows)]


def _pass_ms(run: Run, runner: GraphRunner, inputs: Sequence[RowInput]) -> float:
    return run.ms(lambda: runner.forward(inputs).logits.argmax(-1).tolist())


PARTS: dict[str, Callable[[Run], None]] = {
    part.__name__: part
    for part in (device, attention, products, products_without_splits, passes, drafts)
}


def options_of(
    parts: Mapping[str, Any], arguments: Sequence[str], *folders: str
) -> argparse.Namespace:
    """The parts to run, in the attribute `parts`, and the other options. A wrong one ends the
    program before it takes time on a GPU. folders: more options, which name folders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all, or of {', '.join(parts)}")
    parser.add_argument("--dry-run", action="store_true")
    for name in folders:
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in parts:
            parser.error(f"PART: got {name!r}, must be one of {', '.join(parts)}")
    for name in folders:
        if (folder := getattr(options, name)) and not folder.is_dir():
            parser.error(f"--{name}: {folder} is no folder")
    options.parts = options.parts or list(parts)
    return options


def run_parts(
    parts: Mapping[str, Callable[[Any], None]], options: argparse.Namespace, run: Any
) -> None:
    """A part that fails does not end the others, but for a dry run."""
    for name in options.parts:
        start = time.perf_counter()
        try:
            parts[name](run)
        except Exception as error:
            print(f"\n{name} failed: {type(error).__name__}: {error}", flush=True)
            if options.dry_run:
                raise
        gc.collect()  # models and their graphs
        print(f"\n({name}: {time.perf_counter() - start:.0f} s)", flush=True)


def main(arguments: Sequence[str]) -> None:
    options = options_of(PARTS, arguments)
    run = Run(torch.device("cpu"), torch.float32, TINY, 2)
    if not options.dry_run:
        run = Run(torch.device("cuda"), torch.bfloat16, LLAMA_8B, 20)
    with torch.inference_mode():
        run_parts(PARTS, options, run)


if __name__ == "__main__":
    main(sys.argv[1:])
