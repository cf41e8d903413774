"""Acceptance estimates: priors, evidence, forgetting, and the way back from all rejected."""

from itertools import pairwise

import pytest

from smartspec_py.core.acceptance import INITIAL_MEAN, AcceptanceTracker


def observe_all(
    tracker: AcceptanceTracker, steps: list[tuple[int, int]], sequence: int = 1
) -> None:
    for num_drafted, num_accepted in steps:
        tracker.observe(sequence, num_drafted, num_accepted)


def test_the_initial_mean_stands_before_anything_was_seen() -> None:
    tracker = AcceptanceTracker()
    assert tracker.accept_prob(1) == tracker.shared_mean == INITIAL_MEAN == 0.7


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # 3 accepted in 4 trials: shared (8*0.7 + 3)/12 = 0.71667, own (32*0.71667 + 3)/36
        ([(5, 3)], 0.720370),
        # All rejected is one trial: shared 5.6/9 = 0.62222, own 32*0.62222/33
        ([(5, 0)], 0.603367),
        # All accepted is 5 trials: shared (5.6 + 5)/13 = 0.815385, own (32*0.815385 + 5)/37
        ([(5, 5)], 0.840333),
        # A step without drafts only fades: 3 and 4 become 2.94 and 3.92 (shared: 2.997 and 3.996),
        # shared 8.597/11.996 = 0.716655, own (22.93296 + 2.94)/35.92
        ([(5, 3), (0, 0)], 0.720294),
        # Nothing was ever drafted: the prior.
        ([(0, 0)] * 10, 0.7),
    ],
)
def test_estimate(steps: list[tuple[int, int]], expected: float) -> None:
    tracker = AcceptanceTracker()
    observe_all(tracker, steps)
    assert tracker.accept_prob(1) == pytest.approx(expected, abs=1e-6)


def test_all_rejected_falls_within_sixteen_steps() -> None:
    """16 trials, 13.8 of them left: shared 5.6/23.9 = 0.234, own 32*0.234/(32 + 13.8) = 0.164. No
    step raises it."""
    tracker = AcceptanceTracker()
    estimates = [tracker.accept_prob(1)]
    for _ in range(16):
        tracker.observe(1, 4, 0)
        estimates.append(tracker.accept_prob(1))
    assert all(a > b for a, b in pairwise(estimates))
    assert estimates[-1] < 0.2


def test_an_estimate_that_is_not_renewed_drifts_back() -> None:
    """Own trials 4.8 * 0.98^400 = 0.001, shared 4.99 * 0.999^400 = 3.34: 5.6/11.34 = 0.494."""
    tracker = AcceptanceTracker()
    observe_all(tracker, [(4, 0)] * 5)
    observe_all(tracker, [(0, 0)] * 400)
    assert tracker.accept_prob(1) == pytest.approx(0.494, abs=0.003)


def test_text_that_drafts_well_again_is_believed_within_ten_steps() -> None:
    """Fifty rejections leave 0.98^10 * 32 = 26 trials; ten steps bring 36 accepted of 36."""
    tracker = AcceptanceTracker()
    observe_all(tracker, [(4, 0)] * 50)
    assert tracker.accept_prob(1) < 0.05
    observe_all(tracker, [(4, 4)] * 10)
    assert tracker.accept_prob(1) > 0.5
    observe_all(tracker, [(4, 4)] * 50)
    assert tracker.accept_prob(1) > 0.85


def test_requests_are_told_apart_and_share_a_prior() -> None:
    tracker = AcceptanceTracker()
    observe_all(tracker, [(4, 4)] * 40, sequence=1)
    observe_all(tracker, [(4, 0)] * 40, sequence=2)
    assert tracker.accept_prob(1) > 0.9
    assert tracker.accept_prob(2) < 0.45
    assert tracker.accept_prob(3) == tracker.shared_mean > INITIAL_MEAN


def test_release_forgets_the_request_and_keeps_what_it_taught() -> None:
    tracker = AcceptanceTracker()
    observe_all(tracker, [(4, 0)] * 10)
    shared = tracker.shared_mean
    tracker.release(1)
    assert tracker.accept_prob(1) == tracker.shared_mean == shared < INITIAL_MEAN
    tracker.release(1)  # a request that never decoded is released too


def test_positions_differ_and_a_request_shifts_them_all() -> None:
    """Half of the first drafts are rejected, and what follows an accepted one is always accepted.

    Position 1 has 500 of 1000 (less by forgetting), the others all that were tried. The mean of
    all positions is 2000 / 2500 = 0.8.
    """
    tracker = AcceptanceTracker()
    observe_all(tracker, [(4, 0), (4, 4)] * 500)
    first, *others = tracker.accept_probs(2, 4)
    assert first == pytest.approx(0.5, abs=0.02)
    assert all(prob > 0.95 for prob in others)
    assert tracker.shared_mean == pytest.approx(0.8, abs=0.02)
    observe_all(tracker, [(1, 0)] * 5, sequence=2)
    worse = tracker.accept_probs(2, 4)
    assert all(now < before for now, before in zip(worse, (first, *others), strict=True))


def test_without_evidence_all_positions_are_the_mean() -> None:
    assert AcceptanceTracker().accept_probs(1, 3) == pytest.approx((0.7, 0.7, 0.7))
    assert AcceptanceTracker().accept_probs(1, 0) == ()
