"""The proposers by name, each with its own acceptance estimates.

Acceptance is learned separately for each proposer. The acceptance of a draft model says nothing
about the acceptance of prompt lookup. If a request names no proposer, it can have several, and the
planner chooses one at every step.

In a step, `views` says what could be drafted, `propose` drafts what was planned of it, and
`observe` learns from the results.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smartspec_py.core.learn.acceptance import AcceptanceTracker, Trial
from smartspec_py.core.learn.branches import BranchTracker
from smartspec_py.core.plan.planner import COST_POLICIES
from smartspec_py.core.plan.trees import MAX_NODES, MAX_STEP_NODES, tree_options
from smartspec_py.core.types import (
    DraftOption,
    SequenceId,
    SequenceView,
    SpecPlan,
    Verification,
)
from smartspec_py.engines.base import (
    SHORT_LAG,
    Draft,
    DraftTask,
    Event,
    Proposer,
    ProposerCapabilities,
)
from smartspec_py.engines.drafts.guarded import GuardedProposer
from smartspec_py.serving.request import Request
from smartspec_py.serving.step import Mode

LEAST_NODES = 16
"""Trees are not planned where fewer nodes are left for each request: they would hardly be better
than chains, and the search takes time."""

NO_OPTION = DraftOption(0, (), has_draft_passes=False)
"""The option of a sequence without a proposer."""


class Speculation:
    """Owned by the loop thread."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = {name: GuardedProposer(name, one) for name, one in proposers.items()}
        self._capabilities = {name: proposer.capabilities for name, proposer in proposers.items()}
        self._acceptance = {
            name: AcceptanceTracker(able.cohorts, num_positions=_num_positions(able))
            for name, able in self._capabilities.items()
        }
        self._branches = {
            name: BranchTracker() for name, able in self._capabilities.items() if able.drafts_trees
        }
        self._trees: dict[SequenceId, Draft] = {}
        """Trees of the last step with drafts."""

    def must_search(self, requests: Sequence[Request]) -> bool:
        """Whether the next step has to look for drafts: to meet a latency target, or because a
        grammar forces tokens, which are nearly always accepted."""
        return any(
            request.slo_s_per_token is not None
            or (request.grammar is not None and bool(request.grammar.forced(request.tokens)))
            for request in requests
            if request.policy in COST_POLICIES
        )

    def views(
        self,
        requests: Sequence[Request],
        draft_limits: Mapping[SequenceId, int],
        now: float,
        mode: Mode = Mode.SEARCH,
    ) -> list[SequenceView]:
        """What the proposers could draft for each request.

        draft_limits: most tokens that each may draft, where memory is limited. now: by the clock of
        the request's times. mode: in REST, requests whose policy uses the cost model have no
        options, and their proposers do not look for drafts.
        """
        available = {
            request.sequence: self._available(request, draft_limits)
            for request in requests
            if not (mode is Mode.REST and request.policy in COST_POLICIES)
        }
        estimates = self._estimates(requests, available)
        drafts_s = self._drafts_s(len(requests))
        options = {
            request.sequence: [
                self._option(request, name, num, drafts_s, estimates=estimates)
                for name, num in available.get(request.sequence, ())
            ]
            for request in requests
        }
        for name in self._branches:
            able = [request for request in requests if request.sequence not in draft_limits]
            self._add_trees(name, able, options)
        return [_view(request, options[request.sequence], now) for request in requests]

    def no_views(self, requests: Sequence[Request], now: float) -> list[SequenceView]:
        """`views` for a step in which no proposer is asked."""
        return [_view(request, (), now) for request in requests]

    def propose(
        self, requests: Sequence[Request], views: Sequence[SequenceView], spec_plan: SpecPlan
    ) -> dict[SequenceId, Draft]:
        """Drafts by sequence, as planned or shorter. Sequences without drafts are left out.

        views: of the requests, in their order.
        """
        tasks: dict[str, list[DraftTask]] = defaultdict(list)
        for request, view in zip(requests, views, strict=True):
            draft_len = spec_plan.draft_lens[request.sequence]
            if not draft_len:
                continue
            option = spec_plan.option(view)
            request.proposer = option.proposer
            tasks[request.proposer].append(
                DraftTask(
                    sequence=request.sequence,
                    tokens=request.tokens,
                    num_prompt=request.num_prompt,
                    draft_len=draft_len,
                    sampling=request.sampling,
                    reuses_prefix=request.reuses_prefix,
                    grammar=request.grammar,
                    adapter=request.adapter,
                    depth=option.depth,
                    host_time=request.host_time,
                )
            )
        drafts: dict[SequenceId, Draft] = {}
        for name, group in tasks.items():
            for task, draft in zip(group, self._proposers[name].propose(group), strict=True):
                if kept := _cut(task, draft):
                    drafts[task.sequence] = kept
        self._trees = {sequence: draft for sequence, draft in drafts.items() if draft.parents}
        return drafts

    def observe(
        self, steps: Sequence[tuple[Request, Event]], views: Sequence[SequenceView] = ()
    ) -> None:
        """Learn acceptance from events of decoding requests. views: those of their step."""
        trials: dict[str, list[Trial]] = defaultdict(list)
        num_events = Counter([request.sequence for request, _ in steps])
        options = {view.sequence: view.options for view in views}
        for branches in self._branches.values():
            branches.fade()
        for request, event in steps:
            asked = [
                option.proposer for option in options.get(request.sequence, ()) if option.proposer
            ]
            for name in _drafting(request):
                drafted = event.num_drafted if name == request.proposer else 0
                if drafted or self._capabilities[name].reads_hidden:
                    accepted = event.num_accepted if drafted else 0
                    self._proposers[name].observe(request.sequence, accepted, event.hidden)
                is_burst = num_events[request.sequence] > 1
                if trial := self._trial(name, request, event, asked, is_burst=is_burst):
                    trials[name].append(trial)
        for name, group in trials.items():
            self._acceptance[name].observe(group)

    def _trial(
        self, name: str, request: Request, event: Event, asked: Sequence[str], is_burst: bool
    ) -> Trial | None:
        """What the step tells about the drafts of this proposer; None if nothing.

        - Its drafts were verified: their result; of a tree, that of the path of best guesses.
        - It was asked, and its drafts were not used: what their result would have been, if it knows
          its drafts. So a proposer can recover from poor early results. Several events belong to a
          burst, whose beginning is not known any more.
        - Otherwise a step without drafts. It does not count if no proposer was asked, nor for
          proposers with cohorts, because it belongs to none.
        """
        drafted, accepted = 0, 0
        if name == request.proposer:
            drafted, accepted = event.num_drafted, event.num_accepted
            if drafted and (tree := self._trees.get(request.sequence)):
                branches = self._branches[name]
                drafted, accepted = branches.observe(tree.tokens, tree.parents, event.tokens)
        if not drafted and name in asked and not is_burst:
            proposer = self._proposers[name]
            drafted, accepted = proposer.hindsight(request.sequence, request.tokens, event.tokens)
        if not drafted and (not asked or self._capabilities[name].cohorts):
            return None
        return Trial(request.sequence, drafted, accepted, self._cohort(name, request))

    def read_prompt(self, request: Request, event: Event) -> None:
        """Pass the prompt's hidden states to proposers that use them."""
        for name in _drafting(request) if event.hidden is not None else ():
            if self._capabilities[name].reads_hidden:
                self._proposers[name].observe(request.sequence, 0, event.hidden)

    def release(self, request: Request) -> None:
        """Free all state of the request."""
        self.drop_cache(request)
        for name in request.proposers:
            self._acceptance[name].release(request.sequence)

    def drop_cache(self, request: Request) -> None:
        """Free the proposers' caches of the request. Its estimates stay."""
        for name in request.proposers:
            self._proposers[name].release(request.sequence)

    def bytes_per_token(self, request: Request) -> int:
        name = self._caching(request)
        return self._capabilities[name].bytes_per_token if name else 0

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens of the request in the proposer's cache."""
        name = self._caching(request)
        if name is None:
            return 0
        context_len = len(request.tokens)
        lag = self._proposers[name].draft_lag(request.sequence, context_len)
        return max(0, context_len - 1 - lag)

    def state(self) -> dict[str, Any]:
        """The learned acceptance by proposer, in JSON types."""
        return {"acceptance": {name: tracker.state() for name, tracker in self._acceptance.items()}}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """kept: weight of the evidence, 0 to 1. Proposers that no longer exist are ignored."""
        for name, of_proposer in state["acceptance"].items():
            if name in self._acceptance:
                self._acceptance[name].restore(of_proposer, kept)

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raise AssertionError if there are estimates of requests that no longer exist."""
        known = {request.sequence for request in live}
        for name, acceptance in self._acceptance.items():
            strangers = acceptance.sequences - known
            assert not strangers, f"{name} keeps estimates of {sorted(strangers)[:5]}"

    def _available(
        self, request: Request, draft_limits: Mapping[SequenceId, int]
    ) -> list[tuple[str, int]]:
        """The request's proposers that can draft now, each with the most tokens. If none can, the
        first with 0: a view has an option, and the step counts as one without drafts."""
        most = min(request.max_draft_len, request.remaining - 1)
        most = min(most, draft_limits.get(request.sequence, most))
        if request.policy == "none":
            most = 0  # no proposer has to search for drafts
        pairs = [(name, self._most(name, request, most)) for name in request.proposers]
        return [pair for pair in pairs if pair[1]] or pairs[:1]

    def _most(self, name: str, request: Request, most: int) -> int:
        """The most tokens that this proposer can draft now."""
        longest = self._capabilities[name].max_context_len
        if longest is not None:
            most = min(most, longest - len(request.tokens))
        if most <= 0:
            return 0
        proposer = self._proposers[name]
        available = proposer.num_available(request.sequence, request.tokens, request.grammar)
        return min(most, available)

    def _estimates(
        self,
        requests: Sequence[Request],
        available: Mapping[SequenceId, Sequence[tuple[str, int]]],
    ) -> dict[tuple[SequenceId, str], list[float]]:
        """The acceptance probabilities by sequence and proposer. They may be longer than what is
        available."""
        groups: dict[str, list[tuple[Request, int]]] = defaultdict(list)
        for request in requests:
            for name, num in available.get(request.sequence, ()):
                if num:
                    groups[name].append((request, num))
        estimates: dict[tuple[SequenceId, str], list[float]] = {}
        for name, group in groups.items():
            sequences = [request.sequence for request, _ in group]
            longest = max([num for _, num in group])
            cohorts = [self._cohort(name, request) for request, _ in group]
            probs = self._acceptance[name].accept_probs(sequences, longest, cohorts)
            estimates |= zip([(sequence, name) for sequence in sequences], probs, strict=True)
        return estimates

    def _cohort(self, name: str, request: Request) -> str:
        """The cohort of the drafts that this proposer has for the request in this step."""
        if not self._capabilities[name].cohorts:
            return request.cohort
        return self._proposers[name].cohort(request.sequence)

    def _drafts_s(self, num_sequences: int) -> dict[str, float]:
        """Seconds that each proposer needs per sequence if it drafts for so many: the first costs
        draft_s[0], and each further one draft_s[1]."""
        share = 1.0 / max(1, num_sequences)
        return {
            name: able.draft_s[0] * share + able.draft_s[1] * (1.0 - share)
            for name, able in self._capabilities.items()
        }

    def _option(
        self,
        request: Request,
        name: str,
        num_available: int,
        drafts_s: Mapping[str, float],
        estimates: Mapping[tuple[SequenceId, str], Sequence[float]],
    ) -> DraftOption:
        probs = estimates.get((request.sequence, name), ())
        lag = self._proposers[name].draft_lag(request.sequence, len(request.tokens))
        return DraftOption(
            max_draft_len=num_available,
            accept_probs=probs[:num_available],
            draft_lag=lag if lag > SHORT_LAG else 0,
            has_draft_passes=self._capabilities[name].has_passes,
            draft_s=drafts_s[name],
            proposer=name,
        )

    def _add_trees(
        self,
        name: str,
        requests: Sequence[Request],
        options: Mapping[SequenceId, list[DraftOption]],
    ) -> None:
        """Add the trees of a proposer to the options of those requests that can have them."""
        able, num_requests = self._capabilities[name], max(1, len(options))
        num_nodes = min(MAX_NODES, MAX_STEP_NODES // num_requests)
        if num_nodes < LEAST_NODES:
            return
        chains = [
            (request.sequence, option)
            for request in requests
            for option in options[request.sequence]
            if option.proposer == name and _takes_trees(request, able)
        ]
        share = 1.0 / num_requests
        depth_s = able.tree_s[0] * share + able.tree_s[1] * (1.0 - share)
        trees = tree_options(
            [chain for _, chain in chains], self._branches[name].prob, num_nodes, depth_s
        )
        for (sequence, _), of_chain in zip(chains, trees, strict=True):
            options[sequence] += of_chain

    def _caching(self, request: Request) -> str | None:
        """Name of the request's proposer that has a cache. There is at most one."""
        return next((n for n in request.proposers if self._capabilities[n].bytes_per_token), None)


def _view(request: Request, options: Sequence[DraftOption], now: float) -> SequenceView:
    return SequenceView(
        sequence=request.sequence,
        context_len=len(request.tokens),
        remaining=request.remaining,
        policy=request.policy,
        options=tuple(options) or (NO_OPTION,),
        slo_s_per_token=request.slo_s_per_token,
        slack_s=_slack_s(request, now),
    )


def _cut(task: DraftTask, draft: Draft) -> Draft | None:
    """The draft up to the first token that the request's grammar forbids; None if nothing is left.
    Sampled drafts must not be cut, see `VerifyRequest.draft_probs`; a draft model makes none that
    are forbidden."""
    if task.grammar is not None and draft.probs is None:
        draft = Draft(draft.tokens[: task.grammar.num_allowed(task.tokens, draft.tokens)])
    return draft if draft.tokens else None


def _num_positions(able: ProposerCapabilities) -> int:
    """Positions with acceptance rates of their own."""
    return able.max_draft_len if able.has_position_rates else 1


def _drafting(request: Request) -> tuple[str, ...]:
    """Names of the proposers that learn from the request; none if it never drafts."""
    return () if request.policy == "none" else request.proposers


def _takes_trees(request: Request, able: ProposerCapabilities) -> bool:
    """Whether the drafts of this request may be a tree, and its row has room for one. Only one
    policy chooses between options. The state of a grammar differs by path, and drafts that are
    verified by rejection are a chain."""
    sampling = request.sampling
    is_coupled = sampling.is_greedy or sampling.verification is Verification.COUPLED
    has_room = (able.max_context_len or 0) >= len(request.tokens) + MAX_NODES
    return request.policy == "goodput" and is_coupled and request.grammar is None and has_room


def _slack_s(request: Request, now: float) -> float:
    if request.slo_s_per_token is None or request.first_token_s is None:
        return 0.0
    allowed_s = request.slo_s_per_token * (request.num_generated - 1)
    return allowed_s - (now - request.first_token_s)
