"""Draws tokens so that speculation is invisible: same seed, same text.

The token at absolute position t of a request is the argmax of

    log p(token) + gumbel(seed, t, token)

over the tokens that temperature, top-k and top-p leave, where the noise is a fixed function of its
three keys. By the Gumbel-max rule that is an exact draw from the target's distribution. A draft
model proposes with the same noise, and a draft is accepted exactly when it equals the target's own
draw; so the text depends neither on the draft nor on how many tokens were speculated (Daliri et
al., "Coupling without communication and drafter-invariant speculative decoding", 2024). Greedy is
the case without noise.

Noise is hashed only for the tokens that truncation leaves. Integer hashing is the same on every
device; near-ties of the perturbed scores may still fall differently where logits differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smartspec_py.core.types import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw: by these parameters, at this absolute position of the sequence."""

    sampling: SamplingParams
    position: int


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw one token from each row of logits [len(draws), vocab], float32."""
    tokens = logits.argmax(-1)
    sampled = [i for i, draw in enumerate(draws) if not draw.sampling.is_greedy]
    for group in _by_truncation(sampled, draws):
        index = torch.tensor(group, device=logits.device)
        tokens[index] = _sample(logits[index], [draws[i] for i in group])
    result: list[int] = tokens.tolist()
    return result


def _by_truncation(rows: Sequence[int], draws: Sequence[Draw]) -> list[list[int]]:
    """Rows that keep the whole vocabulary, rows cut by top-k, rows cut by top-p alone: each kind
    needs a different share of the vocabulary sorted."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for row in rows:
        sampling = draws[row].sampling
        is_cut = sampling.top_k > 0 or sampling.top_p < 1.0
        groups.setdefault((is_cut, sampling.top_k > 0), []).append(row)
    return list(groups.values())


def _sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """logits [n, vocab] of rows of one kind -> tokens [n]."""
    temperature = torch.tensor([d.sampling.temperature for d in draws], device=logits.device)
    scores = logits.double() / temperature.double()[:, None]
    keys = torch.tensor([noise_key(d.sampling.seed, d.position) for d in draws])
    keys = keys.to(logits.device)
    first = draws[0].sampling
    if first.top_k == 0 and first.top_p >= 1.0:
        candidates = torch.arange(logits.shape[-1], device=logits.device)[None]
        return (scores + gumbel_noise(keys, candidates)).argmax(-1)
    scores, candidates = _truncate(scores, [d.sampling for d in draws])
    best = (scores + gumbel_noise(keys, candidates)).argmax(-1, keepdim=True)
    return candidates.gather(-1, best)[:, 0]


def _truncate(
    scores: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted scores and their tokens [n, m], -inf where top-k or top-p cut; the best stays.

    Top-k first, then top-p over what is left, renormalised.
    """
    vocab_size = scores.shape[-1]
    limits = [min(p.top_k, vocab_size) or vocab_size for p in params]
    scores, tokens = scores.topk(max(limits), sorted=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    limit = torch.tensor(limits, device=scores.device)
    scores = scores.masked_fill(rank >= limit[:, None], -torch.inf)
    top_p = torch.tensor([p.top_p for p in params], device=scores.device, dtype=scores.dtype)
    probs = scores.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    is_cut = (mass_before >= top_p[:, None]) & (rank > 0)
    return scores.masked_fill(is_cut, -torch.inf), tokens


def noise_key(seed: int, position: int) -> int:
    """Mix (seed, position) into one key; a signed 64-bit integer, as PyTorch wants it."""
    return _signed(_mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK))


def gumbel_noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [n, m], float64, for keys [n] and tokens [n or 1, m].

    Counter-based (SplitMix64's finaliser), so that any (key, token) can be had alone.
    """
    bits = _mix_tensor(keys[:, None] + (tokens + 1) * _signed(_GOLDEN))
    # 52 bits and a half are exact in float64, so that no uniform is 0 or 1.
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    """`_mix` on int64 tensors, whose products wrap and whose right shifts must be masked."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
