"""The proposers by name, each with its own acceptance estimates.

Acceptance is learned separately for each proposer. The acceptance of a draft model says nothing
about the acceptance of prompt lookup. If a request names no proposer, it can have several, and the
planner chooses one at every step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.learn.acceptance import AcceptanceTracker
from smartspec_py.core.types import (
    DraftOption,
    SequenceId,
    SequenceView,
    SpecPlan,
    Tree,
    Verification,
)
from smartspec_py.engines.base import (
    SHORT_LAG,
    Draft,
    DraftTask,
    Event,
    HindsightProposer,
    Proposer,
    TreeProposer,
)
from smartspec_py.serving.controller import LEARNING
from smartspec_py.serving.request import Request
from smartspec_py.serving.trees import Trees

Floats = NDArray[np.float64]

MAX_NODES = 512
"""Most nodes of all trees that the planner chooses from, so that planning takes less than 1 ms.
With many requests, large trees do not pay off."""

NO_PROBS: Floats = np.zeros(0)
NO_OPTION = DraftOption(0, NO_PROBS, has_draft_passes=False)
"""The option of a sequence without a proposer."""


MIN_NODES = 64
"""A draft model's trees, and branches of prompt lookup, are considered if each request may have at
least so many nodes, which is up to 8 requests. With more requests, trees gain nothing and branches
lose up to 7 % (docs/research/log), and each way to draft takes planning time."""


class _Candidate(NamedTuple):
    """A way to draft. name: the proposer's name; empty if none. num_available: most tokens that it
    can draft. is_tree: whether they are the nodes of a tree."""

    name: str
    num_available: int
    is_tree: bool = False


NO_CANDIDATE = _Candidate("", 0)


class Speculation:
    """Owned by the loop thread."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = dict(proposers)
        self._capabilities = {name: one.capabilities for name, one in proposers.items()}
        self._acceptance = {
            name: AcceptanceTracker(able.cohorts) for name, able in self._capabilities.items()
        }
        self._knowing = {
            name: cast(HindsightProposer, proposers[name])
            for name, able in self._capabilities.items()
            if able.has_hindsight
        }
        self._trees = Trees(
            {
                name: cast(TreeProposer, proposers[name])
                for name, able in self._capabilities.items()
                if able.tree_depth
            }
        )
        free = [name for name, able in self._capabilities.items() if not able.has_passes]
        # The proposer whose chains are branches of trees; empty if there is none.
        self._branching = next((name for name in free if name not in self._trees.spaces), "")
        # For each sequence in its last step: the candidates.
        self._options: dict[SequenceId, tuple[_Candidate, ...]] = {}

    def views(
        self,
        requests: Sequence[Request],
        room: Mapping[SequenceId, int],
        now: float,
        *,
        rests: bool = False,
    ) -> list[SequenceView]:
        """The planner's view of each request.

        room: most tokens that each may draft, where memory is limited. now: by the clock of the
        request's times. rests: whether no plan is searched for; then requests whose policy
        searches have no options, and their proposers do not look for drafts.
        """
        most_nodes = MAX_NODES // max(1, len(requests))
        candidates = [
            self._no_candidates(request)
            if rests and request.policy in LEARNING
            else self._candidates(request, room, most_nodes)
            for request in requests
        ]
        probs = iter(self._accept_probs(requests, candidates))
        drafts_s = self._drafts_s(len(requests))
        views = []
        for request, of_one in zip(requests, candidates, strict=True):
            context_len = len(request.tokens)
            view = SequenceView(
                request.sequence,
                context_len,
                request.max_tokens + request.num_prompt - context_len,
                request.policy,
                tuple([self._option(request, one, next(probs), drafts_s) for one in of_one]),
            )
            if request.slo_s_per_token is not None:
                view.slo_s_per_token = request.slo_s_per_token
                view.slack_s = _slack_s(request, now)
            views.append(view)
        return views

    def propose(self, ready: Sequence[Request], spec_plan: SpecPlan) -> dict[SequenceId, Draft]:
        """Drafts by sequence, as planned or shorter. Sequences without drafts are left out."""
        tasks: dict[str, list[DraftTask]] = defaultdict(list)
        branches: list[DraftTask] = []
        for request in ready:
            draft_len, tree = spec_plan.draft_lens[request.sequence], None
            if not draft_len:
                continue
            candidate = self._options[request.sequence][spec_plan.choices.get(request.sequence, 0)]
            request.drafter = candidate.name
            if candidate.is_tree:
                parts = self._trees.parts(candidate.name, request.sequence, draft_len)
                draft_len, tree, num_branch = parts
                if not draft_len:
                    request.drafter, draft_len = self._branching, num_branch
                elif num_branch:
                    branches.append(_task(request, num_branch, None))
            tasks[request.drafter].append(_task(request, draft_len, tree))
        found = self._proposed(tasks)
        for sequence, branch in self._proposed({self._branching: branches}).items():
            if sequence in found:
                found[sequence] = self._trees.joined(sequence, found[sequence], branch)
        return found

    def _proposed(self, tasks: Mapping[str, Sequence[DraftTask]]) -> dict[SequenceId, Draft]:
        found = {}
        for name, of_one in tasks.items():
            drafts = self._proposers[name].propose(of_one) if of_one else []
            pairs = zip(of_one, drafts, strict=True)
            found.update({task.sequence: draft for task, draft in pairs if draft.tokens})
        return found

    def observe(self, steps: Sequence[tuple[Request, Event]]) -> None:
        """Learn acceptance from events of decoding requests.

        Hindsight is used only for requests with one event. Several events of one request belong to
        a burst without drafts. If a prompt lookup was not used, its acceptance is known afterwards
        from the generated tokens. This lets a proposer recover from poor early results.
        """
        counts: dict[str, list[tuple[SequenceId, int, int, str]]] = defaultdict(list)
        num_events = Counter([request.sequence for request, _ in steps])
        for request, event in steps:
            has_branch = self._trees.observe(event)
            asked = [option.name for option in self._options.get(request.sequence, ())]
            for name in _drafting(request):
                drafted = accepted = 0
                if name == request.drafter:
                    _, _, drafted, accepted, *_ = event
                able = self._capabilities[name]
                if drafted or able.reads_hidden:
                    self._proposers[name].observe(request.sequence, accepted, event.hidden)
                if event.path or has_branch:
                    drafted = 0  # of a tree; estimates are about the chain of best guesses
                if not drafted and name in asked and num_events[request.sequence] == 1:
                    drafted, accepted = self._hindsight(name, request, event)
                # A step whose proposers were not asked is no evidence, and does not count.
                if drafted or (asked and not able.cohorts):
                    cohort = self._cohort(name, request)
                    counts[name].append((request.sequence, drafted, accepted, cohort))
        for name, of_one in counts.items():
            sequences, lengths, kept, cohorts = zip(*of_one, strict=True)
            self._acceptance[name].observe(sequences, lengths, kept, cohorts)

    def _cohort(self, name: str, request: Request) -> str:
        """The cohort of the drafts that this proposer has for the request in this step."""
        if not self._capabilities[name].cohorts:
            return request.cohort
        return self._knowing[name].cohort(request.sequence)

    def _hindsight(self, name: str, request: Request, event: Event) -> tuple[int, int]:
        """(drafted, accepted) as if this proposer had drafted in this step; (0, 0) if unknown."""
        proposer = self._knowing.get(name)
        if proposer is None:
            return 0, 0
        return proposer.hindsight(request.sequence, request.tokens, event.tokens)

    def state(self) -> dict[str, Any]:
        """The learned acceptance by proposer, in JSON types."""
        return {"acceptance": {name: one.state() for name, one in self._acceptance.items()}}

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """kept: weight of the evidence, 0 to 1. Proposers that no longer exist are ignored."""
        for name, of_one in state["acceptance"].items():
            if name in self._acceptance:
                self._acceptance[name].restore(of_one, kept)

    def read_prompt(self, request: Request, event: Event) -> None:
        """Pass the prompt's hidden states to proposers that use them."""
        for name in _drafting(request) if event.hidden is not None else ():
            if self._capabilities[name].reads_hidden:
                self._proposers[name].observe(request.sequence, 0, event.hidden)

    def may_draft(self, request: Request, pause: int) -> bool:
        """Whether the request may draft in its remaining tokens. pause: number of steps in which
        the guard allows no drafts."""
        is_able = bool(request.proposers) and request.max_draft_len > 0
        is_paused = request.policy in LEARNING and pause >= request.remaining
        return is_able and request.policy != "none" and not is_paused

    def release(self, request: Request) -> None:
        """Free all state of the request."""
        self.drop_cache(request)
        self._options.pop(request.sequence, None)
        for name in request.proposers:
            self._trees.release(name, request.sequence)
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

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raise AssertionError if there are estimates of requests that no longer exist."""
        known = {request.sequence for request in live}
        kept = self._options.keys() | self._trees.sequences
        assert kept <= known, "options of requests gone"
        for name, acceptance in self._acceptance.items():
            strangers = acceptance.sequences - known
            assert not strangers, f"{name} keeps estimates of {sorted(strangers)[:5]}"

    def _candidates(
        self, request: Request, room: Mapping[SequenceId, int], most_nodes: int
    ) -> list[_Candidate]:
        """The request's proposers that can draft now, at least one entry.

        most_nodes: of a tree, beyond a chain, unless the policy is a fixed length.

        They are stored in `_options`. Other proposers would only cost the planner time.
        """
        most = min(request.max_draft_len, request.remaining - 1)
        if room:
            most = min(most, room.get(request.sequence, most))
        if request.policy == "none" or most < 0:
            most = 0  # no proposer has to search for drafts
        found = []
        for name in request.proposers:
            num_available = most
            if most:
                proposer = self._proposers[name]
                num_available = proposer.num_available(request.sequence, request.tokens)
            num_available = min(most, num_available)
            if not num_available or name not in self._trees.spaces:
                found.append(_Candidate(name, num_available))
                continue
            num_nodes = min(num_available, self._num_nodes(name, request, most_nodes))
            if not self._capabilities[name].has_passes:
                found.append(_Candidate(name, num_nodes, _takes_trees(request)))
                continue
            found.append(_Candidate(name, num_available))
            if most_nodes >= MIN_NODES and request.policy == "goodput" and _takes_trees(request):
                found.append(_Candidate(name, num_nodes, is_tree=True))
        if len(found) > 1:
            found = [candidate for candidate in found if candidate.num_available] or found[:1]
        self._options[request.sequence] = tuple(found)
        return found or [NO_CANDIDATE]

    def _no_candidates(self, request: Request) -> list[_Candidate]:
        self._options[request.sequence] = ()
        return [NO_CANDIDATE]

    def _accept_probs(
        self, requests: Sequence[Request], candidates: Sequence[Sequence[_Candidate]]
    ) -> list[Floats]:
        """For each candidate of each request, in order, an array of shape [num_available]."""
        groups: dict[tuple[bool, str], list[tuple[int, SequenceId, int, str]]] = defaultdict(list)
        num_candidates = 0
        for request, of_one in zip(requests, candidates, strict=True):
            for name, num_available, is_tree in of_one:
                if num_available:
                    cohort = self._cohort(name, request)
                    candidate = (num_candidates, request.sequence, num_available, cohort)
                    groups[is_tree, name].append(candidate)
                num_candidates += 1
        found = [NO_PROBS] * num_candidates
        branches: dict[SequenceId, Floats] = {}
        for (is_tree, name), group in sorted(groups.items()):  # chains first
            indices, sequences, caps, kinds = zip(*group, strict=True)
            depth = max(caps)
            if is_tree:
                best = self._trees.spaces[name].depth
                probs = self._acceptance[name].accept_probs(sequences, best, kinds)
                own = {} if self._capabilities[name].has_passes else branches
                probs = self._trees.accept_probs(name, sequences, depth, probs, own)
            else:
                probs = self._acceptance[name].accept_probs(sequences, depth, kinds)
            for index, cap, row in zip(indices, caps, probs, strict=True):
                found[index] = row if cap == depth else row[:cap]
            if name == self._branching and MIN_NODES * len(requests) <= MAX_NODES:
                branches = {s: found[i] for i, s in zip(indices, sequences, strict=True)}
        return found

    def _num_nodes(self, name: str, request: Request, most_nodes: int) -> int:
        space = self._trees.spaces[name]
        if not _takes_trees(request):
            return space.depth
        is_fixed = request.policy.startswith("fixed:")
        return len(space) if is_fixed else min(len(space), max(space.depth, most_nodes))

    def _drafts_s(self, num_sequences: int) -> dict[str, float]:
        """Seconds that each proposer needs per sequence if it drafts for so many."""
        share = 1.0 / max(1, num_sequences)
        return {
            name: able.draft_s[0] * share + able.draft_s[1] * (1.0 - share)
            for name, able in self._capabilities.items()
        }

    def _option(
        self,
        request: Request,
        candidate: _Candidate,
        probs: Floats,
        drafts_s: Mapping[str, float],
    ) -> DraftOption:
        name, num_available, is_tree = candidate
        proposer = self._proposers.get(name)
        if proposer is None:
            return NO_OPTION
        lag = proposer.draft_lag(request.sequence, len(request.tokens))
        lag = lag if lag > SHORT_LAG else 0
        has_passes, num_passes = self._capabilities[name].has_passes, None
        if is_tree and has_passes:
            num_passes = self._trees.num_passes(name, request.sequence, num_available)
        return DraftOption(
            num_available, probs, lag, has_passes, drafts_s[name], is_tree, num_passes
        )

    def _caching(self, request: Request) -> str | None:
        """Name of the request's proposer that has a cache. There is at most one."""
        return next((n for n in request.proposers if self._capabilities[n].bytes_per_token), None)


def _drafting(request: Request) -> tuple[str, ...]:
    """Names of the proposers that learn from the request; none if it never drafts."""
    return () if request.policy == "none" else request.proposers


def _takes_trees(request: Request) -> bool:
    """Whether its drafts may be a tree. Sampled drafts that are verified by rejection may not."""
    sampling = request.sampling
    return sampling.is_greedy or sampling.verification is Verification.COUPLED


def _task(request: Request, draft_len: int, tree: Tree | None) -> DraftTask:
    return DraftTask(
        request.sequence,
        request.tokens,
        request.num_prompt,
        draft_len,
        request.sampling,
        request.reuses_prefix,
        tree,
    )


def _slack_s(request: Request, now: float) -> float:
    if request.slo_s_per_token is None or request.first_token_s is None:
        return 0.0
    allowed_s = request.slo_s_per_token * (request.num_generated - 1)
    return allowed_s - (now - request.first_token_s)
