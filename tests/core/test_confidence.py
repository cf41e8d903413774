"""Calibration of confidences, when to stop drafting, and which drafts to verify: against what was
worked by hand, and against every choice there is."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from smartspec_py.core.confidence import (
    BELIEF,
    FORGETTING,
    KNOTS,
    MAX_KINDS,
    REFRESH_STEPS,
    ConfidenceCalibrator,
    DraftJudge,
    Floats,
    RecentGoodput,
    StepPrices,
    draft_worth,
    may_be_left_out,
    trimmed,
    worth_a_pass,
)
from smartspec_py.core.goodput import Objective
from smartspec_py.core.types import SamplingParams, Verification


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(temperature=1.0, verification=Verification.REJECTION), False),
        # Greedy rows are judged as coupled ones whatever is asked for.
        (SamplingParams(temperature=0.0, verification=Verification.REJECTION), True),
        (SamplingParams(temperature=1.0, top_k=1, verification=Verification.REJECTION), True),
    ],
)
def test_only_texts_that_do_not_depend_on_drafts_leave_some_out(
    sampling: SamplingParams, expected: bool
) -> None:
    assert may_be_left_out(sampling) is expected


def test_trimmed_by_hand() -> None:
    """Survivals .9 .8 .1 and .5 .2, 4 tokens held, a second sunk, verifying takes 1 s and .2 s a
    draft. Ranked: .9 .8 .5 .2 .1; (4, 4.9, 5.7, 6.2, 6.4, 6.5) / (2, 2.2, 2.4, 2.6, 2.8, 3)
    = 2, 2.227, 2.375, 2.385, 2.286, 2.167: three drafts, two and one. At 3 tokens a second a draft
    costs .6: .9 and .8 are worth it. What stands behind the drafts, here .7, is not read."""
    survivals = np.array([[0.9, 0.8, 0.1], [0.5, 0.2, 0.7]])
    lengths, verify_s = np.array([3, 2]), 1.0 + 0.2 * np.arange(6)
    assert trimmed(survivals, lengths, verify_s, 1.0, 4.0).tolist() == [2, 1]
    assert trimmed(survivals, lengths, verify_s, objective=Objective(3.0)).tolist() == [2, 0]
    nothing = np.array([0, 0])
    assert trimmed(survivals, nothing, verify_s[:1], 1.0, 4.0).tolist() == [0, 0]


@pytest.mark.parametrize("price", [None, 0.5, 3.0])
def test_trimmed_against_every_choice(price: float | None) -> None:
    """500 steps with costs of any shape, that fall in places too."""
    rng, objective = np.random.default_rng(7), Objective(price)
    num_trimmed = 0
    for _ in range(500):
        num_rows = int(rng.integers(1, 5))
        survivals = np.multiply.accumulate(rng.random((num_rows, 3)).round(1), axis=1)
        lengths = rng.integers(0, 4, num_rows)
        verify_s = 1.0 + rng.random(lengths.sum() + 1).cumsum() * rng.random() - rng.random()
        sunk_s, held = float(rng.random()), float(num_rows)
        scores = {
            chosen: objective.of(
                held + sum(survivals[i, :k].sum() for i, k in enumerate(chosen)),
                sunk_s + verify_s[sum(chosen)],
            )
            for chosen in product(*(range(k + 1) for k in lengths))
        }
        found = trimmed(survivals, lengths, verify_s, sunk_s, held, objective)
        assert scores[tuple(found.tolist())] == pytest.approx(max(scores.values()), abs=1e-12)
        assert (found <= lengths).all()
        num_trimmed += int(found.sum() < lengths.sum())
    assert 100 < num_trimmed < 500


def test_draft_worth_by_hand() -> None:
    """Half of the drafts are accepted with .2, half with .9; a slot costs .3. With survival 1 the
    sure half is worth .6, with .5 it is .15, and with .25 (.225 < .3) nothing."""
    accept_probs, shares = np.array([[0.2, 0.9]] * 3), np.full((3, 2), 0.5)
    found = draft_worth(np.array([1.0, 0.5, 0.25]), accept_probs, shares, 0.3)
    assert found == pytest.approx([0.3, 0.075, 0.0])


def test_worth_a_pass_against_every_subset() -> None:
    """Prices of passes that rise in steps, as padded ones do."""
    rng = np.random.default_rng(3)
    sizes = set()
    for _ in range(300):
        worth = rng.random(5).round(2)
        prices = np.concatenate([[0.0], 0.3 + rng.integers(0, 2, 5).cumsum() * rng.random()])
        net = {
            s: sum(w for w, x in zip(worth, s, strict=True) if x) - prices[sum(s)]
            for s in product((False, True), repeat=5)
        }
        found = tuple(worth_a_pass(worth, prices).tolist())
        assert net[found] == pytest.approx(max(net.values()), abs=1e-12)
        sizes.add(sum(found))
    assert {0, 5} < sizes


def learn(
    calibrator: ConfidenceCalibrator,
    truth: Floats,
    num_steps: int,
    kind: str = "",
    seed: int = 0,
) -> None:
    """Steps of 8 sequences and 4 drafts whose confidences are spread over the knots; truth: how
    often a draft is accepted, by knot."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        confidences = rng.uniform(KNOTS[0], KNOTS[-1], (8, 4))
        is_right = rng.random((8, 4)) < np.interp(confidences, KNOTS, truth)
        num_accepted = np.multiply.accumulate(is_right, axis=1).sum(axis=1)
        calibrator.observe([kind] * 8, confidences, np.full(8, 4), num_accepted)


def at_knots(calibrator: ConfidenceCalibrator, kind: str = "") -> Floats:
    rows = calibrator.rows([kind])
    return calibrator.accept_probs(rows, KNOTS[None, :])[0]


def test_a_proposer_is_first_taken_at_its_word() -> None:
    """Log-odds of 0 are a half; between the knots 0 and 0.75 linear; beyond the ends flat."""
    calibrator = ConfidenceCalibrator()
    assert at_knots(calibrator) == pytest.approx(BELIEF)
    rows = calibrator.rows([""])
    middle = (0.5 + 1 / (1 + math.exp(-0.75))) / 2
    found = calibrator.accept_probs(rows, np.array([[0.0, 0.375, -100.0, 100.0]]))
    assert found[0] == pytest.approx([0.5, middle, BELIEF[0], BELIEF[-1]])
    assert calibrator.accept_probs(rows, np.array([0.375])) == pytest.approx([middle])


def test_an_overconfident_proposer_is_seen_through() -> None:
    """True acceptance is that of a third of the log-odds. 600 steps of 8 sequences bring some 200
    trials to a knot at least, of which the last 1,000 steps' weight (.998 a step) keeps more than
    half: a deviation below .05; the error allowed is three of them."""
    truth = 1 / (1 + np.exp(-KNOTS / 3))
    calibrator = ConfidenceCalibrator()
    before = np.abs(at_knots(calibrator) - truth).max()
    learn(calibrator, truth, 600)
    assert np.abs(at_knots(calibrator) - truth).max() < 0.15 < before


def test_acceptance_never_falls_with_confidence() -> None:
    """Though what was seen does: the surer, the wronger."""
    calibrator = ConfidenceCalibrator()
    for seed in range(20):
        learn(calibrator, BELIEF[::-1], REFRESH_STEPS, seed=seed)
        assert (np.diff(at_knots(calibrator)) >= 0).all()


def test_drafts_behind_a_rejected_one_and_those_left_out_teach_nothing() -> None:
    """Three drafts, one accepted: two trials, whatever the third is. Two of three verified and both
    accepted: two trials, whatever was left out."""
    found = []
    for third in (-5.0, 11.0):
        calibrator = ConfidenceCalibrator()
        confidences = np.array([[2.0, 1.0, third], [2.0, 1.0, third]])
        for _ in range(REFRESH_STEPS):
            calibrator.observe(["", ""], confidences, np.array([3, 2]), np.array([1, 2]))
        found.append(at_knots(calibrator))
    assert found[0].tolist() == found[1].tolist()
    assert np.abs(found[0] - BELIEF).max() > 0.02, "the trials that there were did teach"


def test_counts_by_hand() -> None:
    """Eight steps of one draft with log-odds 0, all rejected: 8 trials at one knot. All kinds: near
    = 2 (.5) / (2 + 8) = .1, then 4 (.1) / (4 + 8) = 1/30; the kind 4 / 30 / (4 + 8) = 1/90. At the
    knot below, belief .3208: near = 2 (.3208) / (2 + 4) = .1069, which stays as nothing was tried
    there. That is more than 1/90 above, so the line is made to rise: the mean of .1069 (the most
    below) and .0111 (the least above), lower ones likewise."""
    calibrator = ConfidenceCalibrator()
    for _ in range(REFRESH_STEPS):
        calibrator.observe(["a"], np.zeros((1, 1)), np.array([1]), np.array([0]))
    at_zero = int(np.flatnonzero(KNOTS == 0.0)[0])
    found = at_knots(calibrator, "a")
    below = 2 * BELIEF[at_zero - 1] / 6
    assert found[at_zero] == pytest.approx((below + 1 / 90) / 2)
    assert found[at_zero - 1] == pytest.approx((below + 1 / 90) / 2)
    shares = calibrator.spread(calibrator.rows(["a"]))[1][0]
    assert shares[at_zero] == pytest.approx((8 + 4 / 25) / 12)
    assert shares.sum() == pytest.approx(1.0)


def test_kinds_are_told_apart_and_a_new_one_begins_with_all() -> None:
    calibrator = ConfidenceCalibrator()
    sure, unsure = np.full(25, 0.95), np.full(25, 0.1)
    learn(calibrator, sure, 200, "sure")
    learn(calibrator, unsure, 200, "unsure")
    assert at_knots(calibrator, "sure")[4:20].min() > 0.7
    assert at_knots(calibrator, "unsure")[4:20].max() < 0.3
    new = at_knots(calibrator, "new")
    assert 0.2 < new[12] < 0.9
    assert calibrator.rows(["sure", "new", "unsure"]).tolist() == [1, 0, 2]


def test_evidence_that_is_not_renewed_fades() -> None:
    """After 6,000 steps without trials .998^6000 = 6e-6 of it is left."""
    calibrator = ConfidenceCalibrator()
    learn(calibrator, np.full(25, 0.05), 300)
    assert np.abs(at_knots(calibrator) - BELIEF).max() > 0.5
    nobody = np.zeros(1, dtype=np.int64)
    for _ in range(6000):
        calibrator.observe([""], np.zeros((1, 4)), nobody, nobody)
    assert at_knots(calibrator) == pytest.approx(BELIEF, abs=0.02)
    assert FORGETTING**6000 < 1e-5


def test_memory_is_bounded_and_the_oldest_kind_goes() -> None:
    calibrator = ConfidenceCalibrator()
    for number in range(MAX_KINDS + 10):
        learn(calibrator, BELIEF, REFRESH_STEPS, f"kind {number}")
    assert calibrator.kinds == tuple(f"kind {number}" for number in range(10, MAX_KINDS + 10))
    learn(calibrator, BELIEF, REFRESH_STEPS, "kind 10")
    assert calibrator.kinds[-1] == "kind 10"


def test_the_price_is_recent_token_goodput() -> None:
    """(0.98 x 30 + 10) / (0.98 x 1 + 1) = 39.4 / 1.98."""
    recent = RecentGoodput()
    assert recent.price == 0.0
    recent.observe(30, 1.0)
    assert recent.price == 30.0
    recent.observe(10, 1.0)
    assert recent.price == pytest.approx(39.4 / 1.98)


DEPTH = 4
FLAT_PASS = np.array([0.0, 1.0, 1.0, 1.0])


def judge(
    price: float = 0.3,
    is_free: tuple[bool, ...] = (True, True, True),
    may_leave_out: tuple[bool, ...] = (True, True, True),
    verify_s: Floats | None = None,
) -> DraftJudge:
    """Three sequences of a proposer that is taken at its word; a pass takes 1 s for any rows."""
    seconds = 10 + np.zeros(3 * DEPTH + 1) if verify_s is None else verify_s
    prices = StepPrices(seconds, FLAT_PASS, price)
    return DraftJudge(ConfidenceCalibrator(), [""] * 3, is_free, may_leave_out, DEPTH, prices)


def test_who_goes_on_by_hand() -> None:
    """Slots cost nothing here, so the next draft is worth its survival times the mean of what the
    knots believe. Those from -6 to 6 believe 8.5 together, as they are symmetric, and the 8 above
    nearly 8: .66 on average. 3 x .66 = 1.98 pays for a pass at a price of 1.9, not of 2.1. After
    drafts of log-odds 12, 0 and -6, survivals are 1, .5 and .0025: together worth .9916. Nobody is
    left out while the pass costs the same for all."""
    assert BELIEF.mean() == pytest.approx(0.66, abs=0.001)
    assert judge(2.1).going_on([0, 1, 2]) == [False] * 3
    assert judge(1.9).going_on([0, 1, 2]) == [True] * 3
    for price, expected in ((0.985, [True] * 3), (0.997, [False] * 3)):
        one = judge(price)
        one.hear([0, 1, 2], [12.0, 0.0, -6.0])
        assert one.going_on([0, 1, 2]) == expected
    alone = judge(0.5)
    alone.hear([0, 1, 2], [12.0, 0.0, -6.0])
    assert alone.going_on([1, 2]) == [False, False], ".5 x .66 does not pay for a pass"


def test_a_dear_slot_stops_the_unsure_alone() -> None:
    """A slot takes 1 s at .4 tokens a second: of survival .002 nothing is worth that."""
    one = judge(0.1, verify_s=4.0 * np.arange(3 * DEPTH + 1))
    one.hear([0, 1, 2], [12.0, 2.0, -6.0])
    assert one.going_on([0, 1, 2]) == [True, True, False]
    one.hear([0, 1], [-6.0, 12.0])
    assert one.num_to_verify([2, 2, 1]).tolist() == [1, 2, 0]


def test_who_drafts_as_asked_goes_on_and_is_verified() -> None:
    one = judge(50.0, is_free=(True, False, True), verify_s=4.0 * np.arange(3 * DEPTH + 1))
    assert one.going_on([0, 1, 2]) == [False, True, False]
    one.hear([1], [-6.0])
    assert one.going_on([1]) == [True]
    one.hear([1], [-6.0])
    assert one.num_to_verify([0, 2, 0]).tolist() == [0, 2, 0]


def test_drafts_verified_by_rejection_are_stopped_but_never_left_out() -> None:
    """The first is verified by rejection, the second coupled; both drafts are worthless."""
    one = judge(0.1, may_leave_out=(False, True, True), verify_s=4.0 * np.arange(3 * DEPTH + 1))
    one.hear([0, 1, 2], [-6.0, -6.0, 12.0])
    assert one.going_on([0, 1, 2]) == [False, False, True]
    assert one.num_to_verify([1, 1, 1]).tolist() == [1, 0, 1]


def test_held_drafts_move_the_others_along_the_cost() -> None:
    """Two drafts are free, a third costs 5 s at a price of .1. Without held drafts both others are
    verified; with one, only the better."""
    verify_s = np.array([1.0, 1.0, 1.0, 6.0, 11.0])
    for is_held, expected in ((False, [0, 1, 1]), (True, [1, 1, 0])):
        one = judge(0.1, may_leave_out=(not is_held, True, True), verify_s=verify_s)
        one.hear([0, 1, 2], [-6.0, 1.0, -1.0])
        assert one.num_to_verify([1, 1, 1]).tolist() == expected


def test_a_judge_hands_on_what_it_heard() -> None:
    calibrator = ConfidenceCalibrator()
    for _ in range(REFRESH_STEPS):
        prices = StepPrices(np.zeros(9), np.zeros(3), 0.0)
        one = DraftJudge(calibrator, ["a", "b"], [True] * 2, [True] * 2, DEPTH, prices)
        assert one.going_on([0, 1]) == [True, True], "a second that is worth nothing"
        one.hear([0, 1], [0.0, 0.0])
        one.hear([1], [3.0])
        assert one.num_to_verify([1, 2]).tolist() == [1, 2]
        one.observe([1, 2], [0, 2])
    assert calibrator.kinds == ("a", "b")
    rows = calibrator.rows(["a", "b"])
    low, high = calibrator.accept_probs(rows, np.array([0.0, 0.0]))
    assert low < 0.4 < 0.6 < high
