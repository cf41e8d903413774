"""Long means of what steps took: they say at every number of rows what steps took there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn.corrections import predicted
from smartspec_py.core.types import MeasuredStep
from smartspec_py.serving.observed_cost import ObservedCosts

PROFILE = CostModel(
    target=PassTable(
        (1, 4, 16), (1, 4), ((0.010, 0.012), (0.011, 0.020), (0.020, 0.050)), 64, 1e-6
    ),
    draft=PassTable((1, 4, 16), (1,), ((0.001,), (0.0012,), (0.002,)), 64, 0.0),
    host_s=0.001,
    catch_up_s=1e-5,
    prompt=PassTable((1,), (1, 128), ((0.010, 0.060),)),
)


def step(
    rows: int, factor: float, drafts: int = 0, prompt: int = 0, host_s: float = 0.0
) -> MeasuredStep:
    """A step whose passes take `factor` of the profile's seconds."""
    tokens = rows * (1 + drafts)
    draft_rows = (rows,) * drafts
    target_s = factor * PROFILE.target_s(rows, tokens, 64)
    target_s += 0.5 * (PROFILE.prefill_s(prompt) if prompt else 0.0)
    draft_s = 2.0 * factor * sum(PROFILE.draft_s(n) for n in draft_rows)
    return MeasuredStep(
        batch_size=rows,
        num_tokens=tokens,
        context_len=64,
        num_generated=tokens,
        draft_rows=draft_rows,
        target_s=target_s,
        draft_s=draft_s,
        total_s=target_s + draft_s + host_s,
        num_prefill_tokens=prompt,
    )


def observe(served: ObservedCosts, step: MeasuredStep) -> None:
    served.observe(step, predicted(PROFILE, step))


def test_every_number_of_rows_has_a_mean_of_its_own() -> None:
    """Light load is 0.8 of the profile and saturation 1.1, whichever came last."""
    served = ObservedCosts(PROFILE)
    for rows, factor in ((1, 0.8), (16, 1.1)):
        for i in range(200):
            host_s = 0.002 + 0.0001 * rows
            observe(served, step(rows, factor, drafts=3 * (i % 2), host_s=host_s))
            observe(served, step(rows, factor, prompt=100, host_s=9.0))
    cost = served.cost
    for rows, factor in ((1, 0.8), (16, 1.1)):
        assert cost.target_s(rows, rows, 64) == pytest.approx(
            factor * PROFILE.target_s(rows, rows, 64)
        )
        assert cost.target_s(rows, 4 * rows, 64) == pytest.approx(
            factor * PROFILE.target_s(rows, 4 * rows, 64)
        )
        assert cost.draft_s(rows) == pytest.approx(2 * factor * PROFILE.draft_s(rows))
        assert cost.step_host_s(rows) == pytest.approx(0.002 + 0.0001 * rows)
    # Never seen: between its neighbours. And what a chunk adds is told from what runs anyway.
    assert 0.8 < cost.target_s(4, 4, 64) / PROFILE.target_s(4, 4, 64) < 1.1
    # (its first steps come before the rest is known)
    assert cost.prefill_s(100) == pytest.approx(0.5 * PROFILE.prefill_s(100), rel=0.02)


def test_it_is_a_mean_and_not_the_last_word() -> None:
    served, rng = ObservedCosts(PROFILE), random.Random(4)
    factors = [rng.uniform(0.8, 1.2) for _ in range(1000)]
    for factor in factors:
        observe(served, step(4, factor))
    assert served.cost.target_s(4, 4, 64) == pytest.approx(0.011, rel=0.02)


def test_a_stall_is_none_of_a_pass() -> None:
    served = ObservedCosts(PROFILE)
    for i in range(1000):
        observe(served, step(1, 500.0 if i == 900 else 1.0, host_s=5.0 if i == 500 else 0.0))
    cost = served.cost
    assert cost.target_s(1, 1, 64) == pytest.approx(0.010, rel=0.006)
    assert cost.host_s < 1e-4


def test_who_has_seen_little_says_what_the_profile_says() -> None:
    served = ObservedCosts(PROFILE)
    assert served.cost == PROFILE
    for _ in range(19):
        observe(served, step(4, 3.0, drafts=3, prompt=0, host_s=1.0))
    assert served.cost == PROFILE
    assert ObservedCosts(replace(PROFILE, draft=None)).cost == replace(PROFILE, draft=None)


def test_rows_that_never_vary_have_no_slope() -> None:
    served = ObservedCosts(PROFILE)
    for _ in range(100):
        observe(served, step(8, 1.0, host_s=0.004))
    assert served.cost.host_s == pytest.approx(0.004)
    assert served.cost.host_row_s == 0.0
