"""The scores that a coupled draw compares, for tests of sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.torch.noise import gumbel_noise, noise_key
from smartspec_py.engines.torch.processors import Shaping, shape_logits
from smartspec_py.engines.torch.sampling import VerifyRequest
from smartspec_py.engines.torch.truncation import truncate


def scores(
    logits: torch.Tensor, checks: Sequence[VerifyRequest]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row's coupled draw compares; both [rows, vocab], float64.

    First with truncation, -inf where it cut, then without. Greedy rows: the shaped logits.
    """
    pairs, first = [], 0
    for check in checks:
        sampling, history, drafts = check.sampling, check.history, check.drafts
        for i in range(len(drafts) + 1):
            row = logits[first : first + 1]
            if history is not None and sampling.shapes_logits:
                row = shape_logits(row, [Shaping(0, sampling, history, drafts[:i])])
            pairs.append(_compared(row[0], sampling, check.position + i))
            first += 1
    kept, whole = zip(*pairs, strict=True)
    return torch.stack(kept), torch.stack(whole)


def _compared(
    logits: torch.Tensor, sampling: SamplingParams, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one row of shaped logits [vocab]."""
    whole = logits.double()
    if sampling.is_greedy:
        return whole, whole
    vocab = torch.arange(len(logits), device=logits.device)
    key = torch.tensor([noise_key(sampling.seed, position)], device=logits.device)
    noise = gumbel_noise(key, vocab[None])[0]
    candidates = truncate(logits[None], [sampling])
    kept, tokens = torch.full_like(whole, -torch.inf), candidates.tokens[0]
    kept[tokens] = candidates.scores[0] + noise[tokens]
    return kept, whole / sampling.temperature + noise
