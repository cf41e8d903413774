"""What a step costs, in seconds: a table measured once, and interpolation between its points.

A step of B sequences that drafts k_i tokens for sequence i takes

    T = sum over passes p of draft_s(n_p)  +  catch-up  +  target_s(B, B + sum k_i)  +  host_s(B)

where n_p is the number of sequences with k_i >= p. Costs on real machines are flat, then a slope,
and jagged in between, so nothing is fitted: between measured points the model is linear, outside
them it goes on with the last slope.

What serving shows to have changed since the profile was taken is a handful of factors on these
tables (`core.learn.corrections` learns them); all of them are neutral in a profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PassTable:
    """Measured seconds of one batched pass of a model.

    rows: numbers of sequences, ascending. tokens_per_row: tokens a sequence, ascending.
    seconds: [len(rows)][len(tokens_per_row)], measured with `context_len` tokens a row, where the
    pass before had as many tokens.
    context_s: additional seconds for each token of context of each row.
    change_s: [len(rows)], additional seconds where the pass before had another number of tokens;
    empty where that makes no difference.
    """

    rows: tuple[int, ...]
    tokens_per_row: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    context_len: int = 0
    context_s: float = 0.0
    change_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("tokens_per_row", self.tokens_per_row)):
            if not axis or axis[0] < 1 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"{name} must ascend from at least 1, got {axis}")
        if [len(line) for line in self.seconds] != [len(self.tokens_per_row)] * len(self.rows):
            raise ValueError("seconds must have one line for each of rows and one column a token")
        if len(self.change_s) not in (0, len(self.rows)):
            raise ValueError("change_s must have one entry for each of rows, or none")

    def pass_s(self, batch_size: int, num_tokens: float, context_len: float = -1.0) -> float:
        """Seconds of a pass of `num_tokens` tokens in all, over `batch_size` sequences.

        context_len: mean tokens of context a row; negative: as measured.
        """
        return float(self.passes_s(batch_size, np.array([num_tokens]), context_len)[0])

    def passes_s(self, batch_size: int, num_tokens: Floats, context_len: float = -1.0) -> Floats:
        """`pass_s` for each of several numbers of tokens, shape [n]."""
        if batch_size <= 0:
            return np.zeros(len(num_tokens))
        tokens, seconds = self._line(batch_size)
        extra = 0.0
        if context_len >= 0:
            extra = self.context_s * batch_size * (context_len - self.context_len)
        found: Floats = np.maximum(np.interp(num_tokens, tokens, seconds) + extra, 0.0)
        return found

    def one_token_s(self, batch_size: int, context_len: float = -1.0) -> float:
        """`pass_s` with one token a row, from a cache."""
        if batch_size <= 0:
            return 0.0
        seconds = float(self._line(batch_size)[1][0])
        if context_len >= 0:
            seconds += self.context_s * batch_size * (context_len - self.context_len)
        return max(seconds, 0.0)

    @cached_property
    def one_token_by_rows(self) -> Floats:
        """`one_token_s` at the measured context by number of rows, shape [MAX_ROWS + 1].

        A table, so that passes of many sizes are one look-up. It belongs to the measurement and is
        shared by every corrected cost model over it.
        """
        measured = [line[0] for line in self.seconds]
        far = _interpolate(MAX_ROWS, self.rows, measured)
        rows = np.arange(MAX_ROWS + 1, dtype=np.float64)
        found: Floats = np.interp(rows, [0.0, *self.rows, MAX_ROWS], [0.0, *measured, far])
        found[1 : self.rows[0]] = measured[0]
        return found

    def _line(self, batch_size: int) -> tuple[Floats, Floats]:
        """Seconds against tokens in all for this many rows, with a last point far out."""
        found = self._lines.get(batch_size)
        if found is None:
            seconds = [
                _interpolate(batch_size, self.rows, [line[i] for line in self.seconds])
                for i in range(len(self.tokens_per_row))
            ]
            far = FAR_TOKENS * self.tokens_per_row[-1]
            seconds.append(_interpolate(far, self.tokens_per_row, seconds))
            tokens = np.array([*self.tokens_per_row, far], dtype=np.float64) * batch_size
            found = self._lines[batch_size] = (tokens, np.array(seconds))
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
    prompt: passes of one row that read so many tokens of a prompt, without context, of which only
    the last asks for logits. None where they were not measured: a prompt's tokens are then taken to
    cost what drafts to be checked do.

    The rest says how passes differ from the tables; with T0 the pass of one token a row,

        target = target_base * T0 + target_slope * (T - T0) + target_extra_s

    draft_factor: on passes of the draft model (`catch_up_s` is taken as it is). prefill_factor: on
    what a prompt chunk adds to a pass.
    max_charged_tokens: where the engine's scheduler counts the whole text of a sequence whose
    drafts are verified, cached or not, the tokens that it lets into one iteration; see
    `extra_iterations_s`. 0 where what is cached is not counted.
    """

    target: PassTable
    draft: PassTable | None = None
    host_s: float = 0.0
    host_row_s: float = 0.0
    catch_up_s: float = 0.0
    target_base: float = 1.0
    target_slope: float = 1.0
    target_extra_s: float = 0.0
    draft_factor: float = 1.0
    prefill_factor: float = 1.0
    prompt: PassTable | None = None
    max_charged_tokens: int = 0

    @property
    def of_profile(self) -> CostModel:
        """The tables as they were measured, without what serving has shown of them."""
        return replace(
            self,
            target_base=1.0,
            target_slope=1.0,
            target_extra_s=0.0,
            draft_factor=1.0,
            prefill_factor=1.0,
        )

    def target_s(self, batch_size: int, num_tokens: int, context_len: float) -> float:
        """Seconds of a target pass that checks `num_tokens` tokens in all."""
        return float(self.targets_s(batch_size, np.array([num_tokens]), context_len)[0])

    def targets_s(self, batch_size: int, num_tokens: Floats, context_len: float) -> Floats:
        """`target_s` for each of several numbers of tokens, in their shape."""
        seconds = self.target.passes_s(batch_size, num_tokens, context_len)
        if batch_size <= 0 or self._has_target_of_profile:
            return seconds
        one_token_s = self.target.one_token_s(batch_size, context_len)
        fixed_s = (self.target_base - self.target_slope) * one_token_s + self.target_extra_s
        return np.maximum(self.target_slope * seconds + fixed_s, 0.0)

    def change_s(self, batch_size: int) -> float:
        """Additional seconds of a target pass that has another number of tokens than the pass
        before it: the engine must prepare for it."""
        if not self.target.change_s or batch_size <= 0:
            return 0.0
        return self.target_base * float(
            np.interp(batch_size, self.target.rows, self.target.change_s)
        )

    def draft_s(self, batch_size: int) -> float:
        """Seconds of one draft pass that adds a token to each of `batch_size` sequences."""
        return float(self.draft_pass_s[batch_size])

    def step_host_s(self, batch_size: int) -> float:
        return self.host_s + self.host_row_s * batch_size

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that a prompt chunk of so many tokens adds to a pass that runs anyway."""
        table = self.prompt or self.target
        alone = table.pass_s(1, max(1, num_tokens)) - table.one_token_s(1)
        return self.prefill_factor * max(0.0, alone)

    def extra_iterations_s(self, num_charged_tokens: float) -> float:
        """Seconds of the iterations after the first that a step takes which verifies texts of so
        many tokens in all, drafts included. Not rounded up: one that is not full is shared with
        what else runs, and its tokens are in `target_s` already."""
        if not self.max_charged_tokens:
            return 0.0
        num_extra = max(0.0, num_charged_tokens / self.max_charged_tokens - 1.0)
        return num_extra * (self.target_base * self.target.one_token_s(1) + self.target_extra_s)

    @cached_property
    def draft_pass_s(self) -> Floats:
        """Seconds of a draft pass by number of rows, shape [MAX_ROWS + 1]; entry 0 is 0."""
        if self.draft is None:
            return np.zeros(MAX_ROWS + 1)
        return self.draft.one_token_by_rows * self.draft_factor

    @property
    def _has_target_of_profile(self) -> bool:
        return self.target_base == 1.0 == self.target_slope and self.target_extra_s == 0.0


FAR_TOKENS = 64
"""Times the longest measured row: the last slope is followed so far, and no pass is longer."""

MAX_ROWS = 1024
"""More sequences than any engine here takes at once; bounds the look-up tables above."""


def _interpolate(x: float, xs: tuple[int, ...], ys: list[float] | tuple[float, ...]) -> float:
    """Linear between the points, the last slope beyond them, the first value before them."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    hi = next((i for i, value in enumerate(xs) if value >= x), len(xs) - 1)
    lo = hi - 1
    slope = (ys[hi] - ys[lo]) / (xs[hi] - xs[lo])
    return ys[lo] + slope * (x - xs[lo])
