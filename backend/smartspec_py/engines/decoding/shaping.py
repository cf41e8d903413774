"""Changes of the logits that a request asks for: biases, bans and penalties.

A row of float32 logits at an absolute position is shaped in this order:

0. Tokens that the request's grammar forbids get -inf, before everything else. End tokens are
   allowed where the text may end.
1. `logit_bias` is added.
2. Banned tokens get -inf. The last token of a word in `bad_words` is banned if the tokens before it
   end with the rest of the word (so a word of one token always). All end tokens are banned while
   fewer than `min_tokens` tokens are generated, that is, position - num_prompt < min_tokens.
3. `repetition_penalty` applies to every known token: positive logits are divided by it, negative
   ones multiplied.
4. `presence_penalty` is subtracted once from the logit of each generated token, and
   `frequency_penalty` once per occurrence.

Drafts before the position count as generated tokens. So the target verifies a draft as if the
drafts before it were already part of the text. If steps 1 and 2 leave no token in a row, the row
draws the most probable token after step 0. The request continues without an error. So `min_tokens`
and `bad_words` have no effect where the grammar leaves no other token. A row after drafts that the
grammar forbids is not used, and stays as it is. A row whose grammar has failed, or leaves no token,
fails: it cannot be drawn from.

Temperature and truncation follow in `truncation.py`.

A tokenizer may have tokens beyond the row's vocabulary. They cannot be drawn, so settings that name
them have no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from smartspec_py.constants import GUIDE_FIELD
from smartspec_py.core.types import SamplingParams
from smartspec_py.engines.base import Failure, Grammar
from smartspec_py.engines.decoding.truncation import best_tokens
from smartspec_py.engines.host_time import Cause, HostTime

T = TypeVar("T")

NO_TOKEN_LEFT = (
    "allows no token at this place of the text: where a text must not end, its end tokens and "
    "stop_token_ids are forbidden"
)


class TokenHistory:
    """The tokens of one sequence, counted as they arrive; the first num_prompt are its prompt.

    Needed only if `SamplingParams.shapes_logits`. grammar: of its text. host_time: where shaping is
    measured.
    """

    def __init__(
        self, num_prompt: int, grammar: Grammar | None = None, host_time: HostTime | None = None
    ) -> None:
        self.num_prompt, self.grammar = num_prompt, grammar
        self.host_time = host_time or HostTime()
        self._tokens: list[int] = []
        self._slots: dict[int, int] = {}
        self._distinct = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int64)  # occurrences of each token in the generated text

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens that are final; do not append drafts."""
        for token in tokens:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._distinct):
                self._distinct = np.concatenate([self._distinct, np.zeros_like(self._distinct)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._distinct[slot] = token
            self._counts[slot] += len(self._tokens) >= self.num_prompt
            self._tokens.append(token)

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def tail(self, num_tokens: int) -> tuple[int, ...]:
        """The last num_tokens tokens, or all if there are fewer."""
        return tuple(self._tokens[-num_tokens:]) if num_tokens > 0 else ()

    def count_with(
        self, drafts: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """All known tokens [m], and how often each is in the generated text, [m]. The drafts count
        as generated."""
        num_known, added = len(self._slots), Counter(drafts)
        counts = self._counts[:num_known].copy()
        new = [token for token in added if token not in self._slots]
        for token in added.keys() - new:
            counts[self._slots[token]] += added[token]
        num_new = [added[token] for token in new]
        return (
            np.concatenate([self._distinct[:num_known], np.array(new, np.int64)]),
            np.concatenate([counts, np.array(num_new, np.int64)]),
        )


@dataclass(frozen=True, slots=True)
class Shaping:
    """A row of logits to shape: the one after the history and these drafts."""

    row: int
    sampling: SamplingParams
    history: TokenHistory
    drafts: tuple[int, ...] = ()

    @property
    def bans_ends(self) -> bool:
        num_generated = len(self.history) + len(self.drafts) - self.history.num_prompt
        return bool(self.sampling.end_tokens) and num_generated < self.sampling.min_tokens

    @property
    def may_ban(self) -> bool:
        """Whether more than a grammar can make tokens impossible."""
        return bool(self.sampling.logit_bias or self.sampling.bad_words or self.bans_ends)

    @property
    def has_effect(self) -> bool:
        return self.may_ban or self.sampling.counts_tokens or self.sampling.is_guided


def shape_logits(
    logits: torch.Tensor, shapings: Sequence[Shaping]
) -> tuple[torch.Tensor, dict[int, Failure]]:
    """The logits [n, vocab] with these rows shaped, as a copy if any changes. Rows ascend. Also the
    rows whose grammar has failed or leaves no token."""
    shapings = [shaping for shaping in shapings if shaping.has_effect]
    if not shapings:
        return logits, {}
    index = torch.tensor([shaping.row for shaping in shapings], device=logits.device)
    rows = logits[index]
    failures = _exclude(rows, shapings)
    best = best_tokens(rows, 1) if any(shaping.may_ban for shaping in shapings) else None
    _add_biases(rows, shapings)
    _penalise(rows, shapings)
    if best is not None:
        # The logit becomes 0, so that even logits that are all -inf give a distribution.
        is_dead = rows.amax(-1, keepdim=True) == -torch.inf
        rows.scatter_(-1, best, rows.gather(-1, best).masked_fill_(is_dead, 0.0))
    whole = rows if len(rows) == len(logits) else logits.index_copy(0, index, rows)
    return whole, failures


def _exclude(rows: torch.Tensor, shapings: Sequence[Shaping]) -> dict[int, Failure]:
    """Set the logits of tokens that grammars forbid to -inf. Returns the rows whose grammar has
    failed or leaves no token."""
    failures = {}
    for row, shaping in zip(rows, shapings, strict=True):
        history, grammar = shaping.history, shaping.history.grammar
        if grammar is None:
            continue
        ends = shaping.sampling.end_tokens
        forbidden = grammar.forbidden(history.tokens, shaping.drafts, ends)
        if forbidden is not None:
            mask = forbidden[: len(row)]
            row.masked_fill_(torch.from_numpy(mask).to(row.device), -torch.inf)
            if mask.all():
                failures[shaping.row] = Failure(NO_TOKEN_LEFT, GUIDE_FIELD)
        elif grammar.error:
            failures[shaping.row] = Failure(
                f"cannot be followed further: {grammar.error}", GUIDE_FIELD
            )
    return failures


def _add_biases(rows: torch.Tensor, shapings: Sequence[Shaping]) -> None:
    """A banned token has the bias -inf."""
    biases = [
        (row, token, bias)
        for row, shaping in enumerate(shapings)
        for token, bias in (*shaping.sampling.logit_bias, *_measured(_bans, shaping))
        if token < rows.shape[-1]
    ]
    if biases:
        index, tokens, values = (
            torch.tensor(part, device=rows.device) for part in zip(*biases, strict=True)
        )
        rows.index_put_((index, tokens), values.to(rows.dtype), accumulate=True)


def _measured(work: Callable[..., T], shaping: Shaping, *arguments: Any) -> T:
    return shaping.history.host_time.of(Cause.SHAPING, work, shaping, *arguments)


def _bans(shaping: Shaping) -> list[tuple[int, float]]:
    sampling, history = shaping.sampling, shaping.history
    banned = list(sampling.end_tokens) if shaping.bans_ends else []
    longest = max((len(word) for word in sampling.bad_words), default=1)
    before = (*history.tail(longest - 1), *shaping.drafts)
    banned += [
        last
        for *start, last in sampling.bad_words
        if before[len(before) - len(start) :] == tuple(start)
    ]
    return [(token, -torch.inf) for token in banned]


def _penalise(rows: torch.Tensor, shapings: Sequence[Shaping]) -> None:
    """Apply penalties to all known tokens of all rows, in one operation."""
    parts = [
        _measured(_penalties, shaping, row, rows.shape[-1])
        for row, shaping in enumerate(shapings)
        if shaping.sampling.counts_tokens
    ]
    if not parts:
        return
    places, factors, taken_off = (
        torch.from_numpy(np.concatenate(part)).to(rows.device) for part in zip(*parts, strict=True)
    )
    values = rows.view(-1)[places]
    values = torch.where(values > 0, values / factors, values * factors) - taken_off
    rows.view(-1).index_copy_(0, places, values)


def _penalties(shaping: Shaping, row: int, vocab_size: int) -> tuple[npt.NDArray[Any], ...]:
    """For each known token: its index in the flattened rows, the factor of its repetition, and the
    value to subtract."""
    tokens, counts = shaping.history.count_with(shaping.drafts)
    is_drawable = tokens < vocab_size
    tokens, counts = tokens[is_drawable], counts[is_drawable]
    sampling = shaping.sampling
    factors = np.full(len(tokens), sampling.repetition_penalty, np.float32)
    taken_off = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    return row * vocab_size + tokens, factors, taken_off.astype(np.float32)
