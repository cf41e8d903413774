"""Ranks draft slots by their value and finds the best prefix of the ranking.

A slot is one draft position of one sequence. Its value is its survival s_i(j), the probability that
the draft is accepted. Survival does not increase with j. Therefore a prefix of the ranking contains
positions 1..k_i of each sequence, which are draft lengths.

For each number of draft passes, called the depth, every prefix is scored by goodput. The search
does not stop when the score decreases, because measured costs have jumps. The result is optimal if
all slots cost the same, the cost of each depth is affine in its slots, and there are at most
MAX_CUTS slots. With more slots, it first scores every n-th prefix, then each prefix near the best.

Slots have different costs if a sequence has a fixed cost, such as an outdated draft cache, or if
only some sequences run draft passes. The ranking then uses the net value. It subtracts the cost of
a row in a draft pass. A sequence's first slots are ranked together with its fixed cost, by their
mean net value.

In this module each sequence has one option.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smartspec_py.core.plan.problem import Choice, Floats, Ints, PlanProblem, at_least

MAX_CUTS = 64
"""Number of prefixes that are scored for each depth before the search is refined near the best."""


def uniform_scores(problem: PlanProblem) -> Floats:
    """Tokens per second of each uniform draft length 0..K, shape [K + 1]."""
    depth, max_lens = problem.depth, problem.max_lens
    num_drafts = np.append(0, at_least(max_lens, depth).cumsum())
    rows = problem.held_rows + at_least(max_lens * problem.has_passes, depth)
    held_s = problem.pass_s[problem.held_rows]
    seconds = problem.verify_s[num_drafts] + held_s.sum()
    seconds[1:] += (problem.pass_s[rows] - held_s).cumsum() + problem.fixed_s @ (max_lens > 0)
    gains = np.maximum(problem.survivals, 0.0).sum(axis=0).cumsum()
    scores: Floats = (problem.held_tokens + np.append(0.0, gains)) / seconds
    return scores


@dataclass(frozen=True)
class _Ranking:
    """Slots, best first; arrays of shape [n].

    sequences: index of the sequence. passes: the draft pass that produces the slot; 0 if none.
    tokens: survivals. fixed_s: fixed costs of the first slots; None if there are none.
    """

    sequences: Ints
    passes: Ints
    tokens: Floats
    fixed_s: Floats | None


def best_prefix(problem: PlanProblem) -> tuple[Choice, float]:
    """The best prefix of the ranking at the best depth, and its score in tokens per second."""
    slots = _ranking(problem)
    num_slots = len(slots.tokens)
    if not num_slots:
        nothing = problem.nothing()
        return nothing, problem.held_tokens / problem.seconds(nothing)
    stride = -(-num_slots // MAX_CUTS)
    depth, cut, score = _best_cut(problem, slots, range(0, num_slots + stride, stride))
    if stride > 1:
        near = range(max(0, cut - stride), min(num_slots, cut + stride) + 1)
        depth, cut, score = _best_cut(problem, slots, near)
    taken = slots.sequences[:cut][slots.passes[:cut] <= depth]
    return Choice(problem.first_options, np.bincount(taken, minlength=problem.num_sequences)), score


def _ranking(problem: PlanProblem) -> _Ranking:
    worth = _net_worth(problem)
    # Flattened by position, then sequence. The stable sort keeps this order among equal values, and
    # it is faster on input in this order.
    slots = (-worth.T).ravel().argsort(kind="stable")[: int(problem.max_lens.sum())]
    positions = slots // problem.num_sequences
    sequences = slots - positions * problem.num_sequences
    passes = (positions + 1) * problem.has_passes[sequences]
    fixed_s = None
    if problem.fixed_s.any():
        fixed_s = problem.fixed_s[sequences] * (positions == 0)
    return _Ranking(sequences, passes, problem.survivals[sequences, positions], fixed_s)


def _net_worth(problem: PlanProblem) -> Floats:
    """Net values that slots are ranked by, shape [B, K]. They do not increase along a row."""
    worth = problem.survivals
    num_drafted = int(np.count_nonzero(problem.has_passes))
    is_mixed, has_fixed = 0 < num_drafted < problem.num_sequences, problem.fixed_s.any()
    if not (is_mixed or has_fixed):
        return worth
    price = float(uniform_scores(problem).max())
    if is_mixed:
        row_s = float(problem.pass_s[num_drafted] - problem.pass_s[1]) / max(1, num_drafted - 1)
        worth = worth - price * row_s * problem.has_passes[:, None]
    if not has_fixed:
        return worth
    means = worth.cumsum(axis=1) - price * problem.fixed_s[:, None]
    means /= np.arange(1, problem.depth + 1)
    last = means.argmax(axis=1)[:, None]
    return np.where(np.arange(problem.depth) <= last, means.max(axis=1)[:, None], worth)


def _best_cut(problem: PlanProblem, slots: _Ranking, cuts: range) -> tuple[int, int, float]:
    """Depth, number of slots and score of the best of these cuts. A cut is a prefix length.

    A candidate of depth d contains the slots before the cut that are in draft passes 0..d. For
    speed, slots are first counted by (pass, stride), shape [K + 1, cuts], and then summed.
    """
    num_slots, shape = min(len(slots.tokens), cuts[-1]), (problem.depth + 1, len(cuts))
    cells = (np.arange(num_slots) - (cuts.start - cuts.step)) // cuts.step
    if cuts.start:
        np.maximum(cells, 0, out=cells)
    cells += slots.passes[:num_slots] * len(cuts)

    def summed(weights: Floats | None) -> Floats:
        by_cell = np.bincount(cells, weights, shape[0] * shape[1])
        return np.add.accumulate(by_cell.reshape(shape), axis=1)

    counts = summed(None)
    held_s = problem.pass_s[problem.held_rows]
    seconds = np.zeros(shape)
    seconds[1:] = problem.pass_s[problem.held_rows[:, None] + counts[1:]] - held_s[:, None]
    if slots.fixed_s is not None:
        seconds += summed(slots.fixed_s[:num_slots])
    seconds = np.add.accumulate(seconds, axis=0)
    seconds += problem.verify_s[np.add.accumulate(counts, axis=0)]
    seconds += held_s.sum()
    tokens = np.add.accumulate(summed(slots.tokens[:num_slots]), axis=0)
    tokens += problem.held_tokens
    scores = tokens / seconds
    depth, cut = divmod(int(scores.argmax()), len(cuts))
    return depth, min(num_slots, cuts[cut]), float(scores[depth, cut])
