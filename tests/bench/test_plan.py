"""What a run sends: the same to every policy, in an order that favours none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from smartspec_bench.plan import (
    FORMS,
    IDLE_S,
    Capacity,
    Point,
    Stretch,
    Turn,
    expected_s,
    needed_workloads,
    points,
    requests,
    turns,
)

SETTINGS = replace(
    FORMS["full"], workloads=("mixed", "chat"), loads=(0.5, 1.0), repeats=3, seconds=4.0
)
RATES = {"mixed": 8.0, "chat": 4.0, "sql": 10.0, "summarize": 5.0}
CAPACITY = Capacity({"none": 8.0, "fixed:1": 4.0}, RATES, solo_s=0.5)


def point_of(shape: str, workload: str = "mixed", load: float = 0.0) -> Point:
    (found,) = [
        point
        for point in points(SETTINGS, CAPACITY)
        if (point.shape, point.workload) == (shape, workload) and load in (0.0, point.load)
    ]
    return found


def test_points_of_a_full_run() -> None:
    found = points(SETTINGS, CAPACITY)
    assert Counter(point.shape for point in found) == {
        "closed": 2,
        "steady": 4,
        "step": 1,
        "shift": 1,
        "mix": 1,
    }
    assert needed_workloads(SETTINGS) == ("mixed", "chat", "sql", "summarize")
    assert [p.shape for p in found if "goodput_global" in p.policies] == ["mix"]


def test_rates_are_shares_of_the_workloads_own_saturation() -> None:
    """Half of 4 requests/s for 4 s: 8 requests."""
    point = point_of("steady", "chat", 0.5)
    assert point.num_requests == 8
    assert point.stretches == (Stretch(4.0, 2.0, "chat"),)
    assert [s.rate_rps for s in point_of("step").stretches] == pytest.approx([0.2, 3.2, 9.6])
    shift = point_of("shift", "sql then summarize")
    assert [(s.rate_rps, s.workload) for s in shift.stretches] == [(6.0, "sql"), (3.0, "summarize")]


def test_a_slow_rate_takes_longer_for_its_requests() -> None:
    few = replace(SETTINGS, loads=(0.01,), workloads=("chat",), min_requests=6)
    point = next(p for p in points(few, CAPACITY) if p.shape == "steady")
    assert point.num_requests == 6
    assert point.sending_s == pytest.approx(6 / 0.04)


def test_policies_of_a_repeat_share_arrivals_and_prompts() -> None:
    """And no other repeat or point has them."""
    sent: dict[tuple[int, int], set[tuple[tuple[float, str], ...]]] = {}
    for turn in turns(points(SETTINGS, CAPACITY), SETTINGS):
        due = tuple((one.time_s, one.prompt.text) for one in requests(turn))
        assert due
        assert list(due) == sorted(due, key=lambda one: one[0])
        sent.setdefault((turn.point.index, turn.repeat), set()).add(due)
    assert all(len(found) == 1 for found in sent.values())
    assert len(set.union(*sent.values())) == len(sent)


def test_the_order_is_drawn_anew_for_each_repeat() -> None:
    """Of 9 points with 6 policies or more, the chance that two repeats agree is below 1e-30."""
    made = list(turns(points(SETTINGS, CAPACITY), SETTINGS))
    orders = [
        tuple((t.point.index, t.policy) for t in made if t.repeat == number) for number in range(3)
    ]
    assert len(set(orders)) == 3
    assert len({frozenset(order) for order in orders}) == 1
    assert made == list(turns(points(SETTINGS, CAPACITY), SETTINGS))
    assert made != list(turns(points(SETTINGS, CAPACITY), replace(SETTINGS, seed=2)))


def test_policies_of_a_point_follow_each_other() -> None:
    made = [turn.point.index for turn in turns(points(SETTINGS, CAPACITY), SETTINGS)]
    changes = sum(a != b for a, b in pairwise(made))
    assert changes <= 9 * 3 - 1


def test_shift_changes_the_workload_in_mid_run() -> None:
    turn = Turn(point_of("shift", "sql then summarize"), "none", 0, 5)
    kinds = [(one.time_s < 8.0, one.prompt.kind) for one in requests(turn)]
    assert set(kinds) == {(True, "sql"), (False, "summarize")}


def test_expected_time_by_hand() -> None:
    """8 s at 1/s of 8, 8 s at twice the saturation: 8 s of work are left over. fixed:1 can do half
    as much: 8 * 3 = 24 s are left over. Twice 0.5 s for the last request, and the pause."""
    point = Point(0, "step", "mixed", 0.0, (), (Stretch(8, 1, "mixed"), Stretch(8, 16, "mixed")))
    assert expected_s(Turn(point, "none", 0, 0), CAPACITY) == pytest.approx(16 + 8 + 1 + IDLE_S)
    assert expected_s(Turn(point, "fixed:1", 0, 0), CAPACITY) == pytest.approx(16 + 24 + 1 + IDLE_S)
    closed = Turn(point_of("closed"), "none", 0, 0)
    assert expected_s(closed, CAPACITY) == pytest.approx(6 * 0.5 + IDLE_S)


def test_how_long_the_forms_take() -> None:
    """At 2.6 requests/s and 2 s for one alone, about what the pair of 88 M does on the machine of
    docs/research/log; the warm-up and the start of the server come on top."""
    assert 4 < minutes_of("short") < 6
    assert 120 < minutes_of("full") < 200


def minutes_of(form: str) -> float:
    settings = FORMS[form]
    rates = dict.fromkeys(("mixed", "chat", "sql", "summarize"), 2.6)
    capacity = Capacity({"none": 2.6}, rates, 2.0)
    todo = turns(points(settings, capacity), settings)
    return sum(expected_s(turn, capacity) for turn in todo) / 60
