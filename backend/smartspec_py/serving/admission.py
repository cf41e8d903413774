"""The memory budget for the caches of target and draft, and the rules for preemption.

There is one budget in bytes. Each live request needs its tokens plus one in the target's cache,
and the tokens that the draft's cache has already read. If memory is short, these rules apply in
order:

1. Drafting uses only the remaining memory. Drafts are shortened or skipped before any request is
   denied memory.
2. When requests exceed the budget, draft caches are dropped, highest rank value first. They are
   computed again when there is room.
3. If that is not enough, the request with the highest rank value is preempted. It loses its row,
   keeps its tokens, waits by rank, and prefills all its tokens again when it is admitted.
4. A waiting request also preempts requests that have a lower priority and a higher rank value.

A request whose work is in flight is preempted after its work was cancelled and has ended.

No request starves. Ranks do not change, and requests that arrive much later have higher rank
values. The request with the lowest rank always fits, since `Intake` rejects requests that exceed
the whole budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import Target
from smartspec_py.serving.request import Request, RequestState
from smartspec_py.serving.speculation import Speculation

HEADROOM = 16
"""Free tokens for each request that an admission requires, so that the new request is not preempted
in the next steps."""


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Cache sizes in bytes.

    capacity: total. target_bytes: per token in the target's cache; 0 means it is not counted.
    largest_draft_bytes: per token, the largest of all draft caches. block_len: a request takes room
    for so many tokens at a time.
    """

    capacity: int
    target_bytes: int
    largest_draft_bytes: int = 0
    block_len: int = 1

    def in_blocks(self, num_tokens: int) -> int:
        """Tokens for which this many take room."""
        return -(-num_tokens // self.block_len) * self.block_len


class CacheLedger:
    """Applies a budget. All usage is recomputed from the requests, so no count can drift. Blocks
    that several requests share in the target's cache count once."""

    def __init__(self, budget: CacheBudget, drafts: Speculation, target: Target) -> None:
        self.budget = budget
        self._drafts = drafts
        self._target = target

    def is_tight(self, live: Iterable[Request]) -> bool:
        """Whether the budget could be exceeded in this step. Fast, and nearly always False."""
        each = self.budget.target_bytes + self.budget.largest_draft_bytes
        most = sum(self.budget.in_blocks(_most_tokens(request)) for request in live)
        return most * each > self.budget.capacity

    def used(self, live: Iterable[Request]) -> int:
        """Used bytes, including the next token of each request."""
        return self._target_used(live := list(live)) + sum(map(self._draft_need, live))

    def fits(
        self, live: Iterable[Request], newcomer: Request, preempted: Iterable[Request] = ()
    ) -> bool:
        """Whether a new request fits with the live requests, with headroom for all.

        Draft caches are ignored, since they can be dropped. preempted: requests that would be
        preempted for it; they are not in `live`.
        """
        gone = [request.sequence for request in preempted]
        shared = self._target.num_shared_tokens(gone)
        num_tokens = sum(map(self._with_headroom, (*live, newcomer))) - shared
        excess = num_tokens * self.budget.target_bytes - self.budget.capacity
        return excess <= 0 or excess <= self.budget.target_bytes * self._num_common(newcomer, gone)

    def draft_room(self, ready: Sequence[Request], live: Collection[Request]) -> dict[int, int]:
        """Most tokens that each ready request may draft: an equal share of the remaining memory.

        Requests that are not in the result have no memory limit on drafts.
        """
        if not self.is_tight(live):
            return {}
        share = (self.budget.capacity - self.used(live)) // max(1, len(ready))
        return {r.sequence: self._room_within(r, share) for r in ready}

    def drafts_to_drop(self, live: Iterable[Request]) -> list[Request]:
        """Requests whose draft caches must be dropped so that the rest fits.

        The highest rank value comes first. Requests in flight are skipped, because their drafts
        must still be observed.
        """
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
        """Whether the target's cache alone exceeds the budget."""
        return self._target_used(live) > self.budget.capacity

    def _room_within(self, request: Request, share: int) -> int:
        of_draft = self._drafts.bytes_per_token(request)
        each = self.budget.target_bytes + of_draft
        if each == 0:
            return request.max_draft_len
        entry = of_draft * (len(request.tokens) - self._drafts.num_computed_tokens(request))
        return max(0, min(request.max_draft_len, (share - entry) // each))

    def _target_used(self, live: Iterable[Request]) -> int:
        shared = self._target.num_shared_tokens() * self.budget.target_bytes
        return sum(map(self._target_need, live)) - shared

    def _target_need(self, request: Request) -> int:
        return self.budget.in_blocks(len(request.tokens) + 1) * self.budget.target_bytes

    def _with_headroom(self, request: Request) -> int:
        return self.budget.in_blocks(len(request.tokens) + min(1 + HEADROOM, request.remaining))

    def _num_common(self, request: Request, gone: Collection[SequenceId]) -> int:
        if not request.reuses_prefix:
            return 0
        return self._target.num_common(request.tokens, request.num_prompt, request.adapter, gone)

    def _draft_need(self, request: Request) -> int:
        num_tokens = self.budget.in_blocks(self._drafts.num_computed_tokens(request))
        return num_tokens * self._drafts.bytes_per_token(request)


def _most_tokens(request: Request) -> int:
    """Most tokens that the request can have after the next step."""
    most = len(request.tokens) + 1 + request.max_draft_len
    return min(most, request.num_prompt + request.max_tokens)


def can_yield(request: Request) -> bool:
    """Whether it can be preempted, perhaps after a cancel. A prompt in flight cannot be cancelled,
    because it would not be submitted again."""
    return not (request.is_in_flight and request.state is RequestState.PREFILLING)


def victims(live: Iterable[Request], newcomer: Request) -> list[Request]:
    """Requests that the new request may preempt, highest rank value first."""
    lower = (
        r
        for r in live
        if r.priority < newcomer.priority and r.rank > newcomer.rank and can_yield(r)
    )
    return sorted(lower, key=lambda r: r.rank, reverse=True)
