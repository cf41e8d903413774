"""Scenarios as numbers: how many users, and which workload, at each share of a run."""

from __future__ import annotations

import pytest
from stages import SCENARIOS, make_stages, stage_at, users_at

SHARES = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9, 1.0, 1.5)


@pytest.mark.parametrize(
    ("scenario", "scale", "users"),
    [
        ("steady", 1.0, [9] * 10),
        # From 1 to 9 over 0.8 of the run: 10 users a whole run, so 1 + 2 = 3 after 0.2.
        ("ramp", 1.0, [1, 3, 4, 5, 6, 7, 8, 9, 9, 9]),
        ("step", 1.0, [1, 1, 1, 16, 16, 16, 48, 48, 48, 48]),
        ("step", 0.25, [1, 1, 1, 4, 4, 4, 12, 12, 12, 12]),
        ("step", 0.01, [1] * 10),
        ("shift", 1.0, [9] * 10),
    ],
)
def test_users_over_a_run(scenario: str, scale: float, users: list[int]) -> None:
    stages = make_stages(scenario, 9, scale)
    assert [users_at(stages, share) for share in SHARES] == users


def test_only_shift_changes_the_workload_and_does_so_in_the_middle() -> None:
    for scenario in SCENARIOS:
        stages = make_stages(scenario, 4, 1.0)
        shifted = [stage_at(stages, share).is_shifted for share in (0.0, 0.49, 0.5, 1.0)]
        assert shifted == ([False, False, True, True] if scenario == "shift" else [False] * 4)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("waves", 4, 1.0), "--scenario: got 'waves'"),
        (("steady", 0, 1.0), "--users: got 0"),
        (("steady", 10_001, 1.0), "--users"),
        (("step", 4, 0.0), "--scale: got 0.0"),
        (("step", 4, 1e6), "--scale"),
    ],
)
def test_what_is_refused(arguments: tuple[str, int, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make_stages(*arguments)
