"""The number of users over the time of a run, as data. Times are shares of the run, 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MOST_USERS = 10_000
"""Protects the client machine from a typing mistake."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Users change linearly from `first` to `last` between `start` and `end`."""

    start: float
    end: float
    first: int
    last: int


Stages = tuple[Stage, ...]


def steady(num_users: int) -> Stages:
    return (Stage(0.0, 1.0, num_users, num_users),)


def ramp(num_users: int) -> Stages:
    """From one user, over four fifths of the run."""
    return (Stage(0.0, 0.8, 1, num_users), Stage(0.8, 1.0, num_users, num_users))


def step(num_users: int) -> Stages:
    """One user, a third of the users, all users: a third of the run each."""
    counts = (1, max(1, num_users // 3), num_users)
    return tuple(Stage(i / 3, (i + 1) / 3, n, n) for i, n in enumerate(counts))


SCENARIOS: dict[str, Callable[[int], Stages]] = {"steady": steady, "ramp": ramp, "step": step}


def users_at(stages: Stages, share: float) -> int:
    """The number of users at this share of the run; from 1 on, those of the last stage."""
    stage = next((stage for stage in stages if share < stage.end), stages[-1])
    within = min(1.0, (share - stage.start) / (stage.end - stage.start))
    return math.floor(stage.first + within * (stage.last - stage.first) + 0.5)
