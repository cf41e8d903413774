"""Near-tie or fault: by hand on four tokens, and on the tiny target with a text made wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from smartspec_bench.nearties import CUTS, judge_divergence
from smartspec_py.core.types import SamplingParams

KNOWN = list(range(20))
GREEDY = SamplingParams()


@dataclass
class ToyScorer:
    """The same logits whatever the cut, but for `jitter` on token 1, up to that much by the cut."""

    logits: Sequence[float]
    jitter: float = 0.0
    eps: float = 2**-23

    def logits_after(self, tokens: Sequence[int], last_pass: int) -> torch.Tensor:
        found = torch.tensor(self.logits)
        found[1] += self.jitter * CUTS.index(last_pass) / (len(CUTS) - 1)
        return found

    def logit_eps(self) -> float:
        return self.eps


def is_near_tie(
    scorer: ToyScorer, sampling: SamplingParams = GREEDY, expected: int = 0, found: int = 1
) -> bool:
    return judge_divergence(scorer, KNOWN, 10, sampling, expected, found).is_near_tie


@pytest.mark.parametrize(
    ("logits", "jitter", "eps", "near"),
    [
        ((5.0, 5.0, 1.0, 0.0), 0.0, 2**-23, True),  # the same score
        ((5.0, 4.0, 1.0, 0.0), 0.0, 2**-23, False),  # a whole unit apart, and nothing moves
        # float32 rounds 5 by 5 / 2^23 = 6e-7: 4 of those explain 2e-6, and not 1e-4
        ((5.0, 5.0 - 2e-6, 1.0, 0.0), 0.0, 2**-23, True),
        ((5.0, 5.0 - 1e-4, 1.0, 0.0), 0.0, 2**-23, False),
        # bfloat16 rounds 5 by 5 / 2^7 = 0.04: 4 of those explain 0.1, and not 0.5
        ((5.0, 4.9, 1.0, 0.0), 0.0, 2**-7, True),
        ((5.0, 4.5, 1.0, 0.0), 0.0, 2**-7, False),
        # the cuts differ by 0.1: the smallest gap of 0.3 lies within 4 times that, of 0.6 not
        ((5.0, 4.6, 1.0, 0.0), 0.1, 2**-23, True),
        ((5.0, 4.3, 1.0, 0.0), 0.1, 2**-23, False),
    ],
)
def test_gaps(logits: tuple[float, ...], jitter: float, eps: float, near: bool) -> None:
    assert is_near_tie(ToyScorer(logits, jitter, eps)) is near


@pytest.mark.parametrize(
    ("sampling", "logits", "found", "near"),
    [
        # top-k keeps two: the third lies 1e-7 under the edge, or 1 under it
        (SamplingParams(temperature=1.0, top_k=2), (2.0, 1.0, 1.0 - 1e-7, 0.0), 2, True),
        (SamplingParams(temperature=1.0, top_k=2), (3.0, 2.0, 1.0, 0.0), 2, False),
        # p = .5 .25 .25 0: top-p of 0.75 ends after the second, to the bit; of 0.6 well before
        (SamplingParams(temperature=1.0, top_p=0.75), (0.0, -0.693147, -0.7, -30.0), 2, False),
        (
            SamplingParams(temperature=1.0, top_p=0.75),
            (0.0, -0.6931472, -0.6931473, -30.0),
            2,
            True,
        ),
    ],
)
def test_edges_of_truncation(
    sampling: SamplingParams, logits: tuple[float, ...], found: int, near: bool
) -> None:
    assert is_near_tie(ToyScorer(logits), sampling, 0, found) is near


def test_noise_takes_part() -> None:
    """Equal logits are no tie where the noise of the two tokens differs."""
    sampling = SamplingParams(temperature=1.0, seed=5)
    assert not is_near_tie(ToyScorer((1.0, 1.0, 1.0, 1.0)), sampling)


def test_penalties_take_part() -> None:
    """Token 1 was generated (it is not in the prompt of 10), token 11 too: 4 - 1.5 = 2.5."""
    sampling = SamplingParams(presence_penalty=1.5)
    logits = [0.0] * 12
    logits[0], logits[11] = 2.5, 4.0
    assert is_near_tie(ToyScorer(logits), sampling, 0, 11)
    logits[11] = 4.1
    assert not is_near_tie(ToyScorer(logits), sampling, 0, 11)
