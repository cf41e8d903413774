"""The number of users and their workload over the time of a run.

Pure: the input is the elapsed share of the run. A scenario is data. `Scenario` in locustfile.py is
the load shape that Locust calls every second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STEP_USERS = (1, 16, 48)
"""Users of `step` before --scale: an idle server, a busy one, and one with a queue."""

MOST_USERS = 10_000
"""Protects the client machine from a typing mistake."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a run. end_share: the share of the run at which it ends.

    first, last: users at its start and end. is_shifted: whether users send the other workload.
    """

    end_share: float
    first: int
    last: int
    is_shifted: bool = False


Stages = tuple[Stage, ...]


def steady(num_users: int, _: float) -> Stages:
    return (Stage(1.0, num_users, num_users),)


def ramp(num_users: int, _: float) -> Stages:
    """A linear increase from one user, then a fifth of the run with all users."""
    return (Stage(0.8, 1, num_users), Stage(1.0, num_users, num_users))


def step(_: int, scale: float) -> Stages:
    """Three stages of a third of the run each."""
    counts = [max(1, round(scale * users)) for users in STEP_USERS]
    return tuple(Stage((i + 1) / len(counts), n, n) for i, n in enumerate(counts))


def shift(num_users: int, _: float) -> Stages:
    """A constant number of users, which send another workload in the second half."""
    return (Stage(0.5, num_users, num_users), Stage(1.0, num_users, num_users, is_shifted=True))


SCENARIOS = {"steady": steady, "ramp": ramp, "step": step, "shift": shift}


def make_stages(scenario: str, num_users: int, scale: float) -> Stages:
    """The stages of a scenario. Raises ValueError, with the name of the option.

    num_users: largest number of users. `step` ignores it and uses STEP_USERS times `scale`.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"--scenario: got {scenario!r}, must be one of {', '.join(SCENARIOS)}")
    if not 1 <= num_users <= MOST_USERS:
        raise ValueError(f"--users: got {num_users}, must be from 1 to {MOST_USERS}")
    if not 0 < scale <= MOST_USERS / max(STEP_USERS):
        most = MOST_USERS / max(STEP_USERS)
        raise ValueError(f"--scale: got {scale}, must be above 0 and at most {most:.0f}")
    return SCENARIOS[scenario](num_users, scale)


def stage_at(stages: Stages, share: float) -> Stage:
    """The stage at this elapsed share of the run; the last stage from 1 on."""
    return next((stage for stage in stages if share < stage.end_share), stages[-1])


def users_at(stages: Stages, share: float) -> int:
    """The number of users at this share. Example: a ramp from 1 to 9 has 5 users at share 0.5."""
    stage = stage_at(stages, share)
    before = [other.end_share for other in stages if other.end_share < stage.end_share]
    start = max(before, default=0.0)
    within = min(1.0, (share - start) / (stage.end_share - start))
    return math.floor(stage.first + within * (stage.last - stage.first) + 0.5)
