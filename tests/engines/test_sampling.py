"""The coupled draw: exact distribution, fixed noise, truncation, and no view of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.sampling import Draw, draw_tokens, gumbel_noise, noise_key

GOLDEN_KEY = -4616330145664149646
GOLDEN_NOISE = [-0.08938146483572, -0.37376167543762, -1.12426811749081, 0.29255260274069]

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])


def draw_many(params: dict[str, float], count: int, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """Frequencies over `count` seeds at one position."""
    draws = [Draw(SamplingParams(seed=seed, **params), 7) for seed in range(count)]
    tokens = torch.tensor(draw_tokens(logits.repeat(count, 1), draws))
    return torch.bincount(tokens, minlength=len(logits)) / count


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 1.0, "top_k": 2}, [0, 1]),
        ({"temperature": 1.0, "top_k": 3}, [0, 1, 4]),
        # p = .563 .207 .076 .028 .126: the first holds .563 < .6, so the second is still in.
        ({"temperature": 1.0, "top_p": 0.6}, [0, 1]),
        ({"temperature": 1.0, "top_p": 0.5}, [0]),
        # Of the three that top-k keeps, the first has .563 / .896 = .63 >= .6.
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.6}, [0]),
    ],
)
def test_frequencies_are_the_truncated_softmax(params: dict[str, float], kept: list[int]) -> None:
    """40,000 draws: each frequency lies within 5 standard errors, or fails once in 300,000 runs.

    The seeds are fixed, so the test gives one verdict for ever.
    """
    count = 40_000
    masked = torch.full_like(LOGITS, -math.inf)
    masked[kept] = LOGITS[kept] / params["temperature"]
    expected = masked.softmax(-1)
    found = draw_many(params, count)
    error = 5 * (expected * (1 - expected) / count).sqrt() + 1e-9
    assert ((found - expected).abs() <= error).all(), (found, expected)


def test_positions_are_independent() -> None:
    """Pairs of draws at neighbouring positions of one seed: within 5 standard errors of p * p."""
    count = 20_000
    logits = torch.zeros(3)
    draws = [
        Draw(SamplingParams(temperature=1.0, seed=seed), position)
        for seed in range(count)
        for position in (10, 11)
    ]
    tokens = torch.tensor(draw_tokens(logits.repeat(2 * count, 1), draws)).view(count, 2)
    pairs = torch.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9) / count
    error = 5 * (1 / 9 * 8 / 9 / count) ** 0.5
    assert ((pairs - 1 / 9).abs() <= error).all(), pairs


def test_noise_is_fixed_for_ever() -> None:
    """Stored texts would change with these numbers."""
    keys = torch.tensor([noise_key(1, 0), noise_key(2**64 - 1, 5)])
    noise = gumbel_noise(keys, torch.tensor([[0, 2047]]))
    assert noise_key(1, 0) == GOLDEN_KEY
    assert noise.flatten().tolist() == pytest.approx(GOLDEN_NOISE, abs=1e-12)


def test_noise_is_standard_gumbel() -> None:
    """Mean is Euler's constant and variance pi^2/6, each within 5 standard errors of 10^6 draws."""
    noise = gumbel_noise(torch.arange(1000), torch.arange(1000)[None])
    assert noise.mean().item() == pytest.approx(0.5772157, abs=5 * 1.2825 / 1000)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=5 * 3.4 / 1000)
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.3, "top_k": 1}])
def test_greedy_takes_the_best_whatever_the_seed(params: dict[str, float]) -> None:
    assert draw_many(params, 50)[0] == 1.0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Every row alone and in a batch of all kinds draws the same."""
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.7, top_k=2, seed=4),
        SamplingParams(temperature=1.0, top_k=4, top_p=0.9, seed=5),
        SamplingParams(temperature=2.0, top_p=0.8, seed=6),
        SamplingParams(temperature=1.0, top_k=1000, seed=7),
    ]
    draws = [Draw(sampling, position) for sampling in kinds for position in range(20)]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(draws), 50, generator=generator)
    together = draw_tokens(logits, draws)
    alone = [draw_tokens(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    assert together == alone


def test_draft_and_target_agree_when_their_logits_do() -> None:
    """The same noise on the same logits is the same token: that is why drafts are accepted."""
    draws = [Draw(SamplingParams(temperature=1.0, seed=9), position) for position in range(100)]
    logits = torch.randn(100, 30, generator=torch.Generator().manual_seed(1))
    nearly = logits + 1e-4 * torch.randn(100, 30, generator=torch.Generator().manual_seed(2))
    same = sum(a == b for a, b in zip(draw_tokens(logits, draws), draw_tokens(nearly, draws)))  # noqa: B905
    assert same >= 99


def test_nothing_to_draw() -> None:
    assert draw_tokens(torch.empty(0, 5), []) == []
