"""Slots ranked by what they are worth, and the best prefix of the ranking.

A slot is a (sequence, position) that a draft can take; it is worth its survival. Since s_i(j) does
not rise with j, a prefix of the slots ranked by survival holds positions 1..k_i of each sequence.
For each depth of draft passes, every prefix is scored. Nothing stops at the first drop, since
measured costs are jagged. Exact where the cost of a depth is affine in its slots and all slots cost
the same, up to MAX_CUTS slots; beyond, prefixes are scored in strides, and one by one around the
best.

Slots do not cost the same where a sequence has an entry cost (a stale draft cache), or some take
draft passes and some none. The ranking then goes by net worth: the price of a row in a draft pass
is taken off, and a sequence's first slots are bundled with its entry, ranked by their mean.

Here each sequence has one way to draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smartspec_py.core.plan.step import Choice, Floats, Ints, Step, at_least

MAX_CUTS = 64
"""Prefixes of the ranking that are scored for each depth, before a closer look at the best."""


def uniform(step: Step, draft_len: int) -> Choice:
    """One draft length for all, capped by each."""
    ways = step.first_ways
    return Choice(ways, np.minimum(step.caps[ways], draft_len))


def uniform_sums(step: Step) -> tuple[Floats, Floats]:
    """Tokens and seconds of one draft length for all, 0..K, two arrays of [K + 1]; each sequence
    has one way."""
    num_drafts = np.zeros(step.depth + 1, dtype=np.int64)
    num_slots = at_least(step.caps, step.depth)
    np.cumsum(num_slots, out=num_drafts[1:])
    num_rows = num_slots
    if not step.is_drafted:
        num_rows = at_least(step.caps * step.has_passes, step.depth)
    at_held = step.pass_s[step.held_rows]
    seconds = step.verify_s[num_drafts] + at_held.sum()
    seconds[1:] += (step.pass_s[step.held_rows + num_rows] - at_held).cumsum()
    seconds[1:] += step.entries_s @ (step.caps > 0)
    tokens = np.full(step.depth + 1, step.held_tokens)
    tokens[1:] += np.maximum(step.survivals, 0.0).sum(axis=0).cumsum()
    return tokens, seconds


def uniform_scores(step: Step) -> Floats:
    """Tokens a second of one draft length for all, 0..K, shape [K + 1]."""
    tokens, seconds = uniform_sums(step)
    scores: Floats = tokens / seconds
    return scores


@dataclass(frozen=True)
class _Ranking:
    """Slots, best first; arrays of [n].

    sequences: whose. passes: the draft pass that the slot takes part in, 0 for none. tokens:
    survivals. entries_s: None where no slot has any.
    """

    sequences: Ints
    passes: Ints
    tokens: Floats
    entries_s: Floats | None


def best_prefix(step: Step, price: float) -> tuple[Choice, float]:
    """The best cut of the best depth of the ranking, and its score; each sequence has one way.

    price: tokens that a second is worth, for the ranking.
    """
    slots = _ranking(step, price)
    num_slots = len(slots.tokens)
    if not num_slots:
        nothing = step.nothing()
        return nothing, step.held_tokens / step.seconds(nothing)
    stride = -(-num_slots // MAX_CUTS)
    depth, cut, score = _best_cut(step, slots, range(0, num_slots + stride, stride))
    if stride > 1:
        near = range(max(0, cut - stride), min(num_slots, cut + stride) + 1)
        depth, cut, score = _best_cut(step, slots, near)
    taken = slots.sequences[:cut][slots.passes[:cut] <= depth]
    return Choice(step.first_ways, np.bincount(taken, minlength=step.num_sequences)), score


def _ranking(step: Step, price: float) -> _Ranking:
    worth = _net_worth(step, price)
    # By position, then sequence: the sort keeps that order among equals, and is faster for it.
    slots = (-worth.T).ravel().argsort(kind="stable")[: int(step.caps.sum())]
    positions = slots // step.num_sequences
    sequences = slots - positions * step.num_sequences
    passes = positions + 1
    if not step.is_drafted:
        passes *= step.has_passes[sequences]
    entries = None
    if step.has_entries:
        entries = step.entries_s[sequences] * (positions == 0)
    return _Ranking(sequences, passes, step.survivals[sequences, positions], entries)


def _net_worth(step: Step, price: float) -> Floats:
    """What slots are ranked by, shape [B, K]; does not rise along a row."""
    worth = step.survivals
    num_drafted = int(np.count_nonzero(step.has_passes))
    if 0 < num_drafted < step.num_sequences:
        row_s = float(step.pass_s[num_drafted] - step.pass_s[1]) / max(1, num_drafted - 1)
        worth = worth - price * row_s * step.has_passes[:, None]
    if not step.has_entries:
        return worth
    means = worth.cumsum(axis=1) - price * step.entries_s[:, None]
    means /= np.arange(1, step.depth + 1)
    last = means.argmax(axis=1)[:, None]
    return np.where(np.arange(step.depth) <= last, means.max(axis=1)[:, None], worth)


def _best_cut(step: Step, slots: _Ranking, cuts: range) -> tuple[int, int, float]:
    """Depth, number of slots and score of the best of these cuts.

    A candidate of depth d takes the slots before the cut that are in draft passes 0..d. Nothing is
    summed slot by slot: slots are first counted by (pass, stride), shape [K + 1, cuts].
    """
    num_slots, shape = min(len(slots.tokens), cuts[-1]), (step.depth + 1, len(cuts))
    cells = (np.arange(num_slots) - (cuts.start - cuts.step)) // cuts.step
    if cuts.start:
        np.maximum(cells, 0, out=cells)
    cells += slots.passes[:num_slots] * len(cuts)

    def summed(weights: Floats | None) -> Floats:
        by_cell = np.bincount(cells, weights, shape[0] * shape[1])
        return np.add.accumulate(by_cell.reshape(shape), axis=1)

    counts = summed(None)
    at_held = step.pass_s[step.held_rows]
    seconds = np.zeros(shape)
    seconds[1:] = step.pass_s[step.held_rows[:, None] + counts[1:]] - at_held[:, None]
    if slots.entries_s is not None:
        seconds += summed(slots.entries_s[:num_slots])
    seconds = np.add.accumulate(seconds, axis=0)
    seconds += step.verify_s[np.add.accumulate(counts, axis=0)]
    seconds += at_held.sum()
    tokens = np.add.accumulate(summed(slots.tokens[:num_slots]), axis=0)
    tokens += step.held_tokens
    scores = tokens / seconds
    depth, cut = divmod(int(scores.argmax()), len(cuts))
    return depth, min(num_slots, cuts[cut]), float(scores[depth, cut])
