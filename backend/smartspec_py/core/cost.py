"""What a step costs, in seconds: a table measured once, and interpolation between its points.

A step of B sequences that drafts k_i tokens for sequence i takes

    T = sum over passes p of draft_s(n_p)  +  catch-up  +  target_s(B, B + sum k_i)  +  host_s(B)

where n_p is the number of sequences with k_i >= p. Costs on real machines are flat, then a slope,
and jagged in between, so nothing is fitted: between measured points the model is linear, outside
them it goes on with the last slope.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PassTable:
    """Measured seconds of one batched pass of a model.

    rows: numbers of sequences, ascending. tokens_per_row: tokens a sequence, ascending.
    seconds: [len(rows)][len(tokens_per_row)], measured with `context_len` tokens a row.
    context_s: additional seconds for each token of context of each row.
    """

    rows: tuple[int, ...]
    tokens_per_row: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    context_len: int = 0
    context_s: float = 0.0

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("tokens_per_row", self.tokens_per_row)):
            if not axis or axis[0] < 1 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"{name} must ascend from at least 1, got {axis}")
        if [len(line) for line in self.seconds] != [len(self.tokens_per_row)] * len(self.rows):
            raise ValueError("seconds must have one line for each of rows and one column a token")

    def pass_s(self, num_rows: int, num_tokens: float, context_len: float = -1.0) -> float:
        """Seconds of a pass of `num_tokens` tokens in all, over `num_rows` rows.

        context_len: mean tokens of context a row; negative: as measured.
        """
        return float(self.passes_s(num_rows, np.array([num_tokens]), context_len)[0])

    def passes_s(self, num_rows: int, num_tokens: Floats, context_len: float = -1.0) -> Floats:
        """`pass_s` for each of several numbers of tokens, shape [n]."""
        if num_rows <= 0:
            return np.zeros(len(num_tokens))
        tokens, seconds = self._line(num_rows)
        extra = 0.0
        if context_len >= 0:
            extra = self.context_s * num_rows * (context_len - self.context_len)
        found: Floats = np.maximum(np.interp(num_tokens, tokens, seconds) + extra, 0.0)
        return found

    def _line(self, num_rows: int) -> tuple[Floats, Floats]:
        """Seconds against tokens in all for this many rows, with a last point far out."""
        found = self._lines.get(num_rows)
        if found is None:
            seconds = [
                _interpolate(num_rows, self.rows, [line[i] for line in self.seconds])
                for i in range(len(self.tokens_per_row))
            ]
            far = FAR_TOKENS * self.tokens_per_row[-1]
            seconds.append(_interpolate(far, self.tokens_per_row, seconds))
            tokens = np.array([*self.tokens_per_row, far], dtype=np.float64) * num_rows
            found = self._lines[num_rows] = (tokens, np.array(seconds))
        return found

    @cached_property
    def _lines(self) -> dict[int, tuple[Floats, Floats]]:
        return {}


@dataclass(frozen=True)
class CostModel:
    """The cost of a step, from one table for the target and one for the draft model.

    draft: None where proposing costs nothing worth counting (prompt lookup).
    host_s, host_row_s: seconds of the loop's own work in a step, and for each sequence in it.
    catch_up_s: seconds for each token that a stale draft cache must read first.
    """

    target: PassTable
    draft: PassTable | None = None
    host_s: float = 0.0
    host_row_s: float = 0.0
    catch_up_s: float = 0.0

    def target_s(self, num_rows: int, num_tokens: int, context_len: float) -> float:
        """Seconds of a target pass that checks `num_tokens` tokens in all."""
        return self.target.pass_s(num_rows, num_tokens, context_len)

    def targets_s(self, num_rows: int, num_tokens: Floats, context_len: float) -> Floats:
        """`target_s` for each of several numbers of tokens, shape [n]."""
        return self.target.passes_s(num_rows, num_tokens, context_len)

    def draft_s(self, num_rows: int) -> float:
        """Seconds of one draft pass that adds a token to each of `num_rows` sequences."""
        return float(self.draft_pass_s[num_rows])

    def step_host_s(self, num_rows: int) -> float:
        return self.host_s + self.host_row_s * num_rows

    @cached_property
    def draft_pass_s(self) -> Floats:
        """Seconds of a draft pass by number of rows, shape [MAX_ROWS + 1]; entry 0 is 0."""
        rows = np.arange(MAX_ROWS + 1, dtype=np.float64)
        if self.draft is None:
            return np.zeros(len(rows))
        measured = [line[0] for line in self.draft.seconds]
        far = _interpolate(MAX_ROWS, self.draft.rows, measured)
        found: Floats = np.interp(rows, [0.0, *self.draft.rows, MAX_ROWS], [0.0, *measured, far])
        found[1 : self.draft.rows[0]] = measured[0]
        return found


FAR_TOKENS = 64
"""Times the longest measured row: the last slope is followed so far, and no pass is longer."""

MAX_ROWS = 1024
"""More sequences than any engine here takes at once; bounds the look-up table above."""


def _interpolate(x: float, xs: tuple[int, ...], ys: list[float] | tuple[float, ...]) -> float:
    """Linear between the points, the last slope beyond them, the first value before them."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    hi = next((i for i, value in enumerate(xs) if value >= x), len(xs) - 1)
    lo = hi - 1
    slope = (ys[hi] - ys[lo]) / (xs[hi] - xs[lo])
    return ys[lo] + slope * (x - xs[lo])
