"""Drafts with heads on the target's last hidden state (Cai et al., "Medusa", arXiv 2401.10774).

Head i guesses the token i + 2 positions after the token whose state it reads. The state from which
the target drew its last token is known, so all heads guess at once and no model runs. A guess does
not know the guesses before it. So heads are cheap, and the later ones are right less often than a
draft model. In a tree, the guesses of a head follow each of the guesses of the head before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from smartspec_py.core.plan.trees import MAX_NODES, WIDTH
from smartspec_py.core.types import SamplingParams, SequenceId
from smartspec_py.engines.base import SequenceStart
from smartspec_py.engines.decoding.sampling import DraftRequest, best_guesses
from smartspec_py.engines.draft import NO_DRAFT, Draft
from smartspec_py.engines.drafts.growing import (
    ChainGroup,
    GrowingChain,
    TreeTensors,
    fastest_s,
    first_and_further_s,
    tree_s,
)
from smartspec_py.engines.drafts.last_state import LastState, LastStateProposer
from smartspec_py.engines.drafts.medusa.heads import MedusaHeads
from smartspec_py.engines.proposer import DraftTask, ProposerCapabilities


class MedusaProposer(LastStateProposer):
    """Medusa heads."""

    def __init__(
        self,
        heads: MedusaHeads,
        longest: int,
        tree_context_len: int | None = None,
    ) -> None:
        """longest: the most tokens of a draft. tree_context_len: see `ProposerCapabilities`."""
        super().__init__()
        self.heads = heads
        self.capabilities = ProposerCapabilities(
            max_draft_len=min(heads.num_heads, longest),
            has_passes=False,
            reads_hidden=True,
            has_position_rates=True,
            tree_context_len=tree_context_len,
        )

    def time_drafts(self, max_sequences: int) -> None:
        """Measure `draft_s` and `tree_s`."""
        able = self.capabilities
        alone_s, together_s = self._seconds(1), self._seconds(max_sequences)
        draft_s = first_and_further_s(alone_s, together_s, max_sequences)
        times = able.tree_s
        if able.tree_context_len is not None:
            times = tree_s(self._seconds, able.max_draft_len, max_sequences)
        self.capabilities = replace(able, draft_s=draft_s, tree_s=times)

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        able = self._able(tasks)
        if not able:
            return [NO_DRAFT for _ in tasks]
        states = torch.stack([self._sequences[task.sequence].state for task in able])
        logits = self.heads.logits(states)
        drafts = self._grown(able, logits)
        chains = {
            row: GrowingChain(task, self._history(task))
            for row, task in enumerate(able)
            if not task.depth
        }
        for head in range(self.capabilities.max_draft_len):
            if rows := [row for row, chain in chains.items() if not chain.is_complete]:
                ChainGroup([chains[row] for row in rows]).take(logits[rows, head])
        drafts |= {chain.task.sequence: chain.draft for chain in chains.values()}
        return [drafts.get(task.sequence, NO_DRAFT) for task in tasks]

    def _grown(self, tasks: Sequence[DraftTask], logits: torch.Tensor) -> dict[SequenceId, Draft]:
        """Drafts of the tasks for trees. logits: [tasks, heads, vocabulary]. If sampling depends on
        earlier tokens, a guess counts only those before the draft: guesses are the same on all
        paths."""
        rows_by_depth = defaultdict[int, list[int]](list)
        for row, task in enumerate(tasks):
            if task.depth:
                rows_by_depth[task.depth].append(row)
        drafts: dict[SequenceId, Draft] = {}
        for depth, rows in rows_by_depth.items():
            group, trees = [tasks[row] for row in rows], TreeTensors(len(rows), logits.device)
            for head in range(depth):
                requests = [
                    DraftRequest(task.start.sampling, len(task.tokens) + head, self._history(task))
                    for task in group
                ]
                guesses = best_guesses(logits[rows, head], requests, WIDTH)
                trees.grow(*(each[:, None].expand(-1, trees.num_ends, -1) for each in guesses))
            of_group = trees.drafts([task.draft_len for task in group])
            drafts |= zip([task.sequence for task in group], of_group, strict=True)
        return drafts

    def _seconds(self, num_sequences: int, depth: int = 0) -> float:
        """Seconds to draft for so many sequences: chains, or trees of this depth. For sampled text
        it takes longer, so this is the mean of greedy and sampled text, each the fastest of some
        calls."""
        state = torch.zeros(self.heads.hidden_size, device=self.heads.device)
        self._sequences = {sequence: LastState(state) for sequence in range(num_sequences)}
        longest = MAX_NODES if depth else self.capabilities.max_draft_len
        seconds = []
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
            tasks = [
                DraftTask(SequenceStart(sequence, [0], 1, sampling), longest, depth=depth)
                for sequence in range(num_sequences)
            ]
            seconds.append(fastest_s(partial(self.propose, tasks)))
        self._sequences.clear()
        return sum(seconds) / len(seconds)
