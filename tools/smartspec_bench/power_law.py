"""Fits the two laws from which Su et al. (arXiv 2310.18813) derive the best draft length: accepted
drafts by draft length, and step time by draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PowerLaw:
    """scale * k^power of k drafts are accepted."""

    scale: float
    power: float


@dataclass(frozen=True)
class StepLine:
    """A step of k drafts takes base_s + token_s * k seconds."""

    token_s: float
    base_s: float


def fitted_power_law(mean_accepted: Sequence[float]) -> PowerLaw | None:
    """Least squares in logarithms, for means by draft length from 1. None if fewer than two lengths
    were measured, or if one of them has no accepted drafts."""
    if len(mean_accepted) < 2 or min(mean_accepted) <= 0:
        return None
    lengths = np.arange(1, len(mean_accepted) + 1)
    power, log_scale = np.polyfit(np.log(lengths), np.log(mean_accepted), 1)
    return PowerLaw(float(np.exp(log_scale)), float(power))


def fitted_line(step_s: Sequence[float]) -> StepLine | None:
    """Least squares for seconds by draft length from 1; the law does not hold at 0. None if fewer
    than two lengths were measured."""
    if len(step_s) < 2:
        return None
    token_s, base_s = np.polyfit(np.arange(1, len(step_s) + 1), step_s, 1)
    return StepLine(float(token_s), float(base_s))


def law_draft_len(law: PowerLaw | None, line: StepLine | None) -> float | None:
    """The best k of the power law, not rounded. None if there are no laws, or if they have no
    optimum because of noise."""
    if law is None or line is None:
        return None
    try:
        return power_law_draft_len(law.scale, law.power, line.token_s, line.base_s)
    except ValueError:
        return None


def power_law_draft_len(scale: float, power: float, token_s: float, base_s: float) -> float:
    """The k, not rounded, that generates fastest by the power law of Su et al. (arXiv 2310.18813).

    They find scale * k^power drafts accepted, 0 < power < 1, and a step of base_s + token_s * k
    seconds (token_s: verifying a position and drafting it). Seconds a token are then smallest where

        scale (1 - power) token_s k^power - scale power base_s k^(power - 1) + token_s = 0

    whose left side rises in k, so that halving an interval finds its one root. Wrong at k = 0,
    where the law loses its meaning: the root is never 0, though not to speculate may be best. The
    root is looked for up to 1024; raises ValueError where a number is out of its range.
    """
    if not (0 < power < 1 and scale > 0 and token_s > 0 and base_s > 0):
        raise ValueError("power must lie in 0..1, and scale, token_s and base_s be positive")
    low, high = 0.0, 1024.0
    for _ in range(60):
        k = (low + high) / 2
        slope = scale * (1 - power) * token_s * k**power + token_s
        if slope < scale * power * base_s * k ** (power - 1):
            low = k
        else:
            high = k
    return high
