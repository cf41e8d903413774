"""Drafts with heads on the target's last hidden state (Cai et al., "Medusa", arXiv 2401.10774).

Head i guesses the token i + 2 positions after the token whose state it reads. The state from which
the target drew its last token is known, so all heads guess at once and no model runs. A guess does
not know the guesses before it. So heads are cheap, and the later ones are right less often than a
draft model.

If the target verifies trees, the drafts are a tree: for each depth several guesses of its head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from smartspec_py.core.types import NO_TOKEN, ROOT, SamplingParams, SequenceId, Tree
from smartspec_py.engines.base import NO_DRAFT, Draft, DraftTask, ProposerCapabilities
from smartspec_py.engines.torch.cached_model import history_of
from smartspec_py.engines.torch.medusa import MedusaHeads
from smartspec_py.engines.torch.processors import TokenHistory
from smartspec_py.engines.torch.sampling import DraftRequest, guess_tokens
from smartspec_py.engines.torch.tree import depths

NUM_TIMINGS = 5
"""How often drafting is timed. The fastest counts, because other processes only slow it down."""


class _Guesses(NamedTuple):
    """Guesses for the tokens after the first num_known. tokens: by depth, best first."""

    num_known: int
    tokens: list[list[int]]


@dataclass(slots=True)
class _Sequence:
    """state: [hidden_size], from which the last token was drawn. history: for sampling; None if it
    does not depend on earlier tokens, or if nothing was drafted yet. guesses: the last ones."""

    state: torch.Tensor
    history: TokenHistory | None = None
    guesses: _Guesses | None = None


@dataclass(slots=True)
class _Drafting:
    """A task in progress. depth: number of heads that it needs. guesses, probs: of each head so
    far."""

    task: DraftTask
    depth: int
    history: TokenHistory | None
    guesses: list[list[int]]
    probs: list[torch.Tensor | None]

    @property
    def request(self) -> DraftRequest:
        """For the next head. The guesses before it count as the best ones."""
        best = tuple([guesses[0] for guesses in self.guesses])
        position = len(self.task.tokens) + len(best)
        return DraftRequest(self.task.sampling, position, self.history, best)

    def draft(self) -> Draft:
        """The planned tree or chain, without missing guesses and nodes after an end token."""
        task = self.task
        tree = task.tree or Tree(tuple(range(ROOT, task.draft_len - 1)), (0,) * task.draft_len)
        places, at = {ROOT: ROOT}, {ROOT: ROOT}  # of nodes that can have children: index and depth
        tokens: list[int] = []
        parents: list[int] = []
        probs = []
        for node, (parent, rank) in enumerate(zip(*tree, strict=True)):
            if parent not in places:
                continue
            depth = at[parent] + 1
            token = self.guesses[depth][rank]
            if token == NO_TOKEN:
                continue
            if token not in task.sampling.end_tokens:
                places[node], at[node] = len(tokens), depth
            tokens.append(token)
            parents.append(places[parent])
            if (prob := self.probs[depth]) is not None:
                probs.append(prob)
        given = torch.stack(probs) if probs else None
        return Draft(tuple(tokens), given, () if task.tree is None else tuple(parents))


class HeadsProposer:
    """Medusa heads as a `HindsightProposer`. It knows only sequences whose hidden states were
    reported."""

    def __init__(
        self, heads: MedusaHeads, max_sequences: int, longest: int, width: int = 1
    ) -> None:
        """longest: the most tokens of a draft. width: guesses of a head; 1 for chains."""
        self.heads = heads
        self._sequences: dict[SequenceId, _Sequence] = {}
        is_tree = width > 1 and longest > 1
        self._capabilities = ProposerCapabilities(
            max_draft_len=longest if is_tree else min(heads.num_heads, longest),
            has_passes=False,
            reads_hidden=True,
            has_hindsight=True,
            tree_depth=min(heads.num_heads, longest) if is_tree else 0,
            tree_width=width if is_tree else 1,
        )
        draft_s = self._seconds(1), self._seconds(max_sequences) / max_sequences
        self._capabilities = replace(self._capabilities, draft_s=draft_s)

    @property
    def capabilities(self) -> ProposerCapabilities:
        return self._capabilities

    def num_available(
        self, sequence: SequenceId, tokens: Sequence[int], sampling: SamplingParams
    ) -> int:
        return self._capabilities.max_draft_len if sequence in self._sequences else 0

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        able = [task for task in tasks if task.draft_len and task.sequence in self._sequences]
        if not able:
            return [NO_DRAFT for _ in tasks]
        states = torch.stack([self._sequences[task.sequence].state for task in able])
        logits = self.heads.logits(states)
        started = [_Drafting(task, _depth(task), self._history(task), [], []) for task in able]
        for head in range(max(drafting.depth for drafting in started)):
            rows = [row for row, drafting in enumerate(started) if head < drafting.depth]
            active = [started[row] for row in rows]
            requests = [drafting.request for drafting in active]
            found = guess_tokens(logits[rows, head], requests, self._capabilities.tree_width)
            for drafting, guesses, prob in zip(active, *found, strict=True):
                drafting.guesses.append(guesses)
                drafting.probs.append(prob)
        for drafting in started:
            known = self._sequences[drafting.task.sequence]
            known.guesses = _Guesses(len(drafting.task.tokens), drafting.guesses)
        drafts = {drafting.task.sequence: drafting.draft() for drafting in started}
        return [drafts.get(task.sequence, NO_DRAFT) for task in tasks]

    def hindsight(
        self, sequence: SequenceId, tokens: Sequence[int], generated: Sequence[int]
    ) -> tuple[int, int]:
        """See `HindsightProposer`, for the best guesses. (0, 0) if it did not draft."""
        known = self._sequences.get(sequence)
        if known is None or known.guesses is None or known.guesses.num_known != len(tokens):
            return 0, 0
        are_right = [
            tokens[0] == token
            for tokens, token in zip(known.guesses.tokens, generated, strict=False)
        ]
        return len(are_right), sum(takewhile(bool, are_right))

    def cohort(self, sequence: SequenceId) -> str:
        """Not used, because there are no cohorts."""
        return ""

    def observe(self, sequence: SequenceId, num_accepted: int, hidden: Any = None) -> None:
        """Keep the last state. The copy frees the states of the whole pass."""
        if hidden is None or not len(hidden):
            return
        state = hidden[-1].float().clone()
        known = self._sequences.setdefault(sequence, _Sequence(state))
        known.state = state

    def draft_lag(self, sequence: SequenceId, context_len: int) -> int:
        """Always 0: heads have no cache."""
        return 0

    def release(self, sequence: SequenceId) -> None:
        self._sequences.pop(sequence, None)

    def close(self) -> None:
        self._sequences.clear()

    def _history(self, task: DraftTask) -> TokenHistory | None:
        known = self._sequences[task.sequence]
        if known.history is None:
            known.history = history_of(task.sampling, task.num_prompt)
        if known.history is not None:
            known.history.extend(task.tokens[len(known.history) :])
        return known.history

    def _seconds(self, num_sequences: int) -> float:
        """Seconds to draft for so many sequences. For sampled text it takes longer, so this is the
        mean of greedy and sampled text, each the fastest of some calls."""
        state = torch.zeros(self.heads.hidden_size, device=self.heads.device)
        self._sequences = {sequence: _Sequence(state) for sequence in range(num_sequences)}
        longest = min(self.heads.num_heads, self._capabilities.max_draft_len)
        found = []
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
            tasks = [DraftTask(one, [0], 1, longest, sampling) for one in range(num_sequences)]
            found.append(min(self._timed(tasks) for _ in range(NUM_TIMINGS)))
        self._sequences.clear()
        return sum(found) / len(found)

    def _timed(self, tasks: Sequence[DraftTask]) -> float:
        start = time.perf_counter()
        self.propose(tasks)
        return time.perf_counter() - start


def _depth(task: DraftTask) -> int:
    """Number of heads that the task needs."""
    return task.draft_len if task.tree is None else max(depths(task.tree.parents))
