"""Expected tokens and seconds of a step, as arrays over all drafts that are possible in it.

Goodput is SmartSpec's: generated tokens per second of execution (Liu et al., "Optimizing
Speculative Decoding for Serving LLMs Using Goodput", arXiv 2406.14066), without a latency target.
Symbols:

    k       the draft length
    a_j     the probability that draft j is accepted, given that all earlier drafts are accepted
    s(j)    a_1 .. a_j, the survival: the probability that the first j drafts are all accepted
    E       1 + s(1) + .. + s(k), the expected tokens of a sequence in a step
    T       the seconds of the step

`problem_of` builds the arrays from views and a cost model. `search` and `planner` use these arrays
only and do not modify them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
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

OPEN = -1
"""Stands for a draft length that is to be chosen."""

RECOVERY_TOKENS = 32
"""Number of tokens over which the slack of a sequence is spread. Slack is the time by which the
sequence is ahead of its latency target (or behind it). One step is too short to use it up."""

TOKENS_PER_STEP = 2.0
"""Typical number of tokens per step of a sequence that drafts. One-time costs are spread over the
remaining steps, which are the remaining tokens divided by this number. With 1.0, requests would
resume drafting although they never recover the cost."""

PREFILLING_TOKENS = 8.0
"""Value of a step for each request in prefill during that step, in tokens. A larger value favors
shorter steps. In simulations, first tokens take at most 1.24 times as long as without speculation
(1.37 times with 4.0, 1.13 times with 16.0); see docs/research/log.md."""

MIN_STEP_S = 1e-9
"""Shortest duration of a step, so that goodput is finite even if the cost model returns 0."""


@dataclass(frozen=True)
class Choice:
    """A drafting method and a draft length for each of B sequences.

    options: [B], rows of `PlanProblem`. lengths: [B], draft lengths.
    """

    options: Ints
    lengths: Ints


@dataclass(frozen=True)
class PlanProblem:
    """The possible drafts of B sequences in a step.

    There are R options in total; R = B if each sequence has one. K is the largest draft length of
    any option.

    first_options: [B], the row of each sequence's option 0. Its other options are in the next rows.
    sequence_of: [R], the index of the sequence that the option belongs to.
    min_lens, max_lens: [R], the limits of the draft length. They are equal, and above 0, if the
        length is given. A sequence with a given length has one option.
    survivals: [R, K], s(1)..s(K); IMPOSSIBLE beyond the maximum draft length.
    gains: [R, K + 1], the expected accepted drafts s(1) + .. + s(k) for k = 0..K; IMPOSSIBLE
        beyond the maximum draft length.
    fixed_s: [R], fixed cost of drafting at all, in seconds: `DraftOption.draft_s`, the host's work,
        and draft prefill. That is needed once and benefits all later steps.
        It is therefore divided by the estimated number of remaining steps, remaining /
        TOKENS_PER_STEP.
    late_s: [R], the seconds of this step's draft prefill that are not in fixed_s; None if there is
        none.
    has_passes: [R], whether the option runs draft passes.
    passes: [R, K + 1], the draft passes for k = 0..K: k, or the depth of a tree.
    verify_s: seconds of the target pass and the host, by the total number of drafts in the step,
        from 0 to the maximum.
    pass_s: seconds of a draft pass, by its number of rows.
    held_tokens: expected tokens that do not depend on the choice: one for each sequence, and
        PREFILLING_TOKENS for each request in prefill.
    limits_s: [B], maximum seconds per generated token from now on; infinite without a latency
        target. None if no sequence has a target.
    """

    first_options: Ints
    sequence_of: Ints
    min_lens: Ints
    max_lens: Ints
    survivals: Floats
    gains: Floats
    fixed_s: Floats
    has_passes: Bools
    passes: Ints
    verify_s: Floats
    pass_s: Floats
    held_tokens: float
    limits_s: Floats | None = None
    late_s: Floats | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.first_options)

    @property
    def has_one_option(self) -> bool:
        """Whether each sequence has one option."""
        return len(self.sequence_of) == self.num_sequences

    @property
    def depth(self) -> int:
        """K, the largest draft length of any option."""
        return self.survivals.shape[1]

    @cached_property
    def most_passes(self) -> int:
        return int(self.passes.max())

    @cached_property
    def allowed_s(self) -> Floats:
        """Longest step, in seconds, in which a sequence meets its latency target, for each option
        and draft length; shape [R, K + 1]. It requires limits_s."""
        assert self.limits_s is not None
        allowed = self.limits_s[self.sequence_of][:, None] * (1.0 + np.maximum(self.gains, 0.0))
        return np.where(self.gains >= 0.0, allowed, IMPOSSIBLE)

    def expected(self, options: Ints, lengths: Ints) -> tuple[Floats, Floats]:
        """Tokens E and seconds T of one or more plans.

        options, lengths: as in `Choice`, shape [.., B] with any leading axes. E has no floor: it is
        IMPOSSIBLE if a length is. T is draft passes + fixed costs + target pass + host.
        """
        add = np.add.reduce
        num_passes = self.passes[options, lengths]
        rows = add(num_passes[..., None, :] > np.arange(self.most_passes)[:, None], axis=-1)
        seconds = self.verify_s.take(add(lengths, axis=-1), mode="clip")
        seconds = seconds + add(self.pass_s[rows], axis=-1)
        seconds = seconds + add(self.fixed_s[options] * (lengths > 0), axis=-1)
        return self.held_tokens + add(self.gains[options, lengths], axis=-1), seconds

    def num_met(self, options: Ints, lengths: Ints, seconds: Floats) -> int:
        """Sequences that meet their latency target with this plan. seconds: of `expected`, in which
        draft prefill is spread over steps. It delays this one by `late_s`. Requires targets."""
        if self.late_s is not None:
            seconds = seconds + self.late_s[options][lengths > 0].sum()
        return int(np.count_nonzero(self.allowed_s[options, lengths] >= seconds))


_OF_VIEW = attrgetter("context_len", "remaining", "options", "slo_s_per_token")
_OF_OPTION = attrgetter(
    "max_draft_len", "accept_probs", "draft_prefill_len", "has_draft_passes", "draft_s", "depth"
)


def problem_of(
    views: Sequence[SequenceView],
    cost: CostModel,
    given: Ints | None = None,
    num_prefilling: int = 0,
    warm_shapes: Collection[int] = (),
) -> PlanProblem:
    """Build the problem of these views. At least one view is required.

    given: [B], the draft length of each sequence, before the limit of its first option; OPEN if it
        is to be chosen. None if all are.
    num_prefilling, warm_shapes: see `planner.PlannerSettings`.
    """
    batch_size = len(views)
    context_lens, remaining, each, targets = zip(*map(_OF_VIEW, views), strict=True)
    assert all(each), "a view without an option"
    if given is not None:
        pairs = zip(each, given.tolist(), strict=True)
        each = tuple([options if k == OPEN else options[:1] for options, k in pairs])
    num_options = np.array(list(map(len, each)))
    first_options = np.cumsum(num_options) - num_options
    sequence_of = np.repeat(np.arange(batch_size), num_options)
    options = zip(*map(_OF_OPTION, chain.from_iterable(each)), strict=True)
    limits, probs, prefill_lens, has_passes, drafts_s, depths = options
    min_lens, max_lens = _lengths(limits, first_options, given)
    survivals = _survivals(probs, max_lens.tolist())
    gains = np.zeros((len(max_lens), survivals.shape[1] + 1))
    np.add.accumulate(survivals, axis=1, out=gains[:, 1:])
    most = int(np.maximum.reduceat(max_lens, first_options).sum())
    num_steps = np.maximum(np.array(remaining)[sequence_of] / TOKENS_PER_STEP, 1.0)
    return PlanProblem(
        first_options=first_options,
        sequence_of=sequence_of,
        min_lens=min_lens,
        max_lens=max_lens,
        survivals=survivals,
        gains=gains,
        fixed_s=_fixed_s(cost, drafts_s, prefill_lens, num_steps),
        has_passes=np.array(has_passes),
        passes=_passes(has_passes, depths, survivals.shape[1]),
        verify_s=_verify_s(cost, batch_size, most, sum(context_lens) / batch_size, warm_shapes),
        pass_s=cost.draft_pass_s,
        held_tokens=batch_size + PREFILLING_TOKENS * num_prefilling,
        limits_s=None if targets.count(None) == batch_size else _limits_s(views),
        late_s=_late_s(cost, prefill_lens, num_steps) if any(prefill_lens) else None,
    )


def best_alone(
    view: SequenceView, cost: CostModel, num_prefilling: int = 0, warm_shapes: Collection[int] = ()
) -> tuple[int, int, float, float]:
    """The option and the draft length with the best goodput for the only sequence of a step, and
    the tokens E and seconds T of the step. It must have no latency target.

    The result is that of a `PlanProblem` and its search, which take several times as long (0.07
    instead of 0.25 ms). That matters where a pass is short.
    """
    options, held_tokens = view.options, 1.0 + PREFILLING_TOKENS * num_prefilling
    most = max([option.max_draft_len for option in options])
    verify_s = _verify_s(cost, 1, most, view.context_len, warm_shapes).tolist()
    pass_s, num_steps = cost.draft_s(1), max(view.remaining / TOKENS_PER_STEP, 1.0)
    best = 0, 0, held_tokens, verify_s[0]
    best_score = held_tokens / verify_s[0]
    for place, option in enumerate(options):
        fixed_s = option.draft_s + cost.draft_host_s
        fixed_s += cost.draft_prefill_s * option.draft_prefill_len / num_steps
        survival, tokens = 1.0, held_tokens
        for length, prob in enumerate(option.accept_probs[: option.max_draft_len], 1):
            survival *= prob
            tokens += survival
            num_passes = (option.depth or length) if option.has_draft_passes else 0
            seconds = verify_s[length] + num_passes * pass_s + fixed_s
            if tokens / seconds > best_score:
                best, best_score = (place, length, tokens, seconds), tokens / seconds
    return best


def _lengths(limits: Sequence[int], first_options: Ints, given: Ints | None) -> tuple[Ints, Ints]:
    """`PlanProblem.min_lens` and `max_lens`. limits: `DraftOption.max_draft_len` of each option."""
    max_lens, min_lens = np.array(limits), np.zeros(len(limits), dtype=np.int64)
    if given is not None:
        rows = first_options[given != OPEN]
        max_lens[rows] = min_lens[rows] = np.minimum(max_lens[rows], given[given != OPEN])
    return min_lens, max_lens


def _passes(has_passes: Sequence[bool], depths: Sequence[int], longest: int) -> Ints:
    """`PlanProblem.passes`. longest: K."""
    passes: Ints = np.array(has_passes)[:, None] * np.arange(longest + 1)
    if any(depths):
        of_trees = np.array(depths)[:, None]
        passes = np.where((of_trees > 0) & (passes > 0), of_trees, passes)
    return passes


def _verify_s(
    cost: CostModel, batch_size: int, most: int, context_len: float, warm_shapes: Collection[int]
) -> Floats:
    """`PlanProblem.verify_s` for 0 to `most` drafts. context_len: mean of the sequences."""
    num_tokens = np.arange(batch_size, batch_size + most + 1, dtype=np.float64)
    verify_s = cost.targets_s(batch_size, num_tokens, context_len)
    if cost.shape_change_s:
        charges = np.full(len(verify_s), cost.shape_change_s)
        warm = [size - batch_size for size in warm_shapes]
        charges[[drafts for drafts in warm if 0 <= drafts < len(charges)]] = 0.0
        verify_s = verify_s + charges
    return np.maximum(verify_s + cost.host_s, MIN_STEP_S)


def _fixed_s(
    cost: CostModel, drafts_s: Sequence[float], prefill_lens: Sequence[int], num_steps: Floats
) -> Floats:
    """`PlanProblem.fixed_s`. num_steps: that the sequence of each option still needs."""
    fixed_s = np.array(drafts_s) + cost.draft_host_s
    if any(prefill_lens):
        fixed_s = fixed_s + cost.draft_prefill_s * np.array(prefill_lens) / num_steps
    return fixed_s


def _late_s(cost: CostModel, prefill_lens: Sequence[int], num_steps: Floats) -> Floats:
    """`PlanProblem.late_s`."""
    chunk = cost.prompt.tokens_per_row[-1] if cost.prompt else max(prefill_lens)
    lens = np.minimum(prefill_lens, cost.max_draft_prefill_len(chunk))
    late_s: Floats = cost.draft_prefill_s * (lens - np.array(prefill_lens) / num_steps)
    return np.maximum(late_s, 0.0)


def _limits_s(views: Sequence[SequenceView]) -> Floats:
    """`PlanProblem.limits_s`. The slack of a sequence is spread over its next tokens."""
    return np.array(
        [
            view.slo_s_per_token + view.slack_s / max(1, min(view.remaining, RECOVERY_TOKENS))
            if view.slo_s_per_token is not None
            else np.inf
            for view in views
        ]
    )


def _survivals(probs: Sequence[Sequence[float] | Floats], max_lens: Sequence[int]) -> Floats:
    """`PlanProblem.survivals`, shape [R, K]."""
    survivals = np.zeros((len(max_lens), max(max_lens)))
    is_possible = np.arange(survivals.shape[1]) < np.array(max_lens)[:, None]
    known = [row[:most] for row, most in zip(probs, max_lens, strict=True)]
    survivals[is_possible] = list(chain.from_iterable(known))
    np.multiply.accumulate(survivals, axis=1, out=survivals)
    survivals[~is_possible] = IMPOSSIBLE
    return survivals
