"""Asks a PyTorch target again, to explain where two texts part: logits, what a draw compares."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.torch.noise import gumbel_noise, noise_key
from smartspec_py.engines.torch.packed import RowInput
from smartspec_py.engines.torch.processors import ShapedLogits, Span
from smartspec_py.engines.torch.sampling import VerifyRequest
from smartspec_py.engines.torch.target import TorchTarget
from smartspec_py.engines.torch.truncation import truncate

SCORED = -1
"""The sequence that is scored; requests count from 0."""


class TargetScorer:
    """A `nearties.Scorer`. The target must have a free row."""

    def __init__(self, target: TorchTarget) -> None:
        self._target = target

    def logits_after(self, tokens: Sequence[int], last_pass: int) -> torch.Tensor:
        target, runner = self._target, self._target.runner
        target.begin(SCORED, tokens, len(tokens), SamplingParams(), reuses_prefix=False)
        row = target.rows.row(SCORED).index
        cut = len(tokens) - last_pass if last_pass else 0
        if cut:
            runner.forward([RowInput(row, 0, tokens[:cut], 0)])
        logits = runner.forward([RowInput(row, cut, tokens[cut:], 1)]).logits[0]
        target.release(SCORED)
        return logits

    def logit_eps(self) -> float:
        return torch.finfo(self._target.runner.config.dtype).eps


def scores(
    logits: torch.Tensor, checks: Sequence[VerifyRequest]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row's coupled draw compares; both [rows, vocab], float64.

    First with truncation, -inf where it cut, then without. Greedy rows: the shaped logits.
    """
    pairs, first = [], 0
    for check in checks:
        sampling, batch_size = check.sampling, len(check.drafts) + 1
        spans = []
        if check.history is not None and sampling.shapes_logits:
            spans = [Span(0, batch_size, sampling, check.position, check.history, check.drafts)]
        shaped = ShapedLogits(logits[first : first + batch_size], spans).take(range(batch_size))
        pairs += [_compared(row, sampling, check.position + i) for i, row in enumerate(shaped)]
        first += batch_size
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
