"""Tests by counting whether verification keeps the distribution of sampled text.

One of the two most probable tokens (top_k = 2) is drafted. Without drafts, it has some probability
p, which is estimated. A verification keeps the distribution if its first token is the drafted one
equally often. If a rejected draft could be drawn again, its probability would be p + (1 - p) p.
This is at least 0.09 more if p is in 0.1..0.9.

Each side of a comparison has NUM_SAMPLES requests with their own seeds. The two shares count as
different if they are more than MAX_Z standard errors apart. By chance, this happens once in 15,000
comparisons.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smartspec_trtllm.doctor_bench import Bench
from smartspec_trtllm.doctor_finding import Finding, UnsettledError

NUM_SAMPLES = 3000
NUM_AT_ONCE = 250
NUM_TRIED = 100
NUM_PROMPTS = 12
MAX_Z = 4.0
BALANCED = (0.2, 0.8)
TEMPERATURE = 2.0
DRAFT_PROBS = (0.75, 0.25)


@dataclass(frozen=True)
class Pair:
    """A prompt and its two most probable tokens. temperature: one at which neither is rare."""

    prompt: list[int]
    tokens: tuple[int, int]
    temperature: float


def sampling_without_logits(bench: Bench) -> Finding:
    _ = bench.max_draft_len
    pair = _find_pair(bench, TEMPERATURE)
    drafted = pair.tokens[0]
    plain = _share(_sample(bench, pair, lambda seed: {}), drafted)
    verified = _share(_sample(bench, pair, lambda seed: {"drafts": [drafted]}), drafted)
    z = _z(plain, verified)
    redrawn = plain + (1 - plain) * plain
    return Finding(
        "sampling_without_logits",
        "Does verification without draft logits keep the distribution of sampled text?",
        "yes" if abs(z) < MAX_Z else "no",
        f"share of the drafted token: {plain:.3f} without drafts, {verified:.3f} with it "
        f"drafted, {z:+.1f} standard errors; drawing again would give {redrawn:.3f}",
        "no, as expected: sampled text needs logits for verification, and the adapter works this "
        "way. yes: logits are not necessary; tell the project.",
    )


def sampling_with_logits(bench: Bench) -> Finding:
    """Draw drafts from a chosen distribution q, given as logits; the text must not depend on it."""
    _ = bench.max_draft_len
    pair = _find_pair(bench, TEMPERATURE)
    plain = _share(_sample(bench, pair, lambda seed: {}), pair.tokens[0])
    shares = {}
    for label, scale in (("as drawn", 1.0), ("before the temperature", pair.temperature)):
        row = [scale * math.log(prob) for prob in DRAFT_PROBS]
        shares[label] = _share(_sample(bench, pair, _drafts(bench, pair, row)), pair.tokens[0])
    exact = [label for label, share in shares.items() if abs(_z(plain, share)) < MAX_Z]
    seen = ", ".join(f"{share:.3f} with logits {label}" for label, share in shares.items())
    return Finding(
        "sampling_with_logits",
        f"Which draft logits keep the distribution at temperature {pair.temperature:g}?",
        " and ".join(exact) or "none",
        f"share of a token: {plain:.3f} without drafts, {seen}",
        "as drawn is what the adapter passes: engine.sampled_verification may be logits. Any other "
        "answer: set it to none, which serves sampled requests without speculation.",
    )


def _drafts(bench: Bench, pair: Pair, row: Sequence[float]) -> Callable[[int], dict[str, Any]]:
    """All other tokens get -inf, as in the adapter for tokens that top_k drops."""
    import torch

    logits = torch.full((1, bench.vocab_size), -torch.inf)
    for token, logit in zip(pair.tokens, row, strict=True):
        logits[0, token] = logit
    logits = logits.to(getattr(torch, bench.logits_dtype))

    def options(seed: int) -> dict[str, Any]:
        token = random.Random(f"draft {seed}").choices(pair.tokens, DRAFT_PROBS)[0]
        return {"drafts": [token], "draft_logits": logits}

    return options


def _find_pair(bench: Bench, temperature: float) -> Pair:
    """Find a prompt after which neither of the two most probable tokens is rare."""
    for key in range(NUM_PROMPTS):
        prompt = bench.prompt(12, 100 + key)
        candidate = Pair(prompt, (0, 0), temperature)
        counts = Counter(_sample(bench, candidate, lambda seed: {}, NUM_TRIED))
        if len(counts) == 2:
            (likely, num_likely), (other, _) = counts.most_common()
            if num_likely / NUM_TRIED <= BALANCED[1]:
                return Pair(prompt, (likely, other), temperature)
    raise UnsettledError(
        f"none of {NUM_PROMPTS} prompts has two tokens with a share in {BALANCED} at "
        f"temperature {temperature:g}"
    )


def _sample(
    bench: Bench,
    pair: Pair,
    options: Callable[[int], dict[str, Any]],
    num_samples: int = NUM_SAMPLES,
) -> list[int]:
    """The first token of each request; requests differ only in their seed."""
    first_seed = bench.next_seed(num_samples)
    tokens: list[int] = []
    for start in range(first_seed, first_seed + num_samples, NUM_AT_ONCE):
        seeds = range(start, min(start + NUM_AT_ONCE, first_seed + num_samples))
        results = bench.ask([_request(bench, pair, seed, options(seed)) for seed in seeds])
        tokens += [token for r in results for token in r.output_token_ids[0][:1]]
    return tokens


def _request(bench: Bench, pair: Pair, seed: int, options: dict[str, Any]) -> Any:
    sampling = bench.bindings.SamplingConfig(top_k=2, temperature=pair.temperature, seed=seed)
    return bench.request(pair.prompt, 2, **options, sampling_config=sampling)


def _share(tokens: Sequence[int], token: int) -> float:
    if not tokens:
        raise UnsettledError("no tokens were generated")
    return sum(other == token for other in tokens) / len(tokens)


def _z(first: float, second: float) -> float:
    """Distance of two shares of NUM_SAMPLES each, in standard errors."""
    pooled = (first + second) / 2
    error = math.sqrt(2 * pooled * (1 - pooled) / NUM_SAMPLES)
    return (second - first) / error if error else 0.0


SAMPLING_EXPERIMENTS: tuple[Callable[[Bench], Finding], ...] = (
    sampling_without_logits,
    sampling_with_logits,
)
