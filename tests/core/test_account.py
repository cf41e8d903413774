"""The account of lost time: what it pays for takes 1 % of the time, and its limits."""

import random

import pytest

from smartspec_py.core.account import SHARE, LossAccount


def num_probes(account: LossAccount, num_steps: int, step_s: float = 0.03) -> int:
    """Steps that the account pays for, of so many."""
    num = 0
    for _ in range(num_steps):
        is_probe = not account.is_in_debt
        num += is_probe
        account.charge(step_s * is_probe)
        account.earn(step_s)
    return num


def test_what_is_charged_takes_one_percent_of_the_time() -> None:
    """Seconds of probes over all seconds; a probe takes half as long as another step."""
    rng, account = random.Random(5), LossAccount(most_saved=4.0)
    probe_s = whole_s = 0.0
    for _ in range(10_000):
        is_probe = not account.is_in_debt
        step_s = rng.uniform(0.01, 0.05) * (0.5 if is_probe else 1.0)
        account.charge(step_s * is_probe)
        account.earn(step_s)
        probe_s += step_s * is_probe
        whole_s += step_s
    assert 0.9 * SHARE * whole_s < probe_s < 1.1 * SHARE * whole_s


@pytest.mark.parametrize(("most_saved", "expected"), [(0.0, 1), (4.0, 5)])
def test_so_much_is_saved(most_saved: float, expected: int) -> None:
    """One probe is left when an account reaches 0."""
    account = LossAccount(most_saved)
    for _ in range(10_000):
        account.earn(0.03)
    assert num_probes(account, 50) == expected


def test_a_debt_is_paid_after_so_many_steps() -> None:
    """A probe that takes 20 steps is charged for three, and one that takes a step for one."""
    for probe_s, expected in ((0.4, 300), (0.02, 100)):
        account = LossAccount(longest_debt=300)
        account.charge(probe_s)
        num_steps = 0
        while account.is_in_debt:
            account.earn(0.02)
            num_steps += 1
        assert num_steps == pytest.approx(expected, abs=2)


def test_a_settled_debt_leaves_what_is_saved() -> None:
    account = LossAccount(most_saved=4.0)
    account.charge(1.0)
    account.settle()
    assert not account.is_in_debt
    for _ in range(250):
        account.earn(0.03)
    account.settle()
    assert num_probes(account, 50) == 3
