"""What a run measures, and how long that will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from peer.results import Dtype, Peer

SIZES = (1, 8, 32)
POLICIES = ("none", "fixed:1", "fixed:3", "fixed:5", "goodput")
Beside = tuple[Sequence[int], Sequence[str], int]
"""Requests at once, our policies, and rounds."""

FULL: Mapping[int, Beside] = {
    0: (SIZES, POLICIES, 8),
    1: ((32,), ("fixed:1", "goodput"), 3),
    3: (SIZES, ("fixed:3", "goodput"), 3),
    5: ((1,), ("fixed:5", "goodput"), 3),
}
QUICK: Mapping[int, Beside] = {
    0: (SIZES, ("none", "goodput"), 2),
    3: (SIZES, ("goodput",), 2),
}
"""By the peer's drafts per step, for which it must be started again."""

ROUND_S = {1: 1.1, 8: 1.8, 32: 3.8}
"""A round of one side in float32, by requests at once: an estimate until some are measured."""

START_S = {"vllm": 45.0, "openvino": 8.0}
"""With the texts that are compared. vLLM compiles: its cache does not load with this PyTorch."""


@dataclass(frozen=True)
class Planned:
    """One start of a peer. policies: ours beside it."""

    dtype: Dtype
    peer: Peer
    k: int
    sizes: Sequence[int]
    policies: Sequence[str]
    num_rounds: int
    is_quick: bool

    def round_s(self, batch_size: int) -> float:
        """Expected, of all sides."""
        return ROUND_S[batch_size] * (1 + len(self.policies)) / (1 + (self.dtype == "bfloat16"))

    @property
    def expected_s(self) -> float:
        """In a quick run the round that is not counted has few tokens."""
        num_rounds = self.num_rounds + (0.3 if self.is_quick else 1.0)
        return START_S[self.peer] + num_rounds * sum(map(self.round_s, self.sizes))


def plan(
    dtypes: Sequence[Dtype],
    peers: Sequence[Peer],
    ks: Sequence[int] | None,
    is_quick: bool,
    num_rounds: int | None = None,
) -> list[Planned]:
    """ks: the peers' draft lengths, all where None. num_rounds: None is as many as of each."""
    return [
        Planned(dtype, peer, k, sizes, policies, num_rounds or usual, is_quick)
        for dtype in dtypes
        for peer in peers
        for k, (sizes, policies, usual) in (QUICK if is_quick else FULL).items()
        if ks is None or k in ks
    ]


@dataclass
class Estimate:
    """Of the time that is left: what is expected of the rest, at the rate of what is done."""

    total_s: float
    clock: Callable[[], float] = time.monotonic
    done_s: float = 0.0
    start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.start_s = self.clock()

    @property
    def left_s(self) -> float:
        rate = (self.clock() - self.start_s) / self.done_s if self.done_s else 1.0
        return max(0.0, self.total_s - self.done_s) * rate
