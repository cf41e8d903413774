"""Everything that guesses, under the names by which a request chooses, each with its estimates.

Acceptance is learned for each proposer apart: what a draft model gets right says nothing about what
a look-up in the prompt does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from smartspec_py.core.acceptance import AcceptanceTracker
from smartspec_py.core.types import SequenceId, SequenceView, SpecPlan
from smartspec_py.engines.base import Draft, DraftTask, Event, Proposer
from smartspec_py.serving.request import Request


class Drafters:
    """Owned by the loop thread."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = dict(proposers)
        self._acceptance = {name: AcceptanceTracker() for name in proposers}

    def view(self, request: Request, room: int) -> SequenceView:
        """What the planner may know; room: tokens that memory lets it draft."""
        proposer = self._of(request)
        context_len, most, lag = len(request.tokens), 0, 0
        probs: tuple[float, ...] = ()
        if proposer is not None and request.proposer is not None:
            most = max(0, min(request.max_draft_len, request.remaining - 1, room))
            if most > 0:
                most = min(most, proposer.num_available(request.sequence, request.tokens))
            lag = proposer.draft_lag(request.sequence, context_len)
            probs = self._acceptance[request.proposer].accept_probs(
                request.sequence, most, request.kind
            )
        return SequenceView(
            sequence=request.sequence,
            context_len=context_len,
            max_draft_len=most,
            draft_lag=lag,
            remaining=request.remaining,
            accept_probs=probs,
            policy=request.policy,
            has_draft_passes=proposer is not None and proposer.capabilities.has_passes,
        )

    def propose(self, ready: Sequence[Request], spec_plan: SpecPlan) -> dict[SequenceId, Draft]:
        """Drafts by sequence; only those that were planned more than 0, and found something."""
        found: dict[SequenceId, Draft] = {}
        for name, proposer in self._proposers.items():
            tasks = [
                DraftTask(
                    request.sequence,
                    request.tokens,
                    request.num_prompt,
                    spec_plan.draft_lens[request.sequence],
                    request.sampling,
                    request.reuses_prefix,
                )
                for request in ready
                if request.proposer == name and spec_plan.draft_lens[request.sequence] > 0
            ]
            if tasks:
                drafts = proposer.propose(tasks)
                found |= {t.sequence: d for t, d in zip(tasks, drafts, strict=True) if d.tokens}
        return found

    def observe(self, request: Request, event: Event) -> None:
        """Learn from an event of a decoding request. A burst without drafts is a step a token."""
        proposer = self._of(request)
        if proposer is None or request.proposer is None:
            return
        acceptance = self._acceptance[request.proposer]
        acceptance.observe(request.sequence, event.num_drafted, event.num_accepted, request.kind)
        if event.num_drafted or proposer.capabilities.reads_hidden:
            proposer.observe(request.sequence, event.num_accepted, event.hidden)

    def read_prompt(self, request: Request, event: Event) -> None:
        """The first token's hidden states, for a proposer that reads them."""
        proposer = self._of(request)
        if proposer is not None and proposer.capabilities.reads_hidden:
            proposer.observe(request.sequence, 0, event.hidden)

    def release(self, request: Request) -> None:
        """Forget the request."""
        self.drop_cache(request)
        if request.proposer is not None:
            self._acceptance[request.proposer].release(request.sequence)

    def drop_cache(self, request: Request) -> None:
        """Free what the proposer holds of the request; its estimate stays."""
        proposer = self._of(request)
        if proposer is not None:
            proposer.release(request.sequence)

    def bytes_per_token(self, request: Request) -> int:
        proposer = self._of(request)
        return proposer.capabilities.bytes_per_token if proposer else 0

    def num_read(self, request: Request) -> int:
        proposer = self._of(request)
        if proposer is None or not proposer.capabilities.bytes_per_token:
            return 0
        context_len = len(request.tokens)
        return max(0, context_len - 1 - proposer.draft_lag(request.sequence, context_len))

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raise AssertionError where estimates are kept of requests that are gone."""
        known = {request.sequence for request in live}
        for name, acceptance in self._acceptance.items():
            strangers = acceptance.sequences - known
            assert not strangers, f"{name} keeps estimates of {sorted(strangers)[:5]}"

    def _of(self, request: Request) -> Proposer | None:
        return None if request.proposer is None else self._proposers[request.proposer]
