"""Acceptance estimates: priors, evidence, forgetting, and the way back from all rejected."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest

from smartspec_py.core.learn import acceptance
from smartspec_py.core.learn.acceptance import INITIAL_MEAN, MAX_GROUPS, AcceptanceTracker, Trial


def observe(
    tracker: AcceptanceTracker, sequence: int, num_drafted: int, num_accepted: int, kind: str = ""
) -> None:
    tracker.observe([Trial(sequence, num_drafted, num_accepted, kind)])


def accept_probs(
    tracker: AcceptanceTracker, sequence: int, num_positions: int, kind: str = ""
) -> tuple[float, ...]:
    (found,) = tracker.accept_probs([sequence], num_positions, [kind])
    return tuple(found)


def accept_prob(tracker: AcceptanceTracker, sequence: int, kind: str = "") -> float:
    """Of the first draft of a step."""
    return accept_probs(tracker, sequence, 1, kind)[0]


def mean_of(tracker: AcceptanceTracker, kind: str = "") -> float:
    """Expected of a request that drafted nothing yet."""
    return accept_prob(tracker, 999_999, kind)


def observe_all(
    tracker: AcceptanceTracker, steps: list[tuple[int, int]], sequence: int = 1
) -> None:
    for num_drafted, num_accepted in steps:
        observe(tracker, sequence, num_drafted, num_accepted)


def test_the_initial_mean_stands_before_anything_was_seen() -> None:
    tracker = AcceptanceTracker()
    assert accept_prob(tracker, 1) == mean_of(tracker) == INITIAL_MEAN == 0.7


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # 3 accepted in 4 trials; the mean is (8*0.7 + 3)/12 = 0.7167
        ([(5, 3)], 0.7167),
        # All rejected is one trial: 5.6/9
        ([(5, 0)], 0.6222),
        # All accepted is 5 trials: (5.6 + 5)/13
        ([(5, 5)], 0.8154),
        # A step without drafts only fades: 3 and 4 become 2.994 and 3.992, (5.6 + 2.994)/11.992
        ([(5, 3), (0, 0)], 0.7166),
        # Nothing was ever drafted: the prior.
        ([(0, 0)] * 10, 0.7),
    ],
)
def test_mean_of_a_group(steps: list[tuple[int, int]], expected: float) -> None:
    tracker = AcceptanceTracker()
    observe_all(tracker, steps)
    assert mean_of(tracker) == pytest.approx(expected, abs=1e-4)


def test_estimate_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of one draft, which was rejected: the mean is 5.6/9 = 0.6222, and expected
    were 0.7 of the one. An expert of weight 4: 2/2.7 * 2.3/3 = 0.5679, and to the power of 8/9,
    since a ninth of the evidence is its own, 0.6047 of the odds 1.6471, that is 0.9960, or
    0.4990."""
    monkeypatch.setattr(acceptance, "EXPERTS", ((4.0, 0.98),))
    tracker = AcceptanceTracker()
    observe(tracker, 1, 1, 0)
    assert accept_prob(tracker, 1) == pytest.approx(0.4990, abs=1e-4)
    assert accept_prob(tracker, 2) == pytest.approx(0.6222, abs=1e-4)


def test_assumed_acceptance_of_groups() -> None:
    """Of a group that is described nothing is taken from the others."""
    tracker = AcceptanceTracker({"long": 0.9, "short": 0.2})
    assert accept_prob(tracker, 1, "long") == pytest.approx(0.9)
    for _ in range(50):
        observe(tracker, 1, 2, 2, "long")
    assert accept_prob(tracker, 2, "short") == pytest.approx(0.2)
    assert accept_prob(tracker, 2, "another") > 0.9


def test_learned_state_is_restored() -> None:
    rng, tracker = random.Random(3), AcceptanceTracker()
    for number in range(40):
        for _ in range(10):
            observe(tracker, number, 4, drafted(rng, 0.4), f"kind {number % 3}")
        tracker.release(number)
    whole, half = AcceptanceTracker(), AcceptanceTracker()
    state = json.loads(json.dumps(tracker.state()))
    whole.restore(state, 1.0)
    half.restore(state, 0.5)
    for kind in ("kind 0", "kind 1", "unknown"):
        assert accept_probs(whole, 99, 4, kind) == pytest.approx(accept_probs(tracker, 99, 4, kind))
    assert mean_of(tracker, "unknown") < mean_of(half, "unknown") < INITIAL_MEAN
    with pytest.raises(ValueError, match="1 experts, not 2"):
        whole.restore({"experts": [0.0], "groups": {}}, 1.0)


def test_all_rejected_falls_within_sixteen_steps() -> None:
    """16 trials, 13.8 of them left: shared 5.6/23.9 = 0.234, own 32*0.234/(32 + 13.8) = 0.164. No
    step raises it."""
    tracker = AcceptanceTracker()
    estimates = [accept_prob(tracker, 1)]
    for _ in range(16):
        observe(tracker, 1, 4, 0)
        estimates.append(accept_prob(tracker, 1))
    assert all(a > b for a, b in pairwise(estimates))
    assert estimates[-1] < 0.2


def test_an_estimate_that_is_not_renewed_drifts_back() -> None:
    """Own trials 4.8 * 0.98^400 = 0.001, those of the group 4.99 * 0.998^400 = 2.24: the mean is
    5.6/10.24 = 0.547."""
    tracker = AcceptanceTracker()
    observe_all(tracker, [(4, 0)] * 5)
    observe_all(tracker, [(0, 0)] * 400)
    assert accept_prob(tracker, 1) == pytest.approx(0.547, abs=0.01)


def test_text_that_drafts_well_again_is_believed_within_ten_steps() -> None:
    """Fifty rejections leave 0.98^10 * 32 = 26 trials; ten steps bring 36 accepted of 36."""
    tracker = AcceptanceTracker()
    observe_all(tracker, [(4, 0)] * 50)
    assert accept_prob(tracker, 1) < 0.1
    observe_all(tracker, [(4, 4)] * 10)
    assert accept_prob(tracker, 1) > 0.5
    observe_all(tracker, [(4, 4)] * 50)
    assert accept_prob(tracker, 1) > 0.8


def test_release_forgets_the_request_and_keeps_what_it_taught() -> None:
    tracker = AcceptanceTracker()
    observe_all(tracker, [(4, 0)] * 10)
    shared = mean_of(tracker)
    tracker.release(1)
    assert accept_prob(tracker, 1) == accept_prob(tracker, 99)
    assert mean_of(tracker) == shared < INITIAL_MEAN
    tracker.release(1)  # a request that never decoded is released too


def test_positions_differ_and_a_request_shifts_them_all() -> None:
    """With rates by position, as for heads. Half of the first drafts are rejected, and what follows
    an accepted one is always accepted.

    Position 1 has 500 of 1000 (less by forgetting), the others all that were tried.
    """
    tracker = AcceptanceTracker(num_positions=4)
    observe_all(tracker, [(4, 0), (4, 4)] * 500)
    first, *others = accept_probs(tracker, 2, 4)
    assert first == pytest.approx(0.53, abs=0.02)
    assert all(prob > 0.95 for prob in others)
    observe_all(tracker, [(1, 0)] * 5, sequence=2)
    worse = accept_probs(tracker, 2, 4)
    assert all(now < before for now, before in zip(worse, (first, *others), strict=True))


def test_a_kind_begins_with_what_the_others_are_and_goes_its_own_way() -> None:
    """Greedy text: 120 accepted of 120; a rare hot kind: 10 times rejected.

    The greedy kind hardly hears of it: 8 trials of 128 are its prior. The hot one expects
    (8 * 0.7 + 120) / 128 at first (less by forgetting), 0.98; after ten rejections
    8 * 0.98 / 18 = 0.44.
    """
    tracker = AcceptanceTracker()
    for _ in range(30):
        observe(tracker, 1, 4, 4, "greedy")
    before = mean_of(tracker, "greedy")
    assert mean_of(tracker, "hot") == pytest.approx(0.98, abs=0.002)
    for _ in range(10):
        observe(tracker, 2, 4, 0, "hot")
    assert mean_of(tracker, "hot") == pytest.approx(0.437, abs=0.003)
    assert mean_of(tracker, "greedy") == pytest.approx(before, abs=0.03)


def test_kinds_are_bounded() -> None:
    tracker = AcceptanceTracker()
    for number in range(3 * MAX_GROUPS):
        observe(tracker, number, 4, 1, f"kind {number}")
        tracker.release(number)
    assert len(tracker._groups) == MAX_GROUPS
    assert mean_of(tracker) == pytest.approx(
        (8 * 0.7 + MAX_GROUPS) / (8 + 2 * MAX_GROUPS), abs=0.001
    )


def drafted(rng: random.Random, prob: float, length: int = 4) -> int:
    """Accepted drafts of a step."""
    return next((j for j in range(length) if rng.random() >= prob), length)


@pytest.mark.parametrize(
    ("before", "after", "within"), [(0.8, 0.3, 18), (0.3, 0.8, 14), (0.8, 0.5, 24), (0.9, 0.6, 24)]
)
def test_a_change_of_text_is_noticed(before: float, after: float, within: int) -> None:
    """After 60 steps the text changes; in most of 100 requests the estimate is nearer to the new
    rate than to the old one within so many steps. Seeds are fixed: one verdict for ever."""
    num_seen = 0
    for seed in range(100):
        rng, tracker = random.Random(seed), AcceptanceTracker()
        for _ in range(60):
            observe(tracker, 1, 4, drafted(rng, before))
        for _ in range(within):
            observe(tracker, 1, 4, drafted(rng, after))
        found = accept_prob(tracker, 1)
        num_seen += abs(found - after) < abs(found - before)
    assert num_seen > 60


@pytest.mark.parametrize("kinds", [("", "", "", ""), ("chat", "qa", "chat", "sql")])
def test_sequences_of_a_step_are_learned_from_together(kinds: tuple[str, ...]) -> None:
    """A step of several is what steps of each would be, but for the order of forgetting."""
    rng = random.Random(5)
    together, apart = AcceptanceTracker(), AcceptanceTracker()
    sequences = [3, 1, 2, 9]
    for _ in range(300):
        drafts = [rng.choice([1, 3, 5]) for _ in sequences]
        kept = [
            min(k, drafted(rng, 0.2 + 0.07 * s)) for k, s in zip(drafts, sequences, strict=True)
        ]
        steps = zip(sequences, drafts, kept, kinds, strict=True)
        together.observe([Trial(*step) for step in steps])
        for each in zip(sequences, drafts, kept, kinds, strict=True):
            observe(apart, *each)
    assert mean_of(together) == pytest.approx(mean_of(apart), rel=1e-3)
    asked = dict(zip([*sequences, 77], [*kinds, kinds[1]], strict=True))
    found = together.accept_probs(list(asked), 5, list(asked.values()))
    alone = [accept_probs(together, sequence, 5, kind) for sequence, kind in asked.items()]
    assert found == pytest.approx(np.array(alone), rel=1e-12)
    expected = [accept_probs(apart, sequence, 5, kind) for sequence, kind in asked.items()]
    assert found == pytest.approx(np.array(expected), rel=1e-2)
    together.release(1)
    assert together.sequences == {2, 3, 9}
    assert accept_probs(together, 1, 5, kinds[1]) == pytest.approx(found[-1], rel=1e-9)
