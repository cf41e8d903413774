"""The sources of drafts. If a request names no proposer, it can have several, and the planner
chooses one at every step.

In a step, `views` says what could be drafted, `propose` drafts what was planned of it, and
`observe` learns from the results.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from smartspec_py.core.learn.answer_length import AnswerLength
from smartspec_py.core.plan.planner import COST_POLICIES
from smartspec_py.core.types import DraftOption, SequenceId, SequenceView, SpecPlan
from smartspec_py.engines.base import Event
from smartspec_py.engines.draft import Draft
from smartspec_py.engines.proposer import DraftTask, Proposer
from smartspec_py.serving.request import Request, RequestState
from smartspec_py.serving.source import Source, StepResult
from smartspec_py.serving.step import Mode

NO_OPTION = DraftOption(0, (), has_draft_passes=False)
"""The option of a sequence without a proposer."""


class Speculation:
    """Owned by the loop thread."""

    def __init__(
        self, proposers: Mapping[str, Proposer], max_prefill_len: int = Proposer.max_prefill_len
    ) -> None:
        """proposers: in the order of `Request.proposers`. max_prefill_len: see `Proposer`."""
        self._sources = {
            name: Source(name, proposer, max_prefill_len) for name, proposer in proposers.items()
        }
        self._answer_length = AnswerLength()

    def has_target(self, requests: Sequence[Request]) -> bool:
        """Whether drafts can help to meet a latency target."""
        return any(request.slo_s_per_token is not None for request in _planned(requests))

    def has_forced(self, requests: Sequence[Request]) -> bool:
        """Whether a grammar forces tokens, which are nearly always accepted as drafts."""
        return any(
            request.grammar is not None and bool(request.grammar.forced(request.tokens))
            for request in _planned(requests)
        )

    def views(
        self,
        requests: Sequence[Request],
        limits: Mapping[SequenceId, int],
        now: float,
        mode: Mode = Mode.SEARCH,
    ) -> list[SequenceView]:
        """What could be drafted for each request.

        limits: most tokens that each may draft, where memory is limited. now: by the clock of the
        request's times. mode: in REST, requests whose policy uses the cost model have no options,
        and their proposers do not look for drafts.
        """
        asked = [r for r in requests if not (mode is Mode.REST and r.policy in COST_POLICIES)]
        options: dict[SequenceId, list[DraftOption]] = defaultdict(list)
        for source in self._sources.values():
            able = [request for request in asked if source.name in _proposers_of(request)]
            for sequence, found in source.options(able, limits, len(requests)).items():
                options[sequence] += found
        for request in asked:
            if request.proposers and not options[request.sequence]:
                # Each view needs an option. With this one, it counts as a step without drafts.
                options[request.sequence] = [self._sources[request.proposers[0]].no_option]
        return [self._view(request, options[request.sequence], now) for request in requests]

    def no_views(self, requests: Sequence[Request], now: float) -> list[SequenceView]:
        """`views` for a step in which no proposer is asked."""
        return [self._view(request, (), now) for request in requests]

    def propose(
        self, requests: Sequence[Request], views: Sequence[SequenceView], spec_plan: SpecPlan
    ) -> dict[SequenceId, Draft]:
        """Drafts by sequence, as planned or shorter. Sequences without drafts are left out, also
        those of which a proposer must read more tokens first.

        views: of the requests, in their order.
        """
        tasks: dict[str, list[DraftTask]] = defaultdict(list)
        for request, view in zip(requests, views, strict=True):
            if draft_len := spec_plan.draft_lens[request.sequence]:
                option = spec_plan.option(view)
                request.proposer = option.proposer
                tasks[option.proposer].append(DraftTask(request.start, draft_len, option.depth))
        drafts: dict[SequenceId, Draft] = {}
        for name, group in tasks.items():
            drafts |= self._sources[name].propose(group)
        return drafts

    def observe(
        self, steps: Sequence[tuple[Request, Event]], views: Sequence[SequenceView] = ()
    ) -> None:
        """Learn acceptance from the events of decoding requests, and keep the states of prompts.

        Call it before the events change the requests. views: those of their step.
        """
        num_events = Counter([request.sequence for request, _ in steps])
        asked = {view.sequence: [o.proposer for o in view.options if o.proposer] for view in views}
        results = []
        for request, event in steps:
            if request.state is RequestState.DECODING:
                is_burst = num_events[request.sequence] > 1
                found = asked.get(request.sequence, [])
                results.append(StepResult(request, event, asked=found, is_burst=is_burst))
            elif event.hidden is not None:
                for name in _proposers_of(request):
                    self._sources[name].read_prompt(request, event)
        for name, source in self._sources.items():
            source.observe([result for result in results if name in _proposers_of(result.request)])

    def release(self, request: Request) -> None:
        """Free all state of the request, which has ended."""
        if request.num_generated:
            self._answer_length.observe(request.num_generated)
        for name in request.proposers:
            self._sources[name].release(request)

    def drop_cache(self, request: Request) -> None:
        """Free the draft cache of the request. Its estimates stay."""
        if source := self._caching(request):
            source.drop_cache(request.sequence)

    def bytes_per_token(self, request: Request) -> int:
        source = self._caching(request)
        return source.bytes_per_token if source else 0

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens of the request in the proposer's cache."""
        source = self._caching(request)
        return source.num_computed_tokens(request) if source else 0

    def state(self) -> dict[str, Any]:
        """The learned acceptance by proposer and length of answers, in JSON types."""
        acceptance = {name: source.state() for name, source in self._sources.items()}
        return {"acceptance": acceptance, "answer_length": self._answer_length.mean}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """kept: weight of the evidence, 0 to 1. Proposers that no longer exist are ignored."""
        for name, of_source in state["acceptance"].items():
            if name in self._sources:
                self._sources[name].restore(of_source, kept)
        self._answer_length.mean = float(state["answer_length"])

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raise AssertionError if there are estimates of requests that no longer exist."""
        known = {request.sequence for request in live}
        for name, source in self._sources.items():
            unknown = set(source.sequences) - known
            assert not unknown, f"{name} keeps estimates of {sorted(unknown)[:5]}"

    def _view(self, request: Request, options: Sequence[DraftOption], now: float) -> SequenceView:
        return SequenceView(
            sequence=request.sequence,
            context_len=len(request.tokens),
            remaining=min(request.remaining, self._answer_length.rest(request.num_generated)),
            policy=request.policy,
            options=tuple(options) or (NO_OPTION,),
            slo_s_per_token=request.slo_s_per_token,
            slack_s=_slack_s(request, now),
        )

    def _caching(self, request: Request) -> Source | None:
        """The request's source whose proposer has a cache. There is at most one."""
        sources = [self._sources[name] for name in request.proposers]
        return next((source for source in sources if source.bytes_per_token), None)


def _proposers_of(request: Request) -> tuple[str, ...]:
    """Names of the proposers that may draft for the request; none if it never has drafts."""
    return () if request.policy == "none" else request.proposers


def _slack_s(request: Request, now: float) -> float:
    if request.slo_s_per_token is None or request.first_token_s is None:
        return 0.0
    allowed_s = request.slo_s_per_token * (request.num_generated - 1)
    return allowed_s - (now - request.first_token_s)


def _planned(requests: Sequence[Request]) -> Iterator[Request]:
    """Those whose drafts are planned by their costs."""
    return (one for one in requests if one.policy in COST_POLICIES and one.proposers)
