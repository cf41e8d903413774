"""A proposer, and what the server has learned about its drafts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from smartspec_py.core.learn.acceptance import AcceptanceTracker, Trial
from smartspec_py.core.learn.branches import BranchTracker
from smartspec_py.core.plan.trees import MAX_NODES, MAX_STEP_NODES, tree_options
from smartspec_py.core.types import DraftOption, SequenceId, Verification
from smartspec_py.engines.base import Event
from smartspec_py.engines.draft import Draft, Tree
from smartspec_py.engines.drafts.guarded import GuardedProposer
from smartspec_py.engines.proposer import SHORT_PREFILL, DraftTask, Proposer
from smartspec_py.serving.request import Request

LEAST_NODES = 16
"""Trees are not planned where fewer nodes are left for each request: they would hardly be better
than chains, and the search takes time."""


class StepResult(NamedTuple):
    """What a decoding step brought for a request. asked: names of the sources that had options for
    it. is_burst: whether the step had several events of the request."""

    request: Request
    event: Event
    asked: Collection[str]
    is_burst: bool


class Source:
    """One of the proposers. Its acceptance says nothing about that of others."""

    def __init__(
        self, name: str, proposer: Proposer, max_prefill_len: int = Proposer.max_prefill_len
    ) -> None:
        """name: that requests use. max_prefill_len: see `Proposer`."""
        self.name = name
        proposer.max_prefill_len = max_prefill_len
        self._proposer = GuardedProposer(name, proposer)
        self._capabilities = able = proposer.capabilities
        num_positions = able.max_draft_len if able.has_position_rates else 1
        self._acceptance = AcceptanceTracker(able.acceptance_groups, num_positions=num_positions)
        self._branches = BranchTracker()
        self._trees: dict[SequenceId, tuple[tuple[int, ...], Tree]] = {}
        """Tokens and shapes of the trees of its last step with drafts."""

    @property
    def no_option(self) -> DraftOption:
        """The option of a sequence that cannot have drafts now."""
        return DraftOption(
            0, (), has_draft_passes=self._capabilities.has_passes, proposer=self.name
        )

    @property
    def bytes_per_token(self) -> int:
        """See `ProposerCapabilities`."""
        return self._capabilities.bytes_per_token

    def options(
        self, requests: Sequence[Request], limits: Mapping[SequenceId, int], num_sequences: int
    ) -> dict[SequenceId, list[DraftOption]]:
        """What it could draft for those of the requests that can have drafts: a chain, and trees.

        limits: most drafts of a request, where memory is limited; these have no trees.
        num_sequences: of the step.
        """
        nums = {request.sequence: self._num_available(request, limits) for request in requests}
        able = [request for request in requests if nums[request.sequence]]
        if not able:
            return {}
        sequences = [request.sequence for request in able]
        groups = [self._acceptance_group(request) for request in able]
        probs = self._acceptance.accept_probs(sequences, max(nums.values()), groups)
        draft_s = _share_s(self._capabilities.draft_s, num_sequences)
        options = {
            request.sequence: [
                DraftOption(
                    max_draft_len=nums[request.sequence],
                    accept_probs=of_request[: nums[request.sequence]],
                    draft_prefill_len=self._draft_prefill_len(request),
                    has_draft_passes=self._capabilities.has_passes,
                    draft_s=draft_s,
                    proposer=self.name,
                )
            ]
            for request, of_request in zip(able, probs, strict=True)
        }
        branching = [request for request in able if self._may_branch(request, limits)]
        if branching:
            self._add_trees([options[request.sequence] for request in branching], num_sequences)
        return options

    def propose(self, tasks: Sequence[DraftTask]) -> dict[SequenceId, Draft]:
        """The drafts by sequence, without empty ones."""
        drafts = zip(tasks, self._proposer.propose(tasks), strict=True)
        kept = {task.sequence: _cut(task, draft) for task, draft in drafts}
        self._trees = {s: (draft.tokens, draft.tree) for s, draft in kept.items() if draft.tree}
        return {sequence: draft for sequence, draft in kept.items() if draft.tokens}

    def observe(self, results: Sequence[StepResult]) -> None:
        """Learn acceptance, and report results to the proposer."""
        self._branches.fade()
        trials = []
        for result in results:
            request, event = result.request, result.event
            self._learn(request)
            is_own = bool(event.num_drafted) and request.proposer == self.name
            if is_own or self._capabilities.reads_hidden:
                num_accepted = event.num_accepted if is_own else 0
                self._proposer.observe(request.sequence, num_accepted, event.hidden)
            if trial := self._trial(result, is_own):
                trials.append(trial)
        self._acceptance.observe(trials)

    def _trial(self, result: StepResult, is_own: bool) -> Trial | None:
        """What the step tells about the drafts of this proposer; None if nothing.

        - Its drafts were verified: their result; of a tree, that of the path of best guesses.
        - It was asked, and its drafts were not used: what their result would have been, if it knows
          its drafts. So a proposer can recover from poor early results. In a burst (several
          events), the tokens at its start are no longer known.
        - Otherwise it is a step without drafts. That is ignored if no proposer was asked, or if the
          proposer has acceptance groups, because the step belongs to none of them.
        """
        request, event = result.request, result.event
        sequence, counts = request.sequence, (0, 0)
        if is_own:
            counts = event.num_drafted, event.num_accepted
            if sequence in self._trees:
                tokens, tree = self._trees[sequence]
                counts = self._branches.observe(tokens, tree.parents, event.tokens)
        elif self.name in result.asked and not result.is_burst:
            counts = self._proposer.counterfactual(sequence, request.tokens, event.tokens)
        if not counts[0] and (not result.asked or self._capabilities.acceptance_groups):
            return None
        return Trial(sequence, *counts, self._acceptance_group(request))

    def read_prompt(self, request: Request, event: Event) -> None:
        """Give the proposer the states of a prompt, if it reads them."""
        if self._capabilities.reads_hidden:
            self._proposer.observe(request.sequence, 0, event.hidden)

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens of the request in the proposer's cache."""
        return self._proposer.num_cached(request.sequence, len(request.tokens))

    def release(self, request: Request) -> None:
        """Free all state of the request. Its text may be kept for others of its scope."""
        self._learn(request)
        self.drop_cache(request.sequence)
        self._acceptance.release(request.sequence)

    def drop_cache(self, sequence: SequenceId) -> None:
        """Free the proposer's cache of the sequence. Its estimates stay."""
        self._proposer.release(sequence)

    def state(self) -> dict[str, Any]:
        """The learned acceptance, in JSON types."""
        return self._acceptance.state()

    def restore(self, state: Mapping[str, Any], kept: float) -> None:
        """kept: weight of the evidence, 0 to 1."""
        self._acceptance.restore(state, kept)

    @property
    def sequences(self) -> Collection[SequenceId]:
        """That have estimates."""
        return self._acceptance.sequences

    def _num_available(self, request: Request, limits: Mapping[SequenceId, int]) -> int:
        """The most tokens that it can draft now."""
        most = min(request.max_draft_len, request.remaining - 1)
        most = min(most, limits.get(request.sequence, most))
        if self._capabilities.max_context_len is not None:
            most = min(most, self._capabilities.max_context_len - len(request.tokens))
        if most <= 0:
            return 0
        self._learn(request)
        available = self._proposer.num_available(request.sequence, request.tokens, request.grammar)
        return min(most, available)

    def _learn(self, request: Request) -> None:
        """Show its text so far to the proposer, for others of its scope too."""
        if self._capabilities.learns_texts and (scope := request.scope) is not None:
            self._proposer.learn(request.sequence, request.tokens, request.num_prompt, scope)

    def _draft_prefill_len(self, request: Request) -> int:
        """`DraftOption.draft_prefill_len`."""
        length = self._proposer.draft_prefill_len(request.sequence, len(request.tokens))
        if length > SHORT_PREFILL:
            length -= self._proposer.num_reusable(request.start)
        return length if length > SHORT_PREFILL else 0

    def _acceptance_group(self, request: Request) -> str:
        """Of the drafts that it has for the request in this step."""
        return (
            self._proposer.acceptance_group(request.sequence)
            if self._capabilities.acceptance_groups
            else request.acceptance_group
        )

    def _may_branch(self, request: Request, limits: Mapping[SequenceId, int]) -> bool:
        """Whether the drafts of this request may be a tree. That needs room in its row, the policy
        `goodput` (others take the first option), text without a grammar (its state would differ by
        path), and coupled or greedy verification."""
        longest = self._capabilities.tree_context_len
        if longest is None or len(request.tokens) + MAX_NODES > longest:
            return False
        if request.policy != "goodput" or request.grammar is not None or request.sequence in limits:
            return False
        sampling = request.sampling
        return sampling.is_greedy or sampling.verification is Verification.COUPLED

    def _add_trees(self, options: Sequence[list[DraftOption]], num_sequences: int) -> None:
        """Add trees to options that are a chain."""
        num_nodes = min(MAX_NODES, MAX_STEP_NODES // num_sequences)
        if num_nodes < LEAST_NODES:
            return
        depth_s = _share_s(self._capabilities.tree_s, num_sequences)
        chains = [chain for (chain,) in options]
        trees = tree_options(chains, self._branches.prob, num_nodes, depth_s)
        for of_request, found in zip(options, trees, strict=True):
            of_request += found


def _share_s(times: tuple[float, float], num_sequences: int) -> float:
    """Seconds for each of so many sequences. times: of the first one, and of each further one."""
    share = 1.0 / num_sequences
    return times[0] * share + times[1] * (1.0 - share)


def _cut(task: DraftTask, draft: Draft) -> Draft:
    """The draft up to the first token that the request's grammar forbids. Sampled drafts must not
    be cut, see `Draft.probs`; a draft model makes none that are forbidden."""
    if task.start.grammar is None or draft.probs is not None:
        return draft
    return Draft(draft.tokens[: task.start.grammar.num_allowed(task.tokens, draft.tokens)])
