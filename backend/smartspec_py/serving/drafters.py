"""Everything that guesses, under the names by which a request chooses, each with its estimates.

Acceptance is learned for each proposer apart: what a draft model gets right says nothing about what
a look-up in the prompt does. A request that named no proposer has several, and the planner chooses
among them at every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from smartspec_py.core.acceptance import AcceptanceTracker
from smartspec_py.core.types import DraftOption, SequenceId, SequenceView, SpecPlan
from smartspec_py.engines.base import Draft, DraftTask, Event, Proposer
from smartspec_py.serving.request import Request

NOTHING = DraftOption(0, (), has_draft_passes=False)


class Drafters:
    """Owned by the loop thread."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = dict(proposers)
        self._acceptance = {name: AcceptanceTracker() for name in proposers}

    def view(self, request: Request, room: int, now: float) -> SequenceView:
        """What the planner may know. room: tokens that memory lets it draft. now: by the clock of
        the request's times."""
        most = max(0, min(request.max_draft_len, request.remaining - 1, room))
        if request.policy == "none":
            most = 0  # nobody need look for drafts
        first, *others = self._options(request, most)
        return SequenceView(
            sequence=request.sequence,
            context_len=len(request.tokens),
            max_draft_len=first.max_draft_len,
            draft_lag=first.draft_lag,
            remaining=request.remaining,
            accept_probs=first.accept_probs,
            policy=request.policy,
            has_draft_passes=first.has_draft_passes,
            alternatives=tuple(others),
            slo_s_per_token=request.slo_s_per_token,
            slack_s=_slack_s(request, now),
        )

    def propose(self, ready: Sequence[Request], spec_plan: SpecPlan) -> dict[SequenceId, Draft]:
        """Drafts by sequence; only those that were planned more than 0, and found something."""
        tasks: dict[str, list[DraftTask]] = defaultdict(list)
        for request in ready:
            draft_len = spec_plan.draft_lens[request.sequence]
            if draft_len == 0:
                continue
            request.drafter = request.options[spec_plan.choices.get(request.sequence, 0)]
            tasks[request.drafter].append(
                DraftTask(
                    request.sequence,
                    request.tokens,
                    request.num_prompt,
                    draft_len,
                    request.sampling,
                    request.reuses_prefix,
                )
            )
        found: dict[SequenceId, Draft] = {}
        for name, asked in tasks.items():
            drafts = self._proposers[name].propose(asked)
            found |= {t.sequence: d for t, d in zip(asked, drafts, strict=True) if d.tokens}
        return found

    def observe(self, request: Request, event: Event) -> None:
        """Learn from an event of a decoding request. A burst without drafts is a step a token."""
        for name in request.proposers:
            is_its_own = name == request.drafter
            drafted, accepted = (event.num_drafted, event.num_accepted) if is_its_own else (0, 0)
            self._acceptance[name].observe(request.sequence, drafted, accepted, request.kind)
            proposer = self._proposers[name]
            if drafted or proposer.capabilities.reads_hidden:
                proposer.observe(request.sequence, accepted, event.hidden)

    def read_prompt(self, request: Request, event: Event) -> None:
        """The first token's hidden states, for a proposer that reads them."""
        for name in request.proposers:
            if self._proposers[name].capabilities.reads_hidden:
                self._proposers[name].observe(request.sequence, 0, event.hidden)

    def release(self, request: Request) -> None:
        """Forget the request."""
        self.drop_cache(request)
        for name in request.proposers:
            self._acceptance[name].release(request.sequence)

    def drop_cache(self, request: Request) -> None:
        """Free what the proposers hold of the request; its estimates stay."""
        for name in request.proposers:
            self._proposers[name].release(request.sequence)

    def bytes_per_token(self, request: Request) -> int:
        proposer = self._caching(request)
        return proposer.capabilities.bytes_per_token if proposer else 0

    def num_read(self, request: Request) -> int:
        proposer = self._caching(request)
        if proposer is None:
            return 0
        context_len = len(request.tokens)
        return max(0, context_len - 1 - proposer.draft_lag(request.sequence, context_len))

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raise AssertionError where estimates are kept of requests that are gone."""
        known = {request.sequence for request in live}
        for name, acceptance in self._acceptance.items():
            strangers = acceptance.sequences - known
            assert not strangers, f"{name} keeps estimates of {sorted(strangers)[:5]}"

    def _options(self, request: Request, most: int) -> list[DraftOption]:
        """Those of its proposers that have a guess now, which the request remembers; others would
        only cost the planner time."""
        found = [(name, self._option(name, request, most)) for name in request.proposers]
        able = [pair for pair in found if pair[1].max_draft_len > 0] or found[:1]
        request.options = tuple(name for name, _ in able)
        return [option for _, option in able] or [NOTHING]

    def _option(self, name: str, request: Request, most: int) -> DraftOption:
        proposer = self._proposers[name]
        if most > 0:
            most = min(most, proposer.num_available(request.sequence, request.tokens))
        return DraftOption(
            max_draft_len=most,
            accept_probs=self._acceptance[name].accept_probs(request.sequence, most, request.kind),
            draft_lag=proposer.draft_lag(request.sequence, len(request.tokens)),
            has_draft_passes=proposer.capabilities.has_passes,
        )

    def _caching(self, request: Request) -> Proposer | None:
        """The one of its proposers that keeps a cache; there is one at most."""
        proposers = (self._proposers[name] for name in request.proposers)
        return next((p for p in proposers if p.capabilities.bytes_per_token), None)


def _slack_s(request: Request, now: float) -> float:
    if request.slo_s_per_token is None or request.first_token_s is None:
        return 0.0
    allowed_s = request.slo_s_per_token * (request.num_generated - 1)
    return allowed_s - (now - request.first_token_s)
