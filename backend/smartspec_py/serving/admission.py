"""What the caches of target and draft may hold together, and who must give way.

One budget of bytes. A live request is charged for every token that it has, and one more, in the
target's cache; and for what the draft's cache has read of it. Then, in this order:

1. Drafting takes only what is left: it is shortened, or not done, before anybody is refused room.
2. When requests outgrow the budget, draft caches are dropped, the last in rank first; they are read
   again when there is room.
3. When that is not enough, the last in rank is preempted: it gives up its row, keeps its tokens,
   waits in its rank, and reads all of them again when it is admitted.
4. A waiting request also preempts whoever has a lower priority and ranks behind it.

Nobody starves: ranks do not change, whoever arrives later ranks behind in the end, and the first in
rank always fits, since `Server` refuses what the whole budget could not hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from smartspec_py.serving.request import Request
from smartspec_py.serving.speculation import Speculation

HEADROOM = 16
"""Tokens that each request is to find free when another is admitted, so that the newcomer is not
preempted in the very next steps."""


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Bytes of cache: in all; for a token of a sequence in the target's (0 is not counted); and in
    the draft cache that has the largest tokens."""

    capacity: int
    target_bytes: int
    largest_draft_bytes: int = 0


class CacheLedger:
    """Applies a budget. Everything is computed anew from the requests: nothing can leak."""

    def __init__(self, budget: CacheBudget, drafts: Speculation) -> None:
        self.budget = budget
        self._drafts = drafts

    def is_tight(self, live: Iterable[Request]) -> bool:
        """Whether the budget can matter in this step: cheap to ask, and nearly always False."""
        each = self.budget.target_bytes + self.budget.largest_draft_bytes
        return each > 0 and sum(map(_most_tokens, live)) * each > self.budget.capacity

    def used(self, live: Iterable[Request]) -> int:
        """Bytes, the next token of each request included."""
        return sum(self._target_need(r) + self._draft_need(r) for r in live)

    def fits(self, live: Iterable[Request], newcomer: Request) -> bool:
        """Whether the newcomer fits beside the live requests, with headroom for all; what their
        draft caches hold does not stand in the way."""
        need = self._target_need(newcomer) + sum(self._target_need(r) for r in live)
        # One of the remaining tokens is in `need` already.
        headroom = sum(min(HEADROOM, max(0, r.remaining - 1)) for r in (*live, newcomer))
        return need + headroom * self.budget.target_bytes <= self.budget.capacity

    def draft_room(self, ready: Sequence[Request], live: Collection[Request]) -> dict[int, int]:
        """Tokens that each ready request may draft now: an equal share of what is left. Whoever
        is not in it may draft what it likes."""
        if not self.is_tight(live):
            return {}
        share = (self.budget.capacity - self.used(live)) // max(1, len(ready))
        return {r.sequence: self._room_within(r, share) for r in ready}

    def drafts_to_drop(self, live: Iterable[Request]) -> list[Request]:
        """Whose draft caches must go so that the target's fit, the last in rank first; drafts that
        are in flight must still be observed."""
        live = list(live)
        excess = self.used(live) - self.budget.capacity
        dropped = []
        for request in sorted(live, key=lambda r: r.rank, reverse=True):
            if excess <= 0:
                break
            if not request.is_in_flight and (need := self._draft_need(request)):
                dropped.append(request)
                excess -= need
        return dropped

    def overflows(self, live: Iterable[Request]) -> bool:
        """Whether the target's cache alone is over the budget."""
        return sum(self._target_need(r) for r in live) > self.budget.capacity

    def _room_within(self, request: Request, share: int) -> int:
        of_draft = self._drafts.bytes_per_token(request)
        each = self.budget.target_bytes + of_draft
        if each == 0:
            return request.max_draft_len
        entry = of_draft * (len(request.tokens) - self._drafts.num_computed_tokens(request))
        return max(0, min(request.max_draft_len, (share - entry) // each))

    def _target_need(self, request: Request) -> int:
        return (len(request.tokens) + 1) * self.budget.target_bytes

    def _draft_need(self, request: Request) -> int:
        return self._drafts.num_computed_tokens(request) * self._drafts.bytes_per_token(request)


def _most_tokens(request: Request) -> int:
    """What it may come to hold in the next step."""
    most = len(request.tokens) + 1 + request.max_draft_len
    return min(most, request.num_prompt + request.max_tokens)


def victims(live: Iterable[Request], newcomer: Request) -> list[Request]:
    """Whom the newcomer may preempt, the last in rank first."""
    lower = (
        r
        for r in live
        if r.priority < newcomer.priority and r.rank > newcomer.rank and not r.is_in_flight
    )
    return sorted(lower, key=lambda r: r.rank, reverse=True)
