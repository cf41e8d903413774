"""Whether verification keeps the distribution of sampled text, by counting.

Of the two likeliest tokens (top_k = 2) one is drafted. Without drafts it comes with some
probability p, which is estimated; a verification keeps the distribution if its first token is the
drafted one just as often. A draft that is rejected and then drawn again comes with p + (1 - p) p
instead, which is at least 0.09 more where p is in 0.1..0.9.

Each comparison counts NUM_SAMPLES requests with seeds of their own on either side, and calls the
two shares different where they are more than MAX_Z standard errors apart: by chance alone that
happens once in 15,000 times.
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
    """A prompt and its two likeliest tokens; temperature: at which neither is rare."""

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
        f"the drafted token comes {plain:.3f} of the time without drafts, {verified:.3f} with it "
        f"drafted, {z:+.1f} standard errors; drawing again would give {redrawn:.3f}",
        "no, as expected: sampled text is verified with logits or not at all, which is what the "
        "adapter does. yes: logits could be spared; tell the project.",
    )


def sampling_with_logits(bench: Bench) -> Finding:
    """Drafts from a distribution q of our own, given as logits; the text must not show it."""
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
        f"a token that comes {plain:.3f} of the time without drafts comes {seen}",
        "as drawn is what the adapter passes: engine.sampled_verification may be logits. Anything "
        "else alone: set it to none, which serves sampled requests without speculation.",
    )


def _drafts(bench: Bench, pair: Pair, row: Sequence[float]) -> Callable[[int], dict[str, Any]]:
    """All other tokens are ruled out, as the adapter rules out those that top_k leaves out."""
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
    """A prompt after which neither of the two likeliest tokens is rare."""
    for key in range(NUM_PROMPTS):
        prompt = bench.prompt(12, 100 + key)
        candidate = Pair(prompt, (0, 0), temperature)
        counts = Counter(_sample(bench, candidate, lambda seed: {}, NUM_TRIED))
        if len(counts) == 2:
            (likely, num_likely), (other, _) = counts.most_common()
            if num_likely / NUM_TRIED <= BALANCED[1]:
                return Pair(prompt, (likely, other), temperature)
    raise UnsettledError(
        f"of {NUM_PROMPTS} prompts none has two tokens of a share in {BALANCED} at "
        f"temperature {temperature:g}"
    )


def _sample(
    bench: Bench,
    pair: Pair,
    options: Callable[[int], dict[str, Any]],
    num_samples: int = NUM_SAMPLES,
) -> list[int]:
    """The first token of each request; requests differ in their seed alone."""
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
        raise UnsettledError("no tokens came")
    return sum(other == token for other in tokens) / len(tokens)


def _z(first: float, second: float) -> float:
    """Standard errors between two shares of NUM_SAMPLES each."""
    pooled = (first + second) / 2
    error = math.sqrt(2 * pooled * (1 - pooled) / NUM_SAMPLES)
    return (second - first) / error if error else 0.0


SAMPLING_EXPERIMENTS: tuple[Callable[[Bench], Finding], ...] = (
    sampling_without_logits,
    sampling_with_logits,
)
