"""The regression behind the cost corrections, by itself."""

import random

import numpy as np
import pytest

from smartspec_py.core.learn.regression import NOISE, RidgeRegression


def two_values(sds: tuple[float, float] = (1.0, 1.0)) -> RidgeRegression:
    return RidgeRegression(prior=(1.0, 0.0), sds=sds)


def test_nothing_seen_is_the_prior() -> None:
    assert two_values().values.tolist() == [1.0, 0.0]


def test_varied_features_tell_the_values_apart() -> None:
    """2 % of noise over about 100 steps: 0.2 % each, times 3 for what the two share."""
    rng = random.Random(1)
    found = two_values()
    for i in range(400):
        x = np.array([1.0, (0.0, 0.5, 1.0)[i % 3]])
        found.observe(x, float(x @ [1.4, 0.3]) * rng.gauss(1, 0.02), found.predict(x))
    assert found.values == pytest.approx([1.4, 0.3], abs=0.03)


def test_where_all_is_alike_the_squares_of_the_sds_share_out_the_blame() -> None:
    """By one observation, small enough for the tails to play no part: of what is missing each gets
    its variance over the sum of both and of the noise's."""
    found = two_values((0.2, 0.1))
    found.observe(np.array([1.0, 1.0]), 1.02, 1.0)
    share = 0.02 / (0.2**2 + 0.1**2 + NOISE**2)
    # The first of RECENT errors that is not 0 stands beside a median of 0, and is not tamed.
    assert found.values == pytest.approx([1 + 0.2**2 * share, 0.1**2 * share], rel=0.01)


def test_evidence_that_is_not_renewed_gives_way_to_the_prior() -> None:
    found = two_values()
    for _ in range(100):
        found.observe(np.array([1.0, 0.0]), 2.0, 2.0)
    assert found.values[0] == pytest.approx(2.0, abs=0.01)
    for _ in range(2000):
        found.fade()
    assert found.values[0] == pytest.approx(1.0, abs=0.01)


def test_a_stall_moves_nothing_and_a_change_is_followed_in_three_dozen_steps() -> None:
    found = two_values()
    x = np.array([1.0, 0.0])
    for _ in range(200):
        found.observe(x, 1.0, 1.0)
    found.observe(x, 50.0, 1.0)
    assert found.values[0] == pytest.approx(1.0, abs=0.002)
    for _ in range(36):
        found.observe(x, 1.5, found.predict(x))
    assert found.values[0] == pytest.approx(1.5, abs=0.05)
