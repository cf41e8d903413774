"""Decides whether a difference between two texts is a near-tie or a fault.

It looks at the step where the texts differ. The same known tokens are run through the target again,
divided into passes in several ways, and the two tokens are compared as sampling compares them
(`engines.torch.sampling`). In low precision, sums depend on the division, so the gap between two
scores differs a little each time. The difference is a near-tie if the smallest gap is within a few
times the differences between divisions, or within the rounding of a few logits. For a token that
top-k, top-p or min-p removed, the distance from the limit is used: in score, or in probability mass
for top-p. All other differences cannot come from rounding and are faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from smartspec_bench.exactness import Divergence
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.torch.noise import gumbel_noise, noise_key
from smartspec_py.engines.torch.processors import TokenHistory
from smartspec_py.engines.torch.sampling import VerifyRequest
from smartspec_py.serving.request import Request
from smartspec_testing.scoring import scores

CUTS = (0, 1, 2, 5, 16)
"""Tokens that the last pass reads; 0 reads all in one pass."""

SPREADS_ALLOWED = 4.0
"""Largest gap, relative to the spread over the divisions. Five divisions do not show the largest
gap."""

ULPS_ALLOWED = 4.0
"""Largest gap in roundings of a logit: two scores, each rounded in both of two runs."""


class Scorer(Protocol):
    """A target that can be asked again."""

    def logits_after(self, tokens: Sequence[int], last_pass: int) -> torch.Tensor:
        """Logits [vocab], float32, of the token after these. The last pass reads last_pass tokens;
        0 reads all in one pass."""
        ...

    def logit_eps(self) -> float:
        """Relative distance of neighbouring values in the precision of the logits."""
        ...


@dataclass(frozen=True)
class TieVerdict:
    """gap: the smallest gap found, in units of perturbed scores. allowed: the gap that rounding
    explains."""

    is_near_tie: bool
    gap: float
    allowed: float


@dataclass(frozen=True)
class _Step:
    """The step where two texts differ. tokens: all tokens before it."""

    tokens: Sequence[int]
    num_prompt: int
    sampling: SamplingParams
    expected: int
    found: int


def judge(scorer: Scorer, request: Request, divergence: Divergence) -> TieVerdict:
    """request: created again from the params of the divergence. If one text ends without an end
    token and the other continues, it is a fault."""
    if divergence.expected is None or divergence.found is None:
        return TieVerdict(is_near_tie=False, gap=math.inf, allowed=0.0)
    return judge_divergence(
        scorer,
        [*request.tokens, *divergence.before],
        request.num_prompt,
        request.sampling,
        divergence.expected,
        divergence.found,
    )


def judge_divergence(
    scorer: Scorer,
    tokens: Sequence[int],
    num_prompt: int,
    sampling: SamplingParams,
    expected: int,
    found: int,
) -> TieVerdict:
    """tokens: all tokens before the step where `expected` and `found` were drawn."""
    step = _Step(tokens, num_prompt, sampling, expected, found)
    rows = [scorer.logits_after(tokens, cut) for cut in CUTS if cut < len(tokens)]
    gaps = [_gap(step, logits) for logits in rows]
    scale = 1.0 if sampling.is_greedy else sampling.temperature
    largest = max(float(logits[[expected, found]].abs().max()) for logits in rows)
    allowed = max(
        SPREADS_ALLOWED * (max(gaps) - min(gaps)),
        ULPS_ALLOWED * scorer.logit_eps() * largest / scale,
    )
    gap = min(abs(gap) for gap in gaps)
    return TieVerdict(gap <= allowed, gap, allowed)


def _gap(step: _Step, logits: torch.Tensor) -> float:
    """How far the score of `expected` is above that of `found`. If one of them was removed by
    truncation: how far it is from the limit."""
    history = TokenHistory(step.num_prompt)
    history.extend(step.tokens)
    position = len(step.tokens)
    kept, whole = (
        found[0]
        for found in scores(logits[None], [VerifyRequest(step.sampling, position, history)])
    )
    is_kept = torch.isfinite(kept)
    pair = [step.expected, step.found]
    if bool(is_kept[pair].all()):
        return float(whole[step.expected] - whole[step.found])
    base = whole
    if not step.sampling.is_greedy:
        key = torch.tensor([noise_key(step.sampling.seed, position)], device=logits.device)
        vocab = torch.arange(len(whole), device=logits.device)
        base = whole - gumbel_noise(key, vocab[None])[0]
    cut_off = next(token for token in pair if not is_kept[token])
    to_edge = float(base[is_kept].min() - base[cut_off])
    if step.sampling.top_p == 1.0:
        return to_edge
    left = base.topk(min(step.sampling.top_k or len(base), len(base))).values
    mass_before = float(left.softmax(-1)[left > base[cut_off]].sum())
    return min(to_edge, abs(mass_before - step.sampling.top_p), key=abs)
