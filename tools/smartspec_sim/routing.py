"""How a load balancer chooses the replica of a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from smartspec_sim.workload import SimRequest

BALANCE = 1.25
"""A replica with more than this many times the mean number of requests gets none by its prefix:
consistent hashing with bounded loads. HAProxy's `hash-balance-factor` has the same use."""


class Replica(Protocol):
    """What a load balancer knows of a replica. num_open: requests sent to it and not ended."""

    @property
    def number(self) -> int: ...

    @property
    def num_open(self) -> int: ...


Route = Callable[[SimRequest, Sequence[Replica], random.Random], Replica]
"""Chooses one of at least one replica."""


def by_random(request: SimRequest, replicas: Sequence[Replica], rng: random.Random) -> Replica:
    """Each with equal probability."""
    return rng.choice(replicas)


def by_least(request: SimRequest, replicas: Sequence[Replica], rng: random.Random) -> Replica:
    """The fewest open requests; ties at random."""
    fewest = min(replica.num_open for replica in replicas)
    return rng.choice([replica for replica in replicas if replica.num_open == fewest])


def by_prefix(request: SimRequest, replicas: Sequence[Replica], rng: random.Random) -> Replica:
    """The same replica for the same prefix while it has room, by rendezvous hashing.

    A request without a prefix goes to the replica with the fewest open requests.
    """
    if request.prefix is None:
        return by_least(request, replicas, rng)
    most = BALANCE * (1 + sum(replica.num_open for replica in replicas)) / len(replicas)
    able = [replica for replica in replicas if replica.num_open < most]
    return max(able, key=lambda replica: _weight(request.prefix, replica.number))


def _weight(prefix: str | None, number: int) -> bytes:
    """A hash whose order is independent for each pair. CRC-32 is not: its order used half of the
    replicas."""
    return blake2b(f"{prefix}/{number}".encode(), digest_size=8).digest()


ROUTES: dict[str, Route] = {"least": by_least, "prefix": by_prefix, "random": by_random}
