"""Fits the two laws of which Su et al. (arXiv 2310.18813) make their closed form of the best draft
length: what k drafts bring, and what a step of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smartspec_py.core.goodput import power_law_draft_len


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
    """By least squares in logarithms, to means by draft length from 1.

    None where fewer than two lengths were measured, or one of them accepted nothing.
    """
    if len(mean_accepted) < 2 or min(mean_accepted) <= 0:
        return None
    lengths = np.arange(1, len(mean_accepted) + 1)
    power, log_scale = np.polyfit(np.log(lengths), np.log(mean_accepted), 1)
    return PowerLaw(float(np.exp(log_scale)), float(power))


def fitted_line(step_s: Sequence[float]) -> StepLine | None:
    """By least squares, to seconds by draft length from 1; the law means nothing at 0.

    None where fewer than two lengths were measured.
    """
    if len(step_s) < 2:
        return None
    token_s, base_s = np.polyfit(np.arange(1, len(step_s) + 1), step_s, 1)
    return StepLine(float(token_s), float(base_s))


def law_draft_len(law: PowerLaw | None, line: StepLine | None) -> float | None:
    """The power law's best k, not rounded; None where there are no such laws, or noise made of them
    what has no optimum."""
    if law is None or line is None:
        return None
    try:
        return power_law_draft_len(law.scale, law.power, line.token_s, line.base_s)
    except ValueError:
        return None
