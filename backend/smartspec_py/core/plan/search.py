"""Searches for individual draft lengths: one per sequence.

A slot is one draft position of one sequence. Its value is its survival s_i(j), the probability that
the draft is accepted. Survival does not increase with j. Therefore a prefix of all slots, ranked by
value, contains positions 1..k_i of each sequence, which are draft lengths.

For each number of draft passes, called the depth, every prefix is scored by goodput. The search
does not stop when the score decreases, because measured costs have jumps. The result is optimal if
all slots cost the same, and the cost of each depth is affine in its slots.

A node of a tree is a slot as well. All nodes of a tree need as many draft passes as its depth, and
each depth is an option of its own.

If a sequence has a fixed cost, such as an outdated draft cache, its first slots are ranked together
with this cost, by their mean net value.

If sequences have several options, the plan is the best for a few selections of options. If it
misses latency targets, the search also tries plans that may meet more of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import numpy as np

from smartspec_py.core.plan.problem import (
    IMPOSSIBLE,
    Bools,
    Choice,
    Floats,
    Ints,
    PlanProblem,
)

NUM_LENGTHS = 8
"""Limits of the draft length that are tried if latency targets are missed, beside the largest."""

NUM_TIMES = 6
"""Largest number of step durations that are tried if latency targets are missed."""

NUM_DEPTHS = 2
"""Numbers of draft passes for which options are selected: the best ones at average costs. On 4,000
random steps of 2 to 32 sequences with up to two options, plans have 0.9998 of the goodput of the
best that any selection tried gave, at worst 0.972; 0.999 and 0.88 with one number."""


def best_of_each(problem: PlanProblem) -> Choice:
    """Choose a drafting method and a draft length for each sequence.

    A sequence meets its latency target if the seconds of the step, divided by the sequence's
    expected tokens in the step, are at most `PlanProblem.limits_s`. The search prefers the plan
    that meets the most targets, and among those the plan with the best goodput. A target that no
    plan can meet has no effect. A target is given up if that lets more of the others be met.
    """
    if not problem.depth:
        return Choice(problem.first_options, problem.min_lens[problem.first_options])
    fastest = max(_of_selections(problem), key=itemgetter(1))[0]
    if problem.limits_s is None or _score(problem, fastest)[0] == problem.num_sequences:
        return fastest
    return max([fastest, *_meeting_targets(problem, fastest)], key=partial(_score, problem))


def best_for_all(problem: PlanProblem) -> Choice:
    """The same draft length for all sequences, with the first option of each."""
    lengths, scores = uniform_scores(problem)
    return Choice(problem.first_options, lengths[scores.argmax()])


def uniform_scores(problem: PlanProblem) -> tuple[Ints, Floats]:
    """Lengths [K + 1, B] and tokens per second [K + 1] of each uniform draft length 0..K, with the
    first option of each sequence and within its limits."""
    options, same = problem.first_options, np.arange(problem.depth + 1)[:, None]
    lengths = np.minimum(np.maximum(same, problem.min_lens[options]), problem.max_lens[options])
    tokens, seconds = problem.expected(options, lengths)
    return lengths, tokens / seconds


def _score(problem: PlanProblem, choice: Choice) -> tuple[int, float]:
    """Sequences that meet their latency target, and tokens per second. Requires targets."""
    tokens, seconds = problem.expected(choice.options, choice.lengths)
    num_met = problem.num_met(choice.options, choice.lengths, seconds)
    return num_met, float(tokens / seconds)


def _of_selections(problem: PlanProblem) -> Iterator[tuple[Choice, float]]:
    """The best uniform choice and the best one for each of a few selections of options, with their
    tokens per second."""
    tried = set[bytes]()
    lengths, scores = uniform_scores(problem)
    best = int(scores.argmax())
    price = float(scores[best])
    yield Choice(problem.first_options, lengths[best]), price
    for options in _selections(problem, price):
        if (key := options.tobytes()) not in tried:
            tried.add(key)
            lengths, score = _best_lengths(problem, options, price)
            yield Choice(options, lengths), score


def _selections(problem: PlanProblem, price: float) -> Iterator[Ints]:
    """Selections of one option per sequence, each of shape [B]. price: tokens that a second is
    worth, by the best uniform plan.

    For each number of draft passes, the options are those that are best at average costs with at
    most so many. The selections are those of the best numbers. A row more in a pass counts as free.
    """
    if problem.has_one_option:
        yield problem.first_options
        return
    verify_s, passes = problem.verify_s, problem.passes
    draft_s = (verify_s[-1] - verify_s[0]) / max(1, len(verify_s) - 1)
    worth = problem.gains - price * draft_s * np.arange(problem.depth + 1)
    worth[:, 1:] -= price * problem.fixed_s[:, None]
    depths = np.flatnonzero(np.bincount(passes.ravel()))
    is_deeper = passes > depths[:, None, None]
    best = np.where(is_deeper, IMPOSSIBLE, worth).max(axis=2)
    totals = np.maximum.reduceat(best, problem.first_options, axis=1).sum(axis=1)
    totals -= price * problem.pass_s[problem.num_sequences] * depths
    last = np.append(problem.first_options[1:], len(problem.sequence_of)) - 1
    for depth in totals.argsort()[-NUM_DEPTHS:]:
        yield np.lexsort((best[depth], problem.sequence_of))[last]


def _best_lengths(problem: PlanProblem, options: Ints, price: float) -> tuple[Ints, float]:
    """Draft lengths [B] of the best prefix of the ranking at the best depth, and their tokens per
    second. options: of each sequence, [B]. price: see `_selections`.

    Example: the survivals are 0.8, 0.4 in sequence a and 0.6, 0.3 in b. The target pass takes 1.1 s
    and 0.1 s for each draft, a draft pass 0.1 s. The ranking is a1, b1, a2, b2. With one draft
    pass, the prefixes a1 and a1 b1 score 2.8 / 1.3 = 2.15 and 3.4 / 1.4 = 2.43 tokens per second;
    a2 and b2 need a second pass. With two, a1 b1 a2 scores 3.8 / 1.6 = 2.38, and all four score
    4.1 / 1.7 = 2.41. So both draft one token.
    """
    min_lens, fixed_s = problem.min_lens[options], problem.fixed_s[options]
    survivals, passes = problem.survivals[options], problem.passes[options]
    has_fixed, has_given = fixed_s.any(), min_lens.any()
    # Flattened by position, then sequence. The stable sort keeps this order among equal values, and
    # it is faster on input in this order.
    worth = _net_worth(survivals, fixed_s, price) if has_fixed else survivals
    if has_given:
        worth = np.where(np.arange(problem.depth) < min_lens[:, None], np.inf, worth)
    num_slots = int(problem.max_lens[options].sum())
    slots = (-worth.T).ravel().argsort(kind="stable")[:num_slots]
    positions, sequences = np.divmod(slots, len(options))
    # The draft passes that a slot needs, and those of the position before it. Nodes of a tree need
    # the same number.
    levels, before = passes[sequences, positions + 1], passes[sequences, positions]
    depths = np.flatnonzero(np.bincount(np.append(levels, 0)))
    column = depths[:, None]
    is_kept = levels <= column

    # [i, n] is about the first n slots of the ranking, without those of levels above depths[i].
    def summed(values: Ints | Floats | Bools) -> Floats:
        table = np.zeros((len(depths), num_slots + 1))
        np.add.accumulate(values, axis=1, out=table[:, 1:])
        return table

    counts = summed(is_kept).astype(np.int64)
    seconds = problem.verify_s[counts]
    if len(depths) > 1:
        # The rows of the passes up to depths[i]. The first node of a tree brings a row to all its
        # passes. Depths that leave the tree out count these rows, too: another selection of options
        # has the plan without it.
        rows = summed((before < column) & (column <= levels)).astype(np.int64)
        passes_s = np.diff(depths)[:, None] * problem.pass_s[rows[1:]]
        seconds[1:] += np.add.accumulate(passes_s, axis=0)
    if has_fixed:
        seconds += summed(is_kept * (fixed_s[sequences] * (positions == 0)))
    tokens = summed(is_kept * survivals[sequences, positions])
    scores = (tokens + problem.held_tokens) / seconds
    if has_given:
        # Given draft lengths come first in the ranking, and their passes run.
        scores[:, : int(min_lens.sum())] = IMPOSSIBLE
        scores[depths < (min_lens * problem.has_passes[options]).max()] = IMPOSSIBLE
    best, cut = divmod(int(scores.argmax()), num_slots + 1)
    lengths = np.bincount(sequences[:cut][is_kept[best, :cut]], minlength=len(options))
    return lengths, float(scores[best, cut])


def _net_worth(survivals: Floats, fixed_s: Floats, price: float) -> Floats:
    """Values that slots are ranked by, shape [B, K]. They do not increase along a row."""
    numbers = np.arange(1, survivals.shape[1] + 1)
    means = (survivals.cumsum(axis=1) - price * fixed_s[:, None]) / numbers
    last = means.argmax(axis=1)[:, None]
    return np.where(numbers <= last + 1, means.max(axis=1)[:, None], survivals)


def _meeting_targets(problem: PlanProblem, fastest: Choice) -> Iterator[Choice]:
    """Plans that may meet more latency targets than the fastest.

    For a given duration of the step, each sequence needs a minimum draft length to meet its target.
    A candidate is the fastest plan with draft lengths limited to some maximum and then raised to
    the minimum for some duration. In the tests, 599 of 600 steps meet as many targets as the best
    possible plan. Their goodput is 0.3 % lower on average.
    """
    first, fewest = problem.first_options, problem.min_lens[problem.first_options]
    yield Choice(first, fewest)
    for allowed_s in _step_times(problem):
        options, lengths = _least_drafts(problem, allowed_s)
        for most in {*range(min(NUM_LENGTHS, problem.depth)), problem.depth}:
            shorter = np.maximum(np.minimum(fastest.lengths, most), fewest)
            is_more = lengths > shorter
            chosen = np.where(is_more, options, fastest.options)
            yield Choice(chosen, np.where(is_more, lengths, shorter))


def _step_times(problem: PlanProblem) -> list[float]:
    """Up to NUM_TIMES durations of the step, in seconds, at which some target is just met."""
    times = problem.allowed_s
    times = np.unique(times[np.isfinite(times) & (times > problem.verify_s[0])])
    picked = np.linspace(0, len(times) - 1, min(len(times), NUM_TIMES)).round().astype(np.int64)
    return [float(t) for t in times[picked]]


def _least_drafts(problem: PlanProblem, seconds: float) -> tuple[Ints, Ints]:
    """The minimum draft length with which each sequence meets its target, and the option.

    seconds: the assumed duration of the step. Returns two arrays of shape [B], options and lengths.
    The length is 0 if a sequence has no target or cannot meet it.
    """
    is_met = problem.allowed_s >= seconds
    lengths = np.where(is_met.any(axis=1), is_met.argmax(axis=1), problem.depth + 1)
    order = np.lexsort((lengths, problem.sequence_of))[problem.first_options]
    return order, np.where(lengths[order] > problem.depth, 0, lengths[order])
