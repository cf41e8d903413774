"""Batch-invariant passes: the logits of a position are the same bits whatever shares the pass.

The reference reads every sequence alone, one token a pass. Bits are compared, not tokens: texts
differ only at near-ties, logits wherever a sum was taken in another order. The model sums 1152
products in one layer and has queries of up to 600 keys, so that it meets the borders at which the
kernels of CPUs change: 1024 products, 4 queries, 192, 384 and 512 keys.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch_models import VOCAB_SIZE
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from smartspec_py.engines.torch.packed import (
    ATTENTION_NAME,
    NUM_SCRATCH,
    PassAttention,
    RowCache,
    RowInput,
    pack,
    padded_len,
)
from smartspec_py.engines.torch.runner import CausalRunner, RunnerConfig, prepared

LENGTHS = (30, 230, 410, 600)
NUM_ALONE = 24
"""Tokens at the end of each sequence that the reference reads one by one."""

CONFIG = RunnerConfig(
    Path(), torch.device("cpu"), torch.bfloat16, len(LENGTHS), 640, VOCAB_SIZE, batch_invariant=True
)


def make_runner(config: RunnerConfig) -> CausalRunner:
    torch.manual_seed(0)
    hf_config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=1152,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(hf_config).to(config.dtype).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return CausalRunner(prepared(model, config), config)


def sequences() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def read_alone(runner: CausalRunner) -> list[torch.Tensor]:
    """Logits [NUM_ALONE, vocab] of each sequence's last tokens."""
    logits = []
    for row, tokens in enumerate(sequences()):
        start = len(tokens) - NUM_ALONE
        runner.forward([RowInput(row, 0, tokens[:start], 0)])
        passes = [
            runner.forward([RowInput(row, position, tokens[position : position + 1], 1)]).logits
            for position in range(start, len(tokens))
        ]
        logits.append(torch.cat(passes))
    return logits


def read_together(runner: CausalRunner, seed: int) -> list[torch.Tensor]:
    """The same by passes of random rows, chunks of prompts and numbers of new tokens."""
    rng = random.Random(seed)
    texts = sequences()
    done = [0] * len(texts)
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(done[row] < len(tokens) for row, tokens in enumerate(texts)):
        inputs = []
        for row, tokens in enumerate(texts):
            start = len(tokens) - NUM_ALONE
            room, size = (start - done[row], 150) if done[row] < start else (NUM_ALONE, 7)
            chunk = tokens[done[row] :][: min(room, rng.randint(0, size))]
            if chunk:
                num_logits = len(chunk) if done[row] >= start else 0
                inputs.append(RowInput(row, done[row], chunk, num_logits))
        if inputs:
            found = runner.forward(inputs).logits.split([item.num_logits for item in inputs])
            for item, part in zip(inputs, found, strict=True):
                logits[item.row].append(part)
                done[item.row] += len(item.tokens)
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_do_not_depend_on_what_shares_the_pass(dtype: torch.dtype) -> None:
    config = replace(CONFIG, dtype=dtype)
    alone = read_alone(make_runner(config))
    for seed in range(2):
        together = read_together(make_runner(config), seed)
        for row, (expected, found) in enumerate(zip(alone, together, strict=True)):
            assert torch.equal(expected, found), f"sequence {row}, seed {seed}"


@pytest.mark.parametrize("width", [2, 5, 33])
@pytest.mark.parametrize("position", [40, 180, 300, 500])
def test_attention_of_a_query_does_not_depend_on_its_neighbours(position: int, width: int) -> None:
    """In float32, where every bit shows: the last of many, beside a longer row, or alone."""
    torch.manual_seed(0)
    cache = RowCache(torch.randn(1, 2, 2 * 1024 + NUM_SCRATCH, 4, 16), 2)
    queries = torch.randn(1, 4, width + 1, 16)
    first = position - width + 1
    inputs = [RowInput(0, first, [0] * width, 1), RowInput(1, 600, [0], 1)]

    def attend(inputs: list[RowInput], query: torch.Tensor) -> torch.Tensor:
        packed = pack(inputs, 1024, torch.device("cpu"), batch_invariant=True)
        return PassAttention(packed, cache)(0, query[0].transpose(0, 1))

    # A chunk of a prompt, as 33 tokens are, stands behind the short inputs.
    last = width if width > 16 else width - 1
    alone = attend([RowInput(0, position, [0], 1)], queries[:, :, last : last + 1])
    assert torch.equal(attend(inputs, queries)[last], alone[0])


@pytest.mark.parametrize(
    ("context_len", "expected"),
    [(1, 512), (512, 512), (513, 1024), (1025, 1536)],
)
def test_padded_len(context_len: int, expected: int) -> None:
    """Whole blocks of attention's kernel."""
    assert padded_len(context_len) == expected
