"""The formulas of goodput against numbers worked by hand."""

import pytest

from smartspec_sim.goodput import accept_trials, expected_tokens, survival


def test_survival_is_a_falling_geometric_series() -> None:
    """0.5, 0.5 * 0.5 = 0.25, 0.125."""
    assert survival([0.5, 0.5, 0.5]).tolist() == [0.5, 0.25, 0.125]
    assert survival([]).tolist() == []


def test_probabilities_may_differ_by_position() -> None:
    """0.5, 0.5 * 0.8 = 0.4: two drafts bring 1 + 0.5 + 0.4."""
    assert survival([0.5, 0.8]).tolist() == pytest.approx([0.5, 0.4])
    assert expected_tokens((0.5, 0.8), 2) == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("accept_prob", "draft_len", "tokens"),
    [
        (0.5, 0, 1.0),  # no drafts: the target's own token
        (0.5, 1, 1.5),
        (0.5, 3, 1.875),  # (1 - 0.5^4) / 0.5
        (0.0, 5, 1.0),
        (1.0, 5, 6.0),  # the limit, where the closed form divides by zero
    ],
)
def test_expected_tokens(accept_prob: float, draft_len: int, tokens: float) -> None:
    assert expected_tokens((accept_prob,) * draft_len, draft_len) == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("num_drafted", "num_accepted", "trials"),
    [
        (0, 0, 0),  # nothing was put to the test
        (5, 0, 1),  # only the first was looked at
        (5, 3, 4),
        (5, 5, 5),
    ],
)
def test_drafts_behind_the_first_rejected_one_are_no_trials(
    num_drafted: int, num_accepted: int, trials: int
) -> None:
    assert accept_trials(num_drafted, num_accepted) == trials


def test_accepted_over_trials_is_the_conditional_probability() -> None:
    """At a = 0.7, k = 5: n are accepted with probability 0.7^n * 0.3, all five with 0.7^5.

    Mean accepted 1.941, mean trials 2.773, their ratio 0.7; over the 5 drafted it would read 0.388.
    """
    chances = [0.7**n * (0.3 if n < 5 else 1.0) for n in range(6)]
    accepted = sum(chance * n for n, chance in enumerate(chances))
    trials = sum(chance * accept_trials(5, n) for n, chance in enumerate(chances))
    assert accepted / trials == pytest.approx(0.7)
    assert accepted / 5 == pytest.approx(0.388, abs=0.001)
