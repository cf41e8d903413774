"""A step's expected tokens and seconds, as arrays over all that can be drafted in it.

Goodput is SmartSpec's: generated tokens per second of execution (Liu et al., "Optimizing
Speculative Decoding for Serving LLMs Using Goodput", arXiv 2406.14066), without a latency target.
Symbols: a_j, the probability that draft j is accepted given that all before it were; k, the draft
length; s(j) = a_1 .. a_j, the survival: the probability that the first j drafts are all accepted;
E = 1 + s(1) + .. + s(k), the tokens that a sequence gains in a step; T, the seconds of the step.

`step_of` makes the arrays from views and a cost model; whoever chooses (`ranking`, `search`,
`policies`) knows nothing else. Arrays are not written to.
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
"""The tokens that a draft deeper than allowed brings."""

RECOVERY_TOKENS = 32
"""Tokens over which a sequence spends what it is ahead of its latency target, or makes good what it
is behind: in one step it could do neither."""

TOKENS_A_STEP = 2.0
"""What a sequence that drafts gains in a step, about: what is paid once is spread over so many
fewer steps than tokens. One a step would let requests resume that never earn it back."""

PREFILLING_TOKENS = 8.0
"""What a step is worth to a request whose prompt is read beside it, in tokens. With 8 first tokens
come at most 1.14 times as late as without speculation, with 4 up to 1.3 times, with 16 at most 1.06
times (docs/results/first_token.md). But with 16 eight requests at once, with short outputs, are
served at 0.96 of the best fixed length, with 8 at 0.98, and with 4 at 1.015 (docs/research/log)."""

MIN_STEP_S = 1e-9
"""Keeps goodput finite where a cost model says that a step costs nothing."""


@dataclass(frozen=True)
class Choice:
    """A way and a draft length for each of B sequences; ways are rows of `Step`. Both [B]."""

    ways: Ints
    lengths: Ints


@dataclass(frozen=True)
class Step:
    """What B sequences can do in a step, with R ways to draft (B where each has one).

    first_ways: [B], the row of each sequence's option 0; the others follow it. owners: [R], whose
    way it is. caps: [R], the most drafts. survivals: [R, K], s(1)..s(K), IMPOSSIBLE beyond the cap.
    gains: [R, K + 1], the tokens that 0..K drafts add, s(1) + .. + s(k), likewise. entries_s: [R],
    seconds that the first draft brings by itself: `DraftOption.draft_s`, and reading what the draft
    cache missed. The latter is paid once and serves every later step, so it is spread over the
    steps that may still come, taken to be remaining / TOKENS_A_STEP.
    has_passes: [R]. verify_s: seconds of target pass and host by the number of drafts in the step,
    from 0 to the most there can be. pass_s: seconds of a draft pass by its rows.
    batch_size: sequences of the whole step. held_tokens, held_rows: tokens, and rows in the draft
    passes 1..K, that the step has anyway, among them a token for each sequence that generates
    beside those of the views, and prefilling_tokens, which nobody gets: what the step is worth to
    requests whose prompts are read in it. limits_s: [B], seconds a generated token that a sequence
    may take from now on, infinite without a target; None where no sequence has one.
    """

    first_ways: Ints
    owners: Ints
    caps: Ints
    survivals: Floats
    gains: Floats
    entries_s: Floats
    has_passes: Bools
    verify_s: Floats
    pass_s: Floats
    batch_size: int
    held_tokens: float
    held_rows: Ints
    prefilling_tokens: float = 0.0
    limits_s: Floats | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.first_ways)

    @property
    def depth(self) -> int:
        """The most drafts of any way, K."""
        return self.survivals.shape[1]

    @cached_property
    def is_drafted(self) -> bool:
        """Whether every way takes draft passes."""
        return bool(self.has_passes.all())

    @cached_property
    def has_entries(self) -> bool:
        """Whether a first draft brings seconds by itself."""
        return bool(self.entries_s.any())

    @cached_property
    def allowed_s(self) -> Floats:
        """The longest that the step may take for a sequence to be within its latency target, by
        its way and length; shape [R, K + 1]. Only where there are targets."""
        assert self.limits_s is not None
        allowed = self.limits_s[self.owners][:, None] * (1.0 + np.maximum(self.gains, 0.0))
        return np.where(self.gains >= 0.0, allowed, IMPOSSIBLE)

    def nothing(self) -> Choice:
        """No drafts for anybody."""
        return Choice(self.first_ways, np.zeros(self.num_sequences, dtype=np.int64))

    def rows_by_pass(self, choice: Choice) -> Ints:
        """Sequences in the draft passes 1..K, shape [K]."""
        passes = choice.lengths
        if not self.is_drafted:
            passes = passes * self.has_passes[choice.ways]
        return self.held_rows + at_least(passes, self.depth)

    def tokens(self, choice: Choice) -> float:
        """E = sum over sequences of 1 + s(1) + .. + s(k)."""
        return self.held_tokens + float(self.gains[choice.ways, choice.lengths].sum())

    def seconds(self, choice: Choice) -> float:
        """T = draft passes + catch-up + target pass + host."""
        catch_up = self.entries_s[choice.ways] @ (choice.lengths > 0)
        drafting = self.pass_s[self.rows_by_pass(choice)].sum()
        return float(self.verify_s[choice.lengths.sum()] + drafting + catch_up)

    def among(self, members: Ints, held: Choice) -> Step:
        """The step of these sequences alone, with all others held as they are."""
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
            verify_s=self.verify_s[rest.lengths.sum() :] + catch_up,
            held_tokens=self.tokens(rest),
            held_rows=self.rows_by_pass(rest),
            limits_s=None if self.limits_s is None else self.limits_s[members],
        )

    def with_ways(self, ways: Ints) -> Step:
        """The step in which each sequence has this one way; ways: [B]."""
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
        )


def at_least(lengths: Ints, depth: int) -> Ints:
    """How many of the lengths are at least 1..depth, shape [depth]."""
    return np.bincount(lengths, minlength=depth + 1)[:0:-1].cumsum()[::-1]


_FIELDS = attrgetter("context_len", "remaining", "options", "slo_s_per_token")


def step_of(
    views: Sequence[SequenceView],
    cost: CostModel,
    num_background: int = 0,
    num_prefilling: int = 0,
    last_num_tokens: int | None = None,
) -> Step:
    """The arrays of these views, of which there must be one. The other arguments: see
    `PlannerSettings`."""
    batch_size = len(views)
    context_lens, remaining, options, targets = zip(*map(_FIELDS, views), strict=True)
    assert all(options), "a view without an option"
    ways = list(chain.from_iterable(options))
    first_ways = owners = np.arange(batch_size)
    if len(ways) > batch_size:
        num_ways = np.array(list(map(len, options)))
        first_ways = np.cumsum(num_ways) - num_ways
        owners = np.repeat(owners, num_ways)
    cap_list, probs, lags, has_passes, drafts_s = zip(*ways, strict=True)
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
        verify_s=np.maximum(verify_s + cost.step_host_s(in_pass), MIN_STEP_S),
        pass_s=cost.draft_pass_s,
        batch_size=batch_size,
        held_tokens=in_pass + PREFILLING_TOKENS * num_prefilling,
        held_rows=np.zeros(survivals.shape[1], dtype=np.int64),
        prefilling_tokens=PREFILLING_TOKENS * num_prefilling,
        limits_s=None if targets.count(None) == batch_size else _limits_s(views),
    )


def _charges_s(text_lens: Ints, cost: CostModel) -> Floats:
    """What its text adds to the iterations of a step by its being verified; shape of text_lens, the
    tokens of each sequence with its drafts.

    Right where all draft, which is then the sum; where some do, they are charged their share of an
    excess that they may not reach alone.
    """
    num_charged = float(text_lens.sum())
    return text_lens * (cost.extra_iterations_s(num_charged) / num_charged)


def _limits_s(views: Sequence[SequenceView]) -> Floats:
    """`Step.limits_s`: what a sequence is ahead or behind is spread over its next tokens."""
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
