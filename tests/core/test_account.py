"""The account of lost time: what it pays for takes 1 % of the time, and its limits."""

import random
from itertools import count

import pytest

from smartspec_py.core.account import MAX_RESTED, MAX_SAVED, SHARE, LossAccount

STEP_S = 0.03


def num_until_paid(account: LossAccount) -> int:
    """Steps until there is no debt."""
    for num in count():
        if not account.is_in_debt:
            return num
        account.earn(STEP_S)
    raise AssertionError


def test_probes_take_one_percent_of_the_time() -> None:
    """Seconds of probes over all seconds; a probe takes half as long as another step."""
    rng, account = random.Random(5), LossAccount()
    probe_s = whole_s = 0.0
    for _ in range(10_000):
        is_probe = not account.is_in_debt
        step_s = rng.uniform(0.01, 0.05) * (0.5 if is_probe else 1.0)
        if is_probe:
            account.charge_probe(step_s)
        account.earn(step_s)
        probe_s += step_s * is_probe
        whole_s += step_s
    assert 0.9 * SHARE * whole_s < probe_s < 1.1 * SHARE * whole_s


def test_five_probes_are_saved() -> None:
    account = LossAccount()
    for _ in range(10_000):
        account.earn(STEP_S)
    num_probes = 0
    while not account.is_in_debt:
        account.charge_probe(STEP_S)
        num_probes += 1
    assert num_probes == MAX_SAVED + 1


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 100), (2, 200), (20, 300)])
def test_a_probe_that_stalls_is_not_charged_for_the_stall(num_steps: int, expected: int) -> None:
    """It is charged for three steps at most; each step pays 1 %."""
    account = LossAccount()
    account.earn(STEP_S)
    account.charge_probe(num_steps * STEP_S)
    assert num_until_paid(account) == pytest.approx(expected, abs=2)


def num_plans(account: LossAccount, plan_s: float, num_steps: int) -> int:
    """Of so many steps without probes, those with a plan; none of them pays."""
    num = 0
    for _ in range(num_steps):
        has_plan = account.allows_plan
        if has_plan:
            account.charge_plan(plan_s, STEP_S, pays=False)
        account.earn(STEP_S)
        num += has_plan
    return num


def test_poor_plans_take_half_a_percent_of_the_time() -> None:
    """A tenth of a step each, of 5,000 steps; those that stalled are charged for 64 steps. The
    first plans make the debt of a step."""
    assert num_plans(LossAccount(), 0.1 * STEP_S, 5000) == pytest.approx(250 + 10, abs=15)
    assert num_plans(LossAccount(), 0.005 * STEP_S, 5000) == 5000
    assert num_plans(LossAccount(), 10 * STEP_S, 5000) == pytest.approx(5000 / MAX_RESTED, abs=5)


def test_plans_that_are_made_in_any_case_make_no_long_debt() -> None:
    """As with a latency target: later, the account allows a plan within 64 steps."""
    account = LossAccount()
    for _ in range(5000):
        account.charge_plan(0.5 * STEP_S, STEP_S, pays=False)
        account.earn(STEP_S)
    num_rested = 0
    while not account.allows_plan:
        account.earn(STEP_S)
        num_rested += 1
    assert num_rested <= MAX_RESTED


def test_plans_leave_half_of_the_time_for_probes() -> None:
    """The debt of a probe is paid within 200 steps, although each plan takes a tenth of a step."""
    account = LossAccount()
    num_plans(account, 0.1 * STEP_S, 500)
    while account.is_in_debt:
        account.earn(STEP_S)
    account.charge_probe(STEP_S)
    assert 0 < num_plans(account, 0.1 * STEP_S, 220) < 20
    assert not account.is_in_debt


def test_a_plan_that_pays_needs_no_account() -> None:
    account = LossAccount()
    account.earn(STEP_S)
    account.charge(50 * STEP_S)
    assert account.allows_plan
    for _ in range(4):
        account.charge_plan(0.5 * STEP_S, STEP_S, pays=False)
    assert not account.allows_plan
    account.charge_plan(0.1 * STEP_S, STEP_S, pays=True)
    assert account.allows_plan


def test_what_a_probe_owes_stops_no_plans() -> None:
    """Where nothing can be drafted, a plan does not pay, but takes little time. The next one may
    find a match."""
    account = LossAccount()
    account.earn(STEP_S)
    account.charge_probe(3 * STEP_S)
    assert account.is_in_debt
    account.charge_plan(0.005 * STEP_S, STEP_S, pays=False)
    assert account.allows_plan
