"""Predicts the duration of a step, in seconds, by interpolation in a table measured once.

A step of B sequences with draft lengths k_i takes

    T = sum over passes p of draft_s(n_p)  +  draft prefill  +  target_s(B, B + sum k_i)
        +  host_s  +  n_1 draft_host_s

where n_p is the number of sequences with k_i >= p. Measured costs are constant for small passes
and grow for large ones, with jumps in between. Therefore no curve is fitted. The model is linear
between measured points and continues the last slope beyond them.

A few factors scale these tables. `core.learn.corrections` learns them while serving. In a profile
they have no effect.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PassTable:
    """Measured seconds of one batched pass of a model.

    rows: numbers of sequences, ascending.
    tokens_per_row: numbers of tokens per sequence, ascending.
    seconds: [len(rows)][len(tokens_per_row)], measured with `context_len` tokens of context per
        row, without `CostModel.shape_change_s`.
    context_s: additional seconds per token of context, per row.
    context_token_s: the same for each token of a row after its first. It is 0 if a pass reads the
        keys of a row once, and not if it reads them for each token.
    """

    rows: tuple[int, ...]
    tokens_per_row: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    context_len: int = 0
    context_s: float = 0.0
    context_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("tokens_per_row", self.tokens_per_row)):
            if not axis or axis[0] < 1 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"{name} must ascend from 1 or more, got {axis}")
        if [len(line) for line in self.seconds] != [len(self.tokens_per_row)] * len(self.rows):
            raise ValueError("seconds must have the shape [len(rows)][len(tokens_per_row)]")

    def pass_s(self, batch_size: int, num_tokens: float, context_len: float = -1.0) -> float:
        """Seconds of a pass with `num_tokens` tokens in total and `batch_size` sequences.

        context_len: mean context length per row, in tokens; negative: as in the measurement.
        """
        return float(self.passes_s(batch_size, np.array([num_tokens]), context_len)[0])

    def passes_s(self, batch_size: int, num_tokens: Floats, context_len: float = -1.0) -> Floats:
        """`pass_s` for several numbers of tokens, shape [n]."""
        if batch_size <= 0:
            return np.zeros(len(num_tokens))
        tokens, seconds = self._line(batch_size)
        pass_s: Floats = np.interp(num_tokens, tokens, seconds)
        if context_len >= 0:
            later_tokens = np.maximum(num_tokens - batch_size, 0)
            token_s = self.context_s * batch_size + self.context_token_s * later_tokens
            pass_s = np.maximum(pass_s + token_s * (context_len - self.context_len), 0.0)
        return pass_s

    def one_token_s(self, batch_size: int, context_len: float = -1.0) -> float:
        """`pass_s` with one token per row; faster, because the interpolation is cached."""
        if batch_size <= 0:
            return 0.0
        seconds = float(self._line(batch_size)[1][0])
        if context_len >= 0:
            seconds += self.context_s * batch_size * (context_len - self.context_len)
        return max(seconds, 0.0)

    @cached_property
    def one_token_by_rows(self) -> Floats:
        """`one_token_s` at the measured context length, by number of rows; shape [MAX_ROWS + 1].

        It allows one look-up for passes of many sizes. All cost models with other factors share it.
        """
        return np.array([self.one_token_s(rows) for rows in range(MAX_ROWS + 1)])

    def _line(self, batch_size: int) -> tuple[Floats, Floats]:
        """Points (total tokens, seconds) for this number of rows, as two arrays. The last point
        extrapolates to FAR_TOKENS times the longest measured row."""
        line = self._lines.get(batch_size)
        if line is None:
            seconds = [
                interpolate(batch_size, self.rows, [line[i] for line in self.seconds])
                for i in range(len(self.tokens_per_row))
            ]
            far = FAR_TOKENS * self.tokens_per_row[-1]
            seconds.append(interpolate(far, self.tokens_per_row, seconds))
            tokens = np.array([*self.tokens_per_row, far], dtype=np.float64) * batch_size
            line = self._lines[batch_size] = (tokens, np.array(seconds))
        return line

    @cached_property
    def _lines(self) -> dict[int, tuple[Floats, Floats]]:
        return {}


@dataclass(frozen=True)
class CostModel:
    """The cost of a step, from one table for the target and one for the draft model.

    draft: None if the cost of proposing is negligible, as with prompt lookup.
    host_s: seconds of the loop's own work in a step.
    draft_host_s: the same for each sequence with drafts.
    shape_change_s: additional seconds of a target pass if the engine must prepare for its number of
        tokens; 0 if it never does.
    draft_prefill_s: seconds per token that an outdated draft cache must process before drafting.
    prompt: passes of one row over a prompt chunk without earlier context. Only the last token of
        the chunk needs logits. If None, a prompt token costs as much as a draft to verify.

    The factors below correct the tables. T is the pass by the table, T0 that with one token per
    row:

        target = target_base * T0 + target_slope * (T - T0)

    draft_factor: multiplies passes of the draft model, but not `draft_prefill_s`.
    """

    target: PassTable
    draft: PassTable | None = None
    host_s: float = 0.0
    draft_host_s: float = 0.0
    shape_change_s: float = 0.0
    draft_prefill_s: float = 0.0
    target_base: float = 1.0
    target_slope: float = 1.0
    draft_factor: float = 1.0
    prompt: PassTable | None = None

    def target_s(self, batch_size: int, num_tokens: int, context_len: float) -> float:
        """Seconds of a target pass over `num_tokens` tokens in total."""
        if num_tokens == batch_size:  # without drafts, which each step asks for
            return max(self.target_base * self.target.one_token_s(batch_size, context_len), 0.0)
        return float(self.targets_s(batch_size, np.array([num_tokens]), context_len)[0])

    def targets_s(self, batch_size: int, num_tokens: Floats, context_len: float) -> Floats:
        """`target_s` for several numbers of tokens, shape [n]."""
        seconds = self.target.passes_s(batch_size, num_tokens, context_len)
        if batch_size <= 0:
            return seconds
        one_token_s = self.target.one_token_s(batch_size, context_len)
        fixed_s = (self.target_base - self.target_slope) * one_token_s
        return np.maximum(self.target_slope * seconds + fixed_s, 0.0)

    def draft_s(self, batch_size: int) -> float:
        """Seconds of one draft pass that drafts one token for each of `batch_size` sequences."""
        return float(self.draft_pass_s[batch_size])

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that a prompt chunk of `num_tokens` tokens adds to a target pass."""
        table = self.prompt or self.target
        alone = table.pass_s(1, max(1, num_tokens)) - table.one_token_s(1)
        return max(0.0, alone)

    def max_draft_prefill_len(self, prefill_chunk: int) -> int:
        """Tokens of draft prefill in a step: as many as take the time of a prompt chunk."""
        if self.draft_prefill_s <= 0.0:
            return sys.maxsize
        return max(prefill_chunk, int(self.prefill_s(prefill_chunk) / self.draft_prefill_s))

    @cached_property
    def draft_pass_s(self) -> Floats:
        """Seconds of a draft pass, by number of rows; shape [MAX_ROWS + 1], and entry 0 is 0."""
        if self.draft is None:
            return np.zeros(MAX_ROWS + 1)
        return self.draft.one_token_by_rows * self.draft_factor


FAR_TOKENS = 64
"""The last slope is extrapolated to this multiple of the longest measured row; no pass is
longer."""

MAX_ROWS = 1024
"""Rows of the look-up tables of draft passes. No engine here runs a larger batch."""


def interpolate(x: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    """Linear interpolation. Before the first point it returns the first value; after the last
    point it continues the last slope."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    hi = next((i for i, value in enumerate(xs) if value >= x), len(xs) - 1)
    lo = hi - 1
    slope = (ys[hi] - ys[lo]) / (xs[hi] - xs[lo])
    return ys[lo] + slope * (x - xs[lo])


def cost_from_json(raw: Mapping[str, Any]) -> CostModel:
    """The cost model in this JSON object. Raises TypeError or ValueError if it is none."""
    fields: dict[str, Any] = dict(raw)
    for name in ("target", "draft", "prompt"):
        table: Any = fields.get(name)
        if table is not None or name == "target":
            fields[name] = PassTable(**{key: tupled(value) for key, value in dict(table).items()})
    return CostModel(**fields)


def tupled(value: Any) -> Any:
    """Convert lists to tuples, including nested ones."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value
