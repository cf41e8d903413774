"""The number of users at a share of the run, from 0 to 1, for a largest number of users."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST_USERS = 10_000
"""Protects the client machine from a typing mistake."""


def steady(share: float, num_users: int) -> int:
    return num_users


def ramp(share: float, num_users: int) -> int:
    """From one user, linearly over four fifths of the run."""
    return math.floor(1 + min(1.0, share / 0.8) * (num_users - 1) + 0.5)


def step(share: float, num_users: int) -> int:
    """One user, a third of the users, all users: a third of the run each."""
    return (1, max(1, num_users // 3), num_users)[min(2, math.floor(3 * share))]


SCENARIOS: dict[str, Callable[[float, int], int]] = {"steady": steady, "ramp": ramp, "step": step}
