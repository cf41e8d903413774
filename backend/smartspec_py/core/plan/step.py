"""Expected tokens and seconds of a step, as arrays over all drafts that are possible in it.

Goodput is SmartSpec's: generated tokens per second of execution (Liu et al., "Optimizing
Speculative Decoding for Serving LLMs Using Goodput", arXiv 2406.14066), without a latency target.
Symbols:

    k       the draft length
    a_j     the probability that draft j is accepted, given that all earlier drafts are accepted
    s(j)    a_1 .. a_j, the survival: the probability that the first j drafts are all accepted
    E       1 + s(1) + .. + s(k), the expected tokens of a sequence in a step
    T       the seconds of the step

`step_of` builds the arrays from views and a cost model. `ranking`, `search` and `policies` use
these arrays only and do not modify them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.cost import CostModel
from smartspec_py.core.types import SequenceView

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

IMPOSSIBLE = -np.inf
"""Value of a draft beyond the maximum draft length, so that it is never chosen."""

RECOVERY_TOKENS = 32
"""Number of tokens over which the slack of a sequence is spread. Slack is the time by which the
sequence is ahead of its latency target (or behind it). One step is too short to use it up."""

TOKENS_A_STEP = 2.0
"""Typical number of tokens per step of a sequence that drafts. One-time costs are spread over the
remaining steps, which are the remaining tokens divided by this number. With 1.0, requests would
resume drafting although they never recover the cost."""

PREFILLING_TOKENS = 8.0
"""Value of a step for each request in prefill during that step, in tokens. A larger value favors
shorter steps. The time to first token is at most 1.14 times that without speculation (1.3 times
with 4.0, 1.06 times with 16.0; docs/results/first_token.md). With eight concurrent requests and
short outputs, goodput is 0.98 of the best fixed length (1.015 with 4.0, 0.96 with 16.0;
docs/research/log)."""

MIN_STEP_S = 1e-9
"""Shortest duration of a step, so that goodput is finite even if the cost model returns 0."""


@dataclass(frozen=True)
class Choice:
    """A drafting method and a draft length for each of B sequences.

    ways: [B], rows of `Step`. lengths: [B], draft lengths.
    """

    ways: Ints
    lengths: Ints


@dataclass(frozen=True)
class Step:
    """The possible drafts of B sequences in a step.

    A "way" is one drafting method of one sequence. There are R ways; R = B if each sequence has
    one. K is the largest draft length of any way.

    first_ways: [B], the row of each sequence's option 0. Its other options are in the next rows.
    owners: [R], the index of the sequence that the way belongs to.
    caps: [R], the maximum draft length.
    survivals: [R, K], s(1)..s(K); IMPOSSIBLE beyond the cap.
    gains: [R, K + 1], the expected accepted drafts s(1) + .. + s(k) for k = 0..K; IMPOSSIBLE
        beyond the cap.
    entries_s: [R], fixed cost of drafting at all, in seconds: `DraftOption.draft_s`, the catch-up
        of the draft cache, and the extra iterations of `CostModel.extra_iterations_s`. Catch-up is
        needed once and benefits all later steps. It is therefore divided by the estimated number of
        remaining steps, remaining / TOKENS_A_STEP.
    has_passes: [R], whether the way runs draft passes.
    passes: [R, K + 1], number of draft passes by draft length. It does not decrease along a row.
    verify_s: seconds of the target pass and the host, by the total number of drafts in the step,
        from 0 to the maximum.
    pass_s: seconds of a draft pass, by its number of rows.
    batch_size: number of sequences of the whole step.
    held_tokens: expected tokens that do not depend on the choice. They include one token for each
        sequence, also for those that generate without a view, and prefilling_tokens.
    held_rows: [K], rows of the draft passes 1..K that do not depend on the choice.
    prefilling_tokens: value of the step for requests in prefill. No request receives these tokens.
    has_trees: whether one pass may draft several drafts of a sequence.
    limits_s: [B], maximum seconds per generated token from now on; infinite without a latency
        target. None if no sequence has a target.
    """

    first_ways: Ints
    owners: Ints
    caps: Ints
    survivals: Floats
    gains: Floats
    entries_s: Floats
    has_passes: Bools
    passes: Ints
    verify_s: Floats
    pass_s: Floats
    batch_size: int
    held_tokens: float
    held_rows: Ints
    prefilling_tokens: float = 0.0
    has_trees: bool = False
    limits_s: Floats | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.first_ways)

    @property
    def depth(self) -> int:
        """K, the largest draft length of any way."""
        return self.survivals.shape[1]

    @cached_property
    def is_drafted(self) -> bool:
        """Whether all ways run draft passes."""
        return bool(self.has_passes.all())

    @cached_property
    def has_entries(self) -> bool:
        """Whether any way has a fixed cost."""
        return bool(self.entries_s.any())

    @cached_property
    def allowed_s(self) -> Floats:
        """Longest step, in seconds, in which a sequence meets its latency target, for each way and
        draft length; shape [R, K + 1]. It requires limits_s."""
        assert self.limits_s is not None
        allowed = self.limits_s[self.owners][:, None] * (1.0 + np.maximum(self.gains, 0.0))
        return np.where(self.gains >= 0.0, allowed, IMPOSSIBLE)

    def nothing(self) -> Choice:
        """Draft length 0 for all sequences."""
        return Choice(self.first_ways, np.zeros(self.num_sequences, dtype=np.int64))

    def rows_by_pass(self, choice: Choice) -> Ints:
        """Number of rows of the draft passes 1..K, shape [K]."""
        return self.held_rows + at_least(self.passes[choice.ways, choice.lengths], self.depth)

    def tokens(self, choice: Choice) -> float:
        """E = sum over sequences of 1 + s(1) + .. + s(k)."""
        return self.held_tokens + float(self.gains[choice.ways, choice.lengths].sum())

    def seconds(self, choice: Choice) -> float:
        """T = draft passes + catch-up + target pass + host."""
        catch_up = self.entries_s[choice.ways] @ (choice.lengths > 0)
        drafting = self.pass_s[self.rows_by_pass(choice)].sum()
        return float(self.verify_s[choice.lengths.sum()] + drafting + catch_up)

    def among(self, members: Ints, held: Choice) -> Step:
        """The step restricted to these sequences. All others keep their part of `held`."""
        is_member = np.zeros(self.num_sequences, dtype=bool)
        is_member[members] = True
        ways = np.flatnonzero(is_member[self.owners])
        rest = Choice(held.ways, np.where(is_member, 0, held.lengths))
        num_ways = np.bincount(self.owners)[members]
        catch_up = self.entries_s[rest.ways] @ (rest.lengths > 0)
        return replace(
            self,
            first_ways=np.cumsum(num_ways) - num_ways,
            owners=np.repeat(np.arange(len(members)), num_ways),
            caps=self.caps[ways],
            survivals=self.survivals[ways],
            gains=self.gains[ways],
            entries_s=self.entries_s[ways],
            has_passes=self.has_passes[ways],
            passes=self.passes[ways],
            verify_s=self.verify_s[rest.lengths.sum() :] + catch_up,
            held_tokens=self.tokens(rest),
            held_rows=self.rows_by_pass(rest),
            limits_s=None if self.limits_s is None else self.limits_s[members],
        )

    def with_ways(self, ways: Ints) -> Step:
        """The step in which each sequence has only the given way; ways: [B]."""
        if len(self.owners) == self.num_sequences:
            return self
        return replace(
            self,
            first_ways=np.arange(len(ways)),
            owners=np.arange(len(ways)),
            caps=self.caps[ways],
            survivals=self.survivals[ways],
            gains=self.gains[ways],
            entries_s=self.entries_s[ways],
            has_passes=self.has_passes[ways],
            passes=self.passes[ways],
        )


def at_least(lengths: Ints, depth: int) -> Ints:
    """For each j in 1..depth, the number of lengths that are at least j; shape [depth]."""
    return np.bincount(lengths, minlength=depth + 1)[:0:-1].cumsum()[::-1]


_FIELDS = attrgetter("context_len", "remaining", "options", "slo_s_per_token")


def step_of(
    views: Sequence[SequenceView],
    cost: CostModel,
    num_background: int = 0,
    num_prefilling: int = 0,
    last_num_tokens: int | None = None,
) -> Step:
    """Build the step of these views. At least one view is required.

    num_background, num_prefilling, last_num_tokens: see `PlannerSettings`.
    """
    batch_size = len(views)
    context_lens, remaining, options, targets = zip(*map(_FIELDS, views), strict=True)
    assert all(options), "a view without an option"
    ways = list(chain.from_iterable(options))
    first_ways = owners = np.arange(batch_size)
    if len(ways) > batch_size:
        num_ways = np.array(list(map(len, options)))
        first_ways = np.cumsum(num_ways) - num_ways
        owners = np.repeat(owners, num_ways)
    cap_list, probs, lags, has_passes, drafts_s, _, num_passes = zip(*ways, strict=True)
    caps = np.array(cap_list)
    most = caps if len(ways) == batch_size else np.maximum.reduceat(caps, first_ways)
    num_tokens = np.arange(batch_size, batch_size + int(most.sum()) + 1, dtype=np.float64)
    num_tokens += num_background
    in_pass = batch_size + num_background
    survivals = _survivals(probs, cap_list)
    gains = np.zeros((len(ways), survivals.shape[1] + 1))
    np.add.accumulate(survivals, axis=1, out=gains[:, 1:])
    verify_s = cost.targets_s(in_pass, num_tokens, sum(context_lens) / batch_size)
    if last_num_tokens is not None:
        verify_s = verify_s + cost.change_s(in_pass) * (num_tokens != last_num_tokens)
    entries_s = np.zeros(len(ways))
    if any(lags):
        num_steps = np.maximum(np.array(remaining) / TOKENS_A_STEP, 1.0)
        entries_s = cost.catch_up_s * np.array(lags) / num_steps[owners]
    if any(drafts_s):
        entries_s = entries_s + np.array(drafts_s)
    if cost.max_charged_tokens:
        entries_s = entries_s + _charges_s(np.array(context_lens) + most, cost)[owners]
    return Step(
        first_ways=first_ways,
        owners=owners,
        caps=caps,
        survivals=survivals,
        gains=gains,
        entries_s=entries_s,
        has_passes=np.array(has_passes),
        passes=_passes(has_passes, num_passes, survivals.shape[1]),
        verify_s=np.maximum(verify_s + cost.step_host_s(in_pass), MIN_STEP_S),
        pass_s=cost.draft_pass_s,
        batch_size=batch_size,
        held_tokens=in_pass + PREFILLING_TOKENS * num_prefilling,
        held_rows=np.zeros(survivals.shape[1], dtype=np.int64),
        prefilling_tokens=PREFILLING_TOKENS * num_prefilling,
        has_trees=any(one is not None for one in num_passes),
        limits_s=None if targets.count(None) == batch_size else _limits_s(views),
    )


def _passes(
    has_passes: Sequence[bool],
    num_passes: Sequence[Sequence[int] | Ints | None],
    depth: int,
) -> Ints:
    """`Step.passes`."""
    found = np.multiply.outer(np.array(has_passes, dtype=np.int64), np.arange(depth + 1))
    for row, own in enumerate(num_passes):
        if own is not None:
            found[row, 1 : len(own) + 1] = own
            found[row, len(own) + 1 :] = own[-1]
    return found


def _charges_s(text_lens: Ints, cost: CostModel) -> Floats:
    """Seconds of extra iterations that each sequence causes if its drafts are verified.

    text_lens: [B], context and drafts of each sequence, in tokens. The result has the same shape.
    The sum is exact if all sequences draft. If only some of them draft, it is too high: each is
    charged its share of the excess of all.
    """
    num_charged = float(text_lens.sum())
    return text_lens * (cost.extra_iterations_s(num_charged) / num_charged)


def _limits_s(views: Sequence[SequenceView]) -> Floats:
    """`Step.limits_s`. The slack of a sequence is spread over its next tokens."""
    return np.array(
        [
            view.slo_s_per_token + view.slack_s / max(1, min(view.remaining, RECOVERY_TOKENS))
            if view.slo_s_per_token is not None
            else np.inf
            for view in views
        ]
    )


def _survivals(probs: Sequence[Sequence[float] | Floats], caps: Sequence[int]) -> Floats:
    """`Step.survivals`, shape [R, K]."""
    depth = max(caps)
    if list(map(len, probs)) != list(caps):
        probs = [known[:cap] for known, cap in zip(probs, caps, strict=True)]
    flat: Floats
    if isinstance(probs[0], np.ndarray):
        flat = np.concatenate(probs)
    else:
        flat = np.fromiter(chain.from_iterable(probs), np.float64)
    if len(flat) == len(caps) * depth:
        return np.multiply.accumulate(flat.reshape(len(caps), depth), axis=1)
    is_allowed = np.arange(depth) < np.array(caps)[:, None]
    survivals = np.zeros((len(caps), depth))
    survivals[is_allowed] = flat
    np.multiply.accumulate(survivals, axis=1, out=survivals)
    survivals[~is_allowed] = IMPOSSIBLE
    return survivals
