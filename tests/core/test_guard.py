"""The guard: simulated steps with known truth, seeded, and a planner that is wrong.

`simulate` serves with speculation wherever the guard lets it. Speed is tokens per second relative
to never speculating, with the seconds that steps take in truth: noise and stalls are seen by the
guard only. The profile is 30 % off on purpose: the guard must not mind.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from oracle import expected_tokens

from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn.guard import Guard
from smartspec_py.core.types import MeasuredStep

PROFILE = CostModel(
    target=PassTable((1, 32), (1, 16), ((0.020, 0.022), (0.026, 0.076))),
    draft=PassTable((1, 32), (1,), ((0.001,), (0.001,))),
)
FLAT = CostModel(target=PassTable((1,), (1,), ((0.025,),)))
CONTEXT_LEN = 100
DRAFT_LEN = 3
PROFILE_ERROR = 1.3


def step(
    batch_size: int,
    context_len: float,
    num_generated: int,
    step_s: float,
    is_speculating: bool,
) -> MeasuredStep:
    """As the guard reads it: nothing of it is timed apart."""
    return MeasuredStep(
        batch_size=batch_size,
        num_tokens=batch_size + int(is_speculating),
        context_len=context_len,
        num_generated=num_generated,
        draft_rows=(),
        target_s=0.0,
        draft_s=0.0,
        total_s=step_s,
    )


@pytest.mark.parametrize("is_warm", [True, False])
def test_steps_without_drafts_between_others_may_be_cold(is_warm: bool) -> None:
    """Drafts bring 2 % less than they cost beside steps of 25 ms, and 17 % more beside those of 30,
    of which a server without speculation would not pay 5 for a change of shapes."""
    profile = replace(FLAT, shape_change_s=0.005)
    guard, none_s = Guard(profile), 0.025 if is_warm else 0.030
    for number in range(4000):
        speculates = number % 4 > 0 and not guard.is_off(1, CONTEXT_LEN)
        made = step(
            1, CONTEXT_LEN, 2 if speculates else 1, 0.053 if speculates else none_s, speculates
        )
        guard.observe(made if speculates else replace(made, is_warm=is_warm))
    assert guard.is_off(1, CONTEXT_LEN)


@dataclass
class Truth:
    """accept_prob of each draft; slowdown: seconds of a speculating step relative to one without
    drafts; machine: factor on every step."""

    accept_prob: float
    slowdown: float
    machine: float = 1.0

    @property
    def gain(self) -> float:
        return expected_tokens((self.accept_prob,) * DRAFT_LEN, DRAFT_LEN) / self.slowdown


def with_gain(gain: float, accept_prob: float = 0.7) -> Truth:
    """Speculation that is this many times as fast as none."""
    return Truth(accept_prob, expected_tokens((accept_prob,) * DRAFT_LEN, DRAFT_LEN) / gain)


@dataclass
class Run:
    """switches: steps at which the guard changed its mind, from on to off first."""

    num_tokens: float = 0.0
    num_none_steps: float = 0.0
    switches: list[int] = field(default_factory=list)
    num_references: int = 0
    guard: Guard = field(default_factory=lambda: Guard(PROFILE))

    @property
    def speed(self) -> float:
        return self.num_tokens / self.num_none_steps


def num_tokens_of(rng: random.Random, batch_size: int, accept_prob: float, draft_len: int) -> int:
    tokens = batch_size
    for _ in range(batch_size):
        for _ in range(draft_len):
            if rng.random() >= accept_prob:
                break
            tokens += 1
    return tokens


def simulate(
    truth: Callable[[int], Truth],
    num_steps: int,
    batch_size: int = 8,
    seed: int = 1,
    noise: float = 0.05,
    stall_share: float = 0.01,
) -> Run:
    rng, run = random.Random(seed), Run()
    account = run.guard.account(batch_size, CONTEXT_LEN)
    none_s = PROFILE_ERROR * PROFILE.target_s(batch_size, batch_size, CONTEXT_LEN)
    for i in range(num_steps):
        now = truth(i)
        is_allowed = not run.guard.is_off(batch_size, CONTEXT_LEN)
        is_probe = is_allowed and run.guard.wants_reference(batch_size, CONTEXT_LEN)
        is_speculating = is_allowed and not is_probe
        size, tokens = now.machine, batch_size
        if is_speculating:
            size *= now.slowdown
            tokens = num_tokens_of(rng, batch_size, now.accept_prob, DRAFT_LEN)
        seen_s = none_s * size * rng.gauss(1, noise) * (20 if rng.random() < stall_share else 1)
        if is_probe and not run.guard.is_in_trial(batch_size, CONTEXT_LEN):
            account.charge_probe(seen_s)
        before = run.guard.num_switches
        run.guard.earn(batch_size, CONTEXT_LEN, seen_s)
        run.guard.observe(step(batch_size, CONTEXT_LEN, tokens, seen_s, is_speculating))
        if run.guard.num_switches != before:
            run.switches.append(i)
        run.num_tokens += tokens / batch_size
        run.num_none_steps += size
        run.num_references += is_probe
    return run


@pytest.mark.parametrize(
    ("gain", "batch_size", "most_steps"),
    [(0.5, 1, 300), (0.5, 8, 160), (0.7, 1, 400), (0.9, 8, 1000)],
)
def test_speculation_that_loses_is_stopped_and_little_is_lost(
    gain: float, batch_size: int, most_steps: int
) -> None:
    """Seeds are fixed; over seeds 0..11 every stop came sooner than most_steps. What is lost until
    the first trial, and in a last trial, is not earned in these steps."""
    run = simulate(lambda _: with_gain(gain), 30_000, batch_size)
    assert run.switches[0] < most_steps
    assert run.speed >= 0.975
    other = simulate(lambda _: with_gain(gain), most_steps, batch_size, seed=2)
    assert other.switches


@pytest.mark.parametrize(("gain", "batch_size", "num_steps"), [(1.1, 1, 30_000), (1.3, 8, 15_000)])
def test_speculation_that_gains_is_never_stopped(
    gain: float, batch_size: int, num_steps: int
) -> None:
    """Noise of 5 % and 1 % of stalls of 20 times, which make 1.2 of the time; references take their
    1 % at most."""
    run = simulate(lambda _: with_gain(gain), num_steps, batch_size)
    assert run.switches == []
    assert run.speed > 0.985 * gain
    assert run.num_references <= 0.012 * run.num_none_steps


def test_where_it_makes_no_difference_it_is_left_on() -> None:
    """As fast as none, 2 % above BAR: a trial is lost with odds of less than 1 %."""
    run = simulate(lambda _: with_gain(1.0), 30_000)
    assert run.switches == []
    assert run.speed == pytest.approx(1.0, abs=0.01)


def test_frequent_long_steps_are_no_accident() -> None:
    """Every fifth speculating step takes five times as long: 1.3 gained, and 1.8 lost of that."""
    run = simulate(
        lambda i: replace(
            with_gain(1.3), slowdown=with_gain(1.3).slowdown * (5 if i % 5 == 0 else 1)
        ),
        6_000,
        stall_share=0.0,
    )
    assert len(run.switches) > 0


def test_it_comes_back_when_conditions_do() -> None:
    """Lost for 4,000 steps, gained after: the pause at that time is 100 times what a trial lost,
    which was at most 80 steps."""
    run = simulate(lambda i: with_gain(0.7 if i < 4000 else 1.3), 20_000)
    assert not run.guard.is_off(8, CONTEXT_LEN)
    back = run.switches[-1]
    assert 4000 <= back <= 12_000
    assert len(run.switches) % 2 == 0


def test_switches_are_bounded_where_conditions_flap() -> None:
    """Two for a pause and a trial at most; it still gains by the good half."""
    run = simulate(lambda i: with_gain(0.6 if i // 1000 % 2 else 1.4), 30_000)
    assert run.guard.num_switches == len(run.switches)
    assert len(run.switches) <= 40
    assert run.speed > 0.99


def test_buckets_are_judged_apart() -> None:
    """Speculation gains at 1 row and loses at 16; contexts below 256 and above are two buckets."""
    guard = Guard(PROFILE)
    for _ in range(300):
        guard.observe(step(1, 100, 2, 1.5, is_speculating=True))
        guard.observe(step(1, 100, 1, 1.0, is_speculating=False))
        guard.observe(step(16, 100, 20, 2.5, is_speculating=True))
        guard.observe(step(16, 100, 16, 1.0, is_speculating=False))
    assert not guard.is_off(1, 100)
    assert guard.is_off(16, 100)
    assert guard.is_off(31, 255)
    assert not guard.is_off(15, 100)
    assert not guard.is_off(32, 100)
    assert not guard.is_off(16, 256)


def test_a_profile_that_says_nothing_ends_no_loop() -> None:
    """A pass of no time at all: steps are compared by their tokens alone, and a loss is seen."""
    free = PassTable((1,), (1,), ((0.0,),))
    guard = Guard(CostModel(free))
    for i in range(2000):
        is_speculating = i % 4 > 0
        step_s = 0.030 if is_speculating else 0.010
        guard.observe(step(4, 100.0, 4, step_s, is_speculating))
    assert guard.is_off(4, 100.0)


def test_a_machine_that_slows_down_is_not_held_against_speculation() -> None:
    """Everything takes 1.6 times as long in every other 3,000 steps, where speculation gains 1.2:
    against references of the faster time it would look like 0.75."""
    run = simulate(lambda i: replace(with_gain(1.2), machine=1.6 if i // 3000 % 2 else 1.0), 18_000)
    assert run.switches == []
