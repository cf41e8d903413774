"""What a run measures, and how long each part may take.

The models of the run on CUDA cost as much as a model of 7 B parameters. The hidden size is 128 *
4^2, so that the norms of the expanded pair are exact in bfloat16 (see `smartspec_bench.expand`).
The 32 layers, and attention of 256 heads of width 16, are like those of Llama 2 7B (Touvron et al.,
arXiv 2307.09288), so that launches and cached bytes per token are realistic. The MLP is larger
instead of the hidden size. A pass reads 6.93 B weights: 32 layers of 4 * 2048 * 4096 + 3 * 2048 *
29440, and a head of 32000 * 2048. Another 0.07 B are embeddings. The draft reads 1/40 of that: 2
layers of 4 * 2048 * 2048 + 3 * 2048 * 6144, and its head: 0.174 B.
"""

from __future__ import annotations

from dataclasses import dataclass

from smartspec_bench.expand import Size

BASELINE, JUDGED = "none", "goodput"
POLICIES = (BASELINE, "fixed:1", "fixed:3", "fixed:5", "fixed:7", JUDGED)
LOADED_POLICIES = (BASELINE, "fixed:3", JUDGED)
"""Under load that arrives by itself."""

LOADS = (0.3, 0.6, 0.9, 1.2)
"""Shares of the saturation rate of the baseline."""

MAX_DRAFT_LEN = 7

MAX_CONTEXT_LEN = 256
"""Tokens of a sequence. The shipped pair was trained on 150, and its prompts have up to 100."""

BANDWIDTH_GOAL = 0.75
"""Share of the copy bandwidth that a pass over one token of one sequence should reach."""


@dataclass(frozen=True)
class Plan:
    """is_dry_run: on a CPU, with figures that mean nothing. dtype: by its name in torch. batches:
    numbers of sequences, ascending; those that do not fit in memory are left out. prefill_chunk:
    prompt tokens per step. copy_bytes: size of the buffer that is copied. exact_prompts: per
    workload, for the comparison of texts. min_requests: finished requests that a batch needs to be
    counted. max_rounds: over all batches. load_s: for each policy under each load. exact_s,
    batches_s, total_s: time limits of the comparison of texts, the batches and all parts."""

    is_dry_run: bool
    dtype: str
    target: Size
    draft: Size
    batches: tuple[int, ...]
    prefill_chunk: int
    max_tokens: int
    copy_bytes: int
    exact_prompts: int
    min_requests: int
    max_rounds: int
    load_s: float
    exact_s: float
    batches_s: float
    total_s: float


FULL = Plan(
    is_dry_run=False,
    dtype="bfloat16",
    target=Size(
        hidden_size=2048,
        num_layers=32,
        intermediate_size=29440,
        num_heads=256,
        vocab_size=32000,
    ),
    draft=Size(
        hidden_size=2048, num_layers=2, intermediate_size=6144, num_heads=128, vocab_size=32000
    ),
    batches=(1, 2, 4, 8, 16, 32, 64, 128),
    prefill_chunk=1024,
    max_tokens=64,
    copy_bytes=1 << 30,
    exact_prompts=3,
    min_requests=4,
    max_rounds=4,
    load_s=6.0,
    exact_s=60.0,
    batches_s=210.0,
    total_s=450.0,
)
"""total_s leaves 30 s of the eight minutes: parts stop between measurements, not in them."""

DRY_RUN = Plan(
    is_dry_run=True,
    dtype="float32",
    target=Size(hidden_size=512, num_layers=3, intermediate_size=512, num_heads=8, vocab_size=2304),
    draft=Size(hidden_size=128, num_layers=2, intermediate_size=64, num_heads=8),
    batches=(1, 2, 4),
    prefill_chunk=128,
    max_tokens=12,
    copy_bytes=1 << 24,
    exact_prompts=1,
    min_requests=2,
    max_rounds=2,
    load_s=0.3,
    exact_s=30.0,
    batches_s=30.0,
    total_s=90.0,
)
