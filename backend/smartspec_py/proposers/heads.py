"""Drafts with heads on the target's last hidden state (Cai et al., "Medusa", arXiv 2401.10774).

Head i guesses the token i + 2 positions after the token whose state it reads. The state from which
the target drew its last token is known, so all heads guess at once and no model runs. A guess does
not know the guesses before it. So heads are cheap, and the later ones are right less often than a
draft model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from smartspec_py.core.types import SequenceId
from smartspec_py.engines.base import NO_DRAFT, Draft, DraftTask, ProposerCapabilities
from smartspec_py.engines.torch.cached_model import history_of
from smartspec_py.engines.torch.processors import TokenHistory
from smartspec_py.engines.torch.sampling import DraftRequest, draft_tokens

NUM_TIMINGS = 5
"""How often drafting is timed. The fastest counts, because other processes only slow it down."""


class Heads(Protocol):
    """See `engines.torch.medusa`."""

    @property
    def num_heads(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states [n, hidden_size] -> [n, num_heads, vocab_size], float32."""
        ...


@dataclass(slots=True)
class _Sequence:
    """state: [hidden_size], from which the last token was drawn. history: for sampling; None if it
    does not depend on earlier tokens, or if nothing was drafted yet."""

    state: torch.Tensor
    history: TokenHistory | None = None


@dataclass(slots=True)
class _Drafting:
    """A task in progress. row: of the logits."""

    task: DraftTask
    row: int
    history: TokenHistory | None
    tokens: list[int]
    probs: list[torch.Tensor]

    @property
    def wants_more(self) -> bool:
        has_ended = bool(self.tokens) and self.tokens[-1] in self.task.sampling.end_tokens
        return len(self.tokens) < self.task.draft_len and not has_ended

    @property
    def draft(self) -> Draft:
        return Draft(tuple(self.tokens), torch.stack(self.probs) if self.probs else None)


class HeadsProposer:
    """Medusa heads as a `Proposer`. It knows only sequences whose hidden states were reported."""

    def __init__(self, heads: Heads, max_sequences: int, longest: int) -> None:
        """longest: the most tokens of a draft, even if there are more heads."""
        self._heads = heads
        self._sequences: dict[SequenceId, _Sequence] = {}
        states = torch.zeros(max_sequences, heads.hidden_size, device=heads.device)
        self._capabilities = ProposerCapabilities(
            max_draft_len=min(heads.num_heads, longest),
            has_passes=False,
            reads_hidden=True,
            gives_probs=True,
            draft_s=(_seconds(heads, states[:1]), _seconds(heads, states) / max_sequences),
        )

    @property
    def capabilities(self) -> ProposerCapabilities:
        return self._capabilities

    def num_available(self, sequence: SequenceId, tokens: Sequence[int]) -> int:
        return self._capabilities.max_draft_len if sequence in self._sequences else 0

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        able = [task for task in tasks if task.draft_len and task.sequence in self._sequences]
        if not able:
            return [NO_DRAFT for _ in tasks]
        states = torch.stack([self._sequences[task.sequence].state for task in able])
        logits = self._heads.logits(states)
        started = {
            task.sequence: _Drafting(task, row, self._history(task), [], [])
            for row, task in enumerate(able)
        }
        for head in range(max(task.draft_len for task in able)):
            active = [drafting for drafting in started.values() if drafting.wants_more]
            if active:
                _draft_one(active, logits[:, head])
        return [
            started[task.sequence].draft if task.sequence in started else NO_DRAFT for task in tasks
        ]

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


def _draft_one(active: Sequence[_Drafting], logits: torch.Tensor) -> None:
    """Draft one more token for each. logits: [n, vocab_size] of the head for this position."""
    requests = [
        DraftRequest(
            one.task.sampling,
            len(one.task.tokens) + len(one.tokens),
            one.history,
            tuple(one.tokens),
        )
        for one in active
    ]
    tokens, probs = draft_tokens(logits[[one.row for one in active]], requests)
    for one, token, prob in zip(active, tokens, probs, strict=True):
        one.tokens.append(token)
        if prob is not None:
            one.probs.append(prob)


@torch.inference_mode()
def _seconds(heads: Heads, states: torch.Tensor) -> float:
    """Seconds of the fastest of some calls."""
    found = []
    for _ in range(NUM_TIMINGS):
        start = time.perf_counter()
        heads.logits(states)
        found.append(time.perf_counter() - start)
    return min(found)
