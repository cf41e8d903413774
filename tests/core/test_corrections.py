"""Cost corrections: what is learned from which steps, and what the planner does with it.

Everything is seeded and virtual. `closed_loop` runs the real planner on corrected costs, with
acceptance known, against true costs that change in mid-run. Regret is tokens per second lost
against the best single k under the true costs, seconds of probes included.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from oracle import expected_tokens

from smartspec_py.core.account import LossAccount
from smartspec_py.core.cost import CostModel, PassTable
from smartspec_py.core.learn.corrections import UNSEEN_STEPS, CostCorrections
from smartspec_py.core.plan.planner import plan
from smartspec_py.core.types import DraftOption, MeasuredStep, SequenceView

BOUNDS = (0.1, 10.0)
NOISE = 0.05
STALL_SHARE, STALL = 0.01, 20.0
MAX_DRAFT_LEN = 8
NUM_ROWS = 8

Noise = Callable[[], float]


def affine_cost(base_s: float, token_s: float, draft_pass_s: float) -> CostModel:
    """base_s + 0.2 ms a row + token_s for each draft, and draft_pass_s for each draft pass."""
    rows, tokens = (1, 32), (1, 16)
    seconds = tuple(
        tuple(base_s + 0.0002 * b + token_s * b * (n - 1) for n in tokens) for b in rows
    )
    return CostModel(PassTable(rows, tokens, seconds), PassTable((1,), (1,), ((draft_pass_s,),)))


PROFILE = affine_cost(0.010, 0.0006, 0.002)


def step_of(cost: CostModel, draft_lens: list[int], noise: Noise = lambda: 1.0) -> MeasuredStep:
    """What such a step takes by `cost`, each part times a number of `noise`."""
    rows = len(draft_lens)
    passes = tuple(sum(k >= p for k in draft_lens) for p in range(1, max(draft_lens) + 1))
    num_tokens = rows + sum(draft_lens)
    target_s = cost.target_s(rows, num_tokens, 0) * noise()
    draft_s = sum(cost.draft_s(n) for n in passes) * noise()
    num_drafting = sum(k > 0 for k in draft_lens)
    host_s = cost.host_s + cost.draft_host_s * num_drafting
    return MeasuredStep(
        batch_size=rows,
        num_tokens=num_tokens,
        context_len=0,
        num_generated=num_tokens,
        draft_rows=passes,
        target_s=target_s,
        draft_s=draft_s,
        num_drafting=num_drafting,
        total_s=target_s + draft_s + host_s * noise(),
    )


def noise_of(seed: int, stall_share: float = 0.0) -> Noise:
    rng = random.Random(seed)
    return lambda: rng.gauss(1, NOISE) * (STALL if rng.random() < stall_share else 1.0)


def varied_steps(cost: CostModel, num_steps: int, noise: Noise) -> Iterator[MeasuredStep]:
    """1, 4 and 16 rows, with 0 to 4 drafts each."""
    for i in range(num_steps):
        yield step_of(cost, [i % 5] * (1, 4, 16)[i % 3], noise)


def learned(profile: CostModel, steps: Iterator[MeasuredStep]) -> CostCorrections:
    corrections = CostCorrections(profile)
    for step in steps:
        corrections.observe(step)
    return corrections


def test_nothing_seen_is_the_profile() -> None:
    assert CostCorrections(PROFILE).cost == PROFILE
    assert CostCorrections(PROFILE).mean_errors == (0.0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_base": 1.5},
        {"target_base": 0.5, "target_slope": 1.5},
        {"target_slope": 1.5},
        {"draft_factor": 2.0},
        {"draft_factor": 0.5},
        {"host_s": 0.002},
        {"draft_host_s": 0.0002},
    ],
    ids=str,
)
def test_varied_steps_tell_the_parts_apart(changes: dict[str, float]) -> None:
    """Predictions of any step are within 4 % of the truth: noise of 5 % over about 100 steps is
    0.5 % a prediction inside the data, so this is at 8 standard deviations."""
    true = replace(PROFILE, **changes)
    corrections = learned(PROFILE, varied_steps(true, 500, noise_of(1, STALL_SHARE)))
    for draft_lens in ([0], [4], [0] * 8, [2] * 8, [4] * 16):
        corrected = corrections.cost
        found, wanted = step_of(corrected, draft_lens), step_of(true, draft_lens)
        assert found.total_s == pytest.approx(wanted.total_s, rel=0.04)
        assert found.draft_s == pytest.approx(wanted.draft_s, rel=0.04)


@pytest.mark.parametrize("stall", [5.0, 20.0, 50.0, 1000.0])
def test_a_stall_moves_little(stall: float) -> None:
    corrections = learned(PROFILE, varied_steps(PROFILE, 300, noise_of(2)))
    before = corrections.cost
    corrections.observe(step_of(PROFILE, [3] * 8, lambda: stall))
    for draft_lens in ([0] * 8, [3] * 8):
        expected_s = step_of(before, draft_lens).total_s
        now_s = step_of(corrections.cost, draft_lens).total_s
        assert now_s == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize("factor", [0.0, 0.01, 100.0])
def test_factors_stay_in_bounds(factor: float) -> None:
    low, high = BOUNDS
    corrections = CostCorrections(PROFILE)
    for step in varied_steps(PROFILE, 300, lambda: factor):
        corrections.observe(step)
        cost = corrections.cost
        for value in (cost.target_base, cost.target_slope, cost.draft_factor):
            assert low <= value <= high
        assert cost.host_s >= 0.0


def test_evidence_that_is_not_renewed_gives_way_to_the_profile() -> None:
    """Kept 0.99 a step: 100 steps' worth of evidence falls to the ridge's in 1,060 steps."""
    noise = noise_of(4)
    true = replace(PROFILE, draft_factor=2.0, target_slope=1.5)
    corrections = learned(PROFILE, varied_steps(true, 300, noise))
    assert corrections.cost.draft_factor == pytest.approx(2.0, rel=0.03)
    factors = []
    for _ in range(3):
        for _ in range(800):
            corrections.observe(step_of(true, [0] * 8, noise))
        factors.append(corrections.cost.draft_factor)
    assert factors[0] > 1.5
    assert factors[2] == pytest.approx(1.0, abs=0.05)
    assert corrections.cost.target_slope == pytest.approx(1.0, abs=0.05)


def test_steps_with_chunks_teach_nothing_of_the_target() -> None:
    corrections = CostCorrections(PROFILE)
    step = step_of(PROFILE, [2] * 4)
    with_chunk = replace(step, num_prefill_tokens=64, target_s=2 * step.target_s)
    for _ in range(100):
        corrections.observe(with_chunk)
    cost = corrections.cost
    assert (cost.target_base, cost.target_slope) == (1.0, 1.0)
    assert corrections.mean_errors == (0.0, 0.0)


def test_draft_prefill_is_part_of_what_drafting_is_predicted_to_take() -> None:
    profile = replace(PROFILE, draft_prefill_s=0.0001)
    corrections = CostCorrections(profile)
    step = step_of(profile, [2] * 4)
    late = replace(step, num_draft_prefill_tokens=500, draft_s=step.draft_s + 0.05)
    for _ in range(50):
        corrections.observe(late)
    assert corrections.cost.draft_factor == pytest.approx(1.0)
    assert corrections.cost.draft_prefill_s == pytest.approx(0.0001)
    dearer = replace(late, draft_s=late.draft_s + 0.05)
    for _ in range(50):
        corrections.observe(dearer)
        corrections.observe(step)
    assert corrections.cost.draft_factor == pytest.approx(1.0, rel=0.02)
    assert corrections.cost.draft_prefill_s == pytest.approx(0.0002, rel=0.02)


def test_errors_before_and_after() -> None:
    """All passes 1.5 times as long: the profile is a third short, |1/1.5 - 1|. What is left after
    correction is noise: its mean absolute value is 0.8 * 5 %."""
    true = replace(PROFILE, target_base=1.5, target_slope=1.5, draft_factor=1.5)
    corrections = learned(PROFILE, varied_steps(true, 1000, noise_of(5)))
    by_profile, corrected = corrections.mean_errors
    assert by_profile == pytest.approx(1 / 3, abs=0.03)
    assert corrected < 0.05


def test_drafts_are_wanted_where_none_were_made_for_long() -> None:
    corrections = learned(PROFILE, (step_of(PROFILE, [3] * 8) for _ in range(300)))
    for _ in range(UNSEEN_STEPS):
        assert not corrections.wants_drafts(0)
        corrections.observe(step_of(PROFILE, [0] * 8))
    assert corrections.wants_drafts(0)


def test_drafts_of_prompt_lookup_do_not_end_the_wait() -> None:
    """They have no draft passes."""
    corrections = CostCorrections(PROFILE)
    of_lookup = replace(step_of(PROFILE, [3] * 8), draft_rows=(), draft_s=0.0)
    for _ in range(UNSEEN_STEPS):
        corrections.observe(of_lookup)
    assert corrections.wants_drafts(0)


@dataclass
class Outcome:
    """tokens and best_tokens (in the same seconds) of each step."""

    tokens: list[float]
    best_tokens: list[float]

    def regret(self, first: int, last: int) -> float:
        return 1.0 - sum(self.tokens[first:last]) / sum(self.best_tokens[first:last])


def goodput_of(cost: CostModel, accept_prob: float, draft_len: int) -> float:
    tokens = NUM_ROWS * expected_tokens((accept_prob,) * MAX_DRAFT_LEN, draft_len)
    return tokens / step_of(cost, [draft_len] * NUM_ROWS).total_s


def best_goodput(cost: CostModel, accept_prob: float) -> float:
    return max(goodput_of(cost, accept_prob, k) for k in range(MAX_DRAFT_LEN + 1))


def closed_loop(
    profile: CostModel,
    true_costs: list[tuple[int, CostModel]],
    accept_prob: float,
    seed: int,
) -> Outcome:
    """The planner on corrected costs; true_costs: (steps, cost) one after the other."""
    accept_probs = (accept_prob,) * MAX_DRAFT_LEN
    views = [
        SequenceView(i, 0, 1000, "goodput", (DraftOption(MAX_DRAFT_LEN, accept_probs),))
        for i in range(NUM_ROWS)
    ]
    noise = noise_of(seed, STALL_SHARE)
    corrections, account = CostCorrections(profile), LossAccount()
    outcome = Outcome([], [])
    for num_steps, true in true_costs:
        best = best_goodput(true, accept_prob)
        for _ in range(num_steps):
            draft_lens = list(plan(views, corrections.cost).draft_lens.values())
            wanted = any(draft_lens) or corrections.wants_drafts(0)
            is_probe = wanted and not account.is_in_debt
            if is_probe:
                draft_lens = [0 if any(draft_lens) else 2] * NUM_ROWS
            step = step_of(true, draft_lens, noise)
            corrections.observe(step)
            if is_probe:
                account.charge_probe(step.total_s)
            account.earn(step.total_s)
            took_s = step_of(true, draft_lens).total_s
            outcome.tokens.append(sum(expected_tokens(accept_probs, k) for k in draft_lens))
            outcome.best_tokens.append(best * took_s)
    return outcome


CHANGES = {
    "draft x 2": (affine_cost(0.010, 0.0001, 0.0040), {"draft_factor": 2.0}, 0.85),
    "slope x 1.5": (affine_cost(0.020, 0.0015, 0.0005), {"target_slope": 1.5}, 0.9),
    "5 ms in the target": (affine_cost(0.002, 0.0002, 0.0005), {"target_base": 3.4}, 0.8),
    "5 ms in the host": (affine_cost(0.002, 0.0002, 0.0005), {"host_s": 0.005}, 0.8),
}
"""Profile, what changes, and acceptance; each moves the best k of 8 rows: 3 to 1, 3 to 1, 1 to 3,
1 to 3."""

BEFORE, SETTLING, AFTER = 400, 200, 300
"""Steps before the change, until regret is looked at again, and for which it is."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_costs_is_followed(name: str) -> None:
    profile, change, accept_prob = CHANGES[name]
    true = replace(profile, **change)
    frozen = max(range(MAX_DRAFT_LEN + 1), key=lambda k: goodput_of(profile, accept_prob, k))
    assert 1 - goodput_of(true, accept_prob, frozen) / best_goodput(true, accept_prob) > 0.05
    steps = [(BEFORE, profile), (SETTLING + AFTER, true)]
    outcome = closed_loop(profile, steps, accept_prob, seed=0)
    assert outcome.regret(BEFORE + SETTLING, BEFORE + SETTLING + AFTER) < 0.03
