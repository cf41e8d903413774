"""How many users there are, and what they ask, as a run goes on.

Pure: the share of the run that is over in, numbers out. A scenario is data; `scenario.py` is the
shape that Locust asks every second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STEP_USERS = (1, 16, 48)
"""Of `step` before --scale: a server that is idle, one that is busy, one with a queue."""

MOST_USERS = 10_000
"""A typing mistake must not take this machine down."""


@dataclass(frozen=True, slots=True)
class Stage:
    """end_share: of the run, at which it is over. first, last: users at its start and its end.
    is_shifted: whether users ask the other workload."""

    end_share: float
    first: int
    last: int
    is_shifted: bool = False


Stages = tuple[Stage, ...]


def steady(num_users: int, _: float) -> Stages:
    return (Stage(1.0, num_users, num_users),)


def ramp(num_users: int, _: float) -> Stages:
    """From one user in a straight line, then a fifth of the run with all of them."""
    return (Stage(0.8, 1, num_users), Stage(1.0, num_users, num_users))


def step(_: int, scale: float) -> Stages:
    """A third of the run each."""
    counts = [max(1, round(scale * users)) for users in STEP_USERS]
    return tuple(Stage((i + 1) / len(counts), n, n) for i, n in enumerate(counts))


def shift(num_users: int, _: float) -> Stages:
    """The same users ask another workload from the middle on."""
    return (Stage(0.5, num_users, num_users), Stage(1.0, num_users, num_users, is_shifted=True))


SCENARIOS = {"steady": steady, "ramp": ramp, "step": step, "shift": shift}


def make_stages(scenario: str, num_users: int, scale: float) -> Stages:
    """num_users: most at once, of all scenarios but `step`, which has its own, times `scale`.

    Raises ValueError, naming the option."""
    if scenario not in SCENARIOS:
        raise ValueError(f"--scenario: got {scenario!r}, must be one of {', '.join(SCENARIOS)}")
    if not 1 <= num_users <= MOST_USERS:
        raise ValueError(f"--users: got {num_users}, must be from 1 to {MOST_USERS}")
    if not 0 < scale <= MOST_USERS / max(STEP_USERS):
        most = MOST_USERS / max(STEP_USERS)
        raise ValueError(f"--scale: got {scale}, must be above 0 and at most {most:.0f}")
    return SCENARIOS[scenario](num_users, scale)


def stage_at(stages: Stages, share: float) -> Stage:
    """The stage in which this share of the run is over; the last one from 1 on."""
    return next((stage for stage in stages if share < stage.end_share), stages[-1])


def users_at(stages: Stages, share: float) -> int:
    """A ramp from 1 to 9 over the whole run has 5 in its middle."""
    stage = stage_at(stages, share)
    before = [other.end_share for other in stages if other.end_share < stage.end_share]
    start = max(before, default=0.0)
    within = min(1.0, (share - start) / (stage.end_share - start))
    return math.floor(stage.first + within * (stage.last - stage.first) + 0.5)
