"""Changes of the logits that a request asks for: biases, bans and penalties.

A row of float32 logits at an absolute position is shaped in this order:

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
draws the most probable token of its unprocessed logits. The request continues without an error.

Temperature and truncation follow in `truncation.py`.

A tokenizer may have tokens beyond the row's vocabulary. They cannot be drawn, so settings that name
them have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smartspec_py.core.types import SamplingParams


class TokenHistory:
    """The tokens of one sequence, counted as they arrive; the first num_prompt are its prompt.

    Needed only if `SamplingParams.shapes_logits`.
    """

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
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

    def tail(self, num_tokens: int) -> tuple[int, ...]:
        """The last num_tokens tokens, or all if there are fewer."""
        return tuple(self._tokens[-num_tokens:]) if num_tokens > 0 else ()

    def count_with(
        self, drafts: Sequence[int], num_rows: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Tokens [m], how often each is generated [num_rows, m], and whether it is known there.

        The last row counts all drafts. Each earlier row counts one draft less than the next.
        """
        num_known = len(self._slots)
        new: dict[int, int] = {}
        for token in drafts:
            if token not in self._slots:
                new.setdefault(token, num_known + len(new))
        tokens = np.concatenate([self._distinct[:num_known], np.array(list(new), np.int64)])
        counts = np.zeros((num_rows, len(tokens)), np.int64)
        counts[:, :num_known] = self._counts[:num_known]
        for i, token in enumerate(drafts):
            slot = new[token] if token in new else self._slots[token]
            counts[max(0, num_rows - len(drafts) + i) :, slot] += 1
        is_known = counts > 0
        is_known[:, :num_known] = True
        return tokens, counts, is_known


@dataclass(frozen=True, slots=True)
class Span:
    """num_rows rows of logits of one sequence, from first_row on, at positions from `position` on.

    The last row comes after the history and all drafts. Each earlier row has one draft less.
    """

    first_row: int
    num_rows: int
    sampling: SamplingParams
    position: int
    history: TokenHistory
    drafts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num_before = len(self.history) + len(self.drafts) - (self.num_rows - 1)
        assert self.position == num_before, "the history must end right before the position"

    def drafts_before(self, row: int) -> tuple[int, ...]:
        """The drafts before this row; rows are counted from 0."""
        return self.drafts[: len(self.drafts) - (self.num_rows - 1 - row)]


class ShapedLogits:
    """The logits of a pass for drawing: shaped copies of some rows, all other rows unchanged."""

    def __init__(self, logits: torch.Tensor, spans: Sequence[Span]) -> None:
        self.raw = logits
        shaped = (row for s in spans for row in range(s.first_row, s.first_row + s.num_rows))
        self._slots = {row: slot for slot, row in enumerate(shaped)}
        self._shaped = shape_logits(logits, spans) if spans else logits[:0]

    def take(self, rows: Sequence[int]) -> torch.Tensor:
        """A copy [len(rows), vocab] of these rows."""
        device = self.raw.device
        taken = self.raw[torch.tensor(rows, device=device)]
        places = [i for i, row in enumerate(rows) if row in self._slots]
        if places:
            slots = torch.tensor([self._slots[rows[i]] for i in places], device=device)
            taken[torch.tensor(places, device=device)] = self._shaped[slots]
        return taken

    def argmax(self) -> torch.Tensor:
        """The most probable token of every row."""
        tokens = self.raw.argmax(-1)
        if self._slots:
            index = torch.tensor(list(self._slots), device=self.raw.device)
            tokens[index] = self._shaped.argmax(-1)
        return tokens


def shape_logits(logits: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """Shaped copies of the spans' rows of logits [any, vocab]: [sum of num_rows, vocab]."""
    index = [row for s in spans for row in range(s.first_row, s.first_row + s.num_rows)]
    rows = logits[torch.tensor(index, device=logits.device)]
    best = rows.argmax(-1, keepdim=True)
    _add_biases(rows, spans)
    _ban(rows, spans)
    _penalise(rows, spans)
    # The logit becomes 0, so that even logits that are all -inf give a distribution.
    is_dead = rows.amax(-1, keepdim=True) == -torch.inf
    return rows.scatter_(-1, best, rows.gather(-1, best).masked_fill_(is_dead, 0.0))


def _add_biases(rows: torch.Tensor, spans: Sequence[Span]) -> None:
    biases = [
        (row, token, bias)
        for row, (span, _) in enumerate(_rows_of(spans))
        for token, bias in span.sampling.logit_bias
        if token < rows.shape[-1]
    ]
    if biases:
        index, tokens, values = zip(*biases, strict=True)
        added = torch.tensor(values, dtype=rows.dtype, device=rows.device)
        rows.index_put_(_coordinates(rows, index, tokens), added, accumulate=True)


def _ban(rows: torch.Tensor, spans: Sequence[Span]) -> None:
    bans = [
        (row, token)
        for row, (span, row_of_span) in enumerate(_rows_of(spans))
        for token in _banned_tokens(span, row_of_span)
        if token < rows.shape[-1]
    ]
    if bans:
        index, tokens = zip(*bans, strict=True)
        nothing = torch.tensor(-torch.inf, dtype=rows.dtype, device=rows.device)
        rows.index_put_(_coordinates(rows, index, tokens), nothing)


def _banned_tokens(span: Span, row: int) -> Iterator[int]:
    sampling, drafts = span.sampling, span.drafts_before(row)
    num_generated = span.position + row - span.history.num_prompt
    if num_generated < sampling.min_tokens:
        yield from sampling.end_tokens
    longest = max((len(word) for word in sampling.bad_words), default=1)
    before = (*span.history.tail(longest - 1), *drafts)
    for *start, last in sampling.bad_words:
        if before[len(before) - len(start) :] == tuple(start):
            yield last


def _penalise(rows: torch.Tensor, spans: Sequence[Span]) -> None:
    """Apply penalties to all known tokens of all spans, in one operation."""
    parts, first_row = [], 0
    for span in spans:
        if span.sampling.counts_tokens:
            parts.append(_penalties(span, first_row, rows.shape[-1]))
        first_row += span.num_rows
    if not parts:
        return
    places, factors, taken_off = (
        torch.from_numpy(np.concatenate(part)).to(rows.device) for part in zip(*parts, strict=True)
    )
    values = rows.view(-1)[places]
    values = torch.where(values > 0, values / factors, values * factors) - taken_off
    rows.view(-1).index_copy_(0, places, values)


def _penalties(span: Span, first_row: int, vocab_size: int) -> tuple[npt.NDArray[Any], ...]:
    """Indices in the flattened rows, the repetition factor of each (1 for unknown tokens), and the
    value to subtract."""
    sampling = span.sampling
    tokens, counts, is_known = span.history.count_with(span.drafts, span.num_rows)
    is_drawable = tokens < vocab_size
    tokens, counts, is_known = tokens[is_drawable], counts[:, is_drawable], is_known[:, is_drawable]
    places = np.arange(first_row, first_row + span.num_rows)[:, None] * vocab_size + tokens
    factors = np.where(is_known, np.float32(sampling.repetition_penalty), np.float32(1.0))
    taken_off = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    return places.ravel(), factors.ravel(), taken_off.astype(np.float32).ravel()


def _rows_of(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """For each shaped row: its span, and its index in the span."""
    return ((span, row) for span in spans for row in range(span.num_rows))


def _coordinates(
    rows: torch.Tensor, index: Sequence[int], tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    device = rows.device
    return torch.tensor(index, device=device), torch.tensor(tokens, device=device)
