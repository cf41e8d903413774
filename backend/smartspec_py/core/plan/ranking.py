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

In this module each sequence has one drafting method.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smartspec_py.core.plan.step import Choice, Floats, Ints, Step, at_least

MAX_CUTS = 64
"""Number of prefixes that are scored for each depth before the search is refined near the best."""


def uniform(step: Step, draft_len: int) -> Choice:
    """The same draft length for all sequences, limited by each sequence's maximum."""
    ways = step.first_ways
    return Choice(ways, np.minimum(step.caps[ways], draft_len))


def uniform_sums(step: Step) -> tuple[Floats, Floats]:
    """Expected tokens and seconds of each uniform draft length 0..K; two arrays of shape [K + 1].

    Each sequence must have one way.
    """
    num_drafts = np.zeros(step.depth + 1, dtype=np.int64)
    np.cumsum(at_least(step.caps, step.depth), out=num_drafts[1:])
    seconds = step.verify_s[num_drafts] + _passes_s(step)
    seconds[1:] += step.entries_s @ (step.caps > 0)
    tokens = np.full(step.depth + 1, step.held_tokens)
    tokens[1:] += np.maximum(step.survivals, 0.0).sum(axis=0).cumsum()
    return tokens, seconds


def _passes_s(step: Step) -> Floats:
    """Seconds of the draft passes of each uniform draft length."""
    at_held = step.pass_s[step.held_rows]
    if not step.has_trees:  # then only the last pass differs from that of one draft less
        num_rows = at_least(step.caps * step.has_passes, step.depth)
        more_s: Floats = (step.pass_s[step.held_rows + num_rows] - at_held).cumsum()
        return np.append(0.0, more_s) + float(at_held.sum())
    lengths = np.minimum(np.arange(step.depth + 1)[:, None], step.caps)
    passes = step.passes[np.arange(len(step.caps)), lengths]
    last = int(passes.max())
    num_rows = (passes[:, :, None] > np.arange(last)).sum(axis=1)
    found: Floats = step.pass_s[step.held_rows[:last] + num_rows].sum(axis=1)
    return found + float(at_held[last:].sum())


def uniform_scores(step: Step) -> Floats:
    """Tokens per second of each uniform draft length 0..K, shape [K + 1]."""
    tokens, seconds = uniform_sums(step)
    scores: Floats = tokens / seconds
    return scores


@dataclass(frozen=True)
class _Ranking:
    """Slots, best first; arrays of shape [n].

    sequences: index of the sequence. passes: the draft pass that produces the slot; 0 if none. In a
        tree, that of the deepest node up to the slot.
    rows: 1 for the first slot of a sequence in its pass, else 0; None if all are 1.
    tokens: survivals. entries_s: fixed costs of the first slots; None if there are none.
    """

    sequences: Ints
    passes: Ints
    rows: Ints | None
    tokens: Floats
    entries_s: Floats | None


def best_prefix(step: Step, price: float) -> tuple[Choice, float]:
    """The best prefix of the ranking at the best depth, and its score in tokens per second.

    Each sequence must have one way. price: value of a second, in tokens; used for the ranking.
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
    # Flattened by position, then sequence. The stable sort keeps this order among equal values, and
    # it is faster on input in this order.
    slots = (-worth.T).ravel().argsort(kind="stable")[: int(step.caps.sum())]
    positions = slots // step.num_sequences
    sequences = slots - positions * step.num_sequences
    passes = step.passes[sequences, positions + 1]
    rows = passes - step.passes[sequences, positions] if step.has_trees else None
    entries = None
    if step.has_entries:
        entries = step.entries_s[sequences] * (positions == 0)
    return _Ranking(sequences, passes, rows, step.survivals[sequences, positions], entries)


def _net_worth(step: Step, price: float) -> Floats:
    """Net values that slots are ranked by, shape [B, K]. They do not increase along a row."""
    worth = step.survivals
    num_drafted = int(np.count_nonzero(step.has_passes))
    if 0 < num_drafted < step.num_sequences:
        row_s = float(step.pass_s[num_drafted] - step.pass_s[1]) / max(1, num_drafted - 1)
        per_slot = step.passes[np.arange(len(step.caps)), step.caps] / np.maximum(step.caps, 1)
        worth = worth - price * row_s * per_slot[:, None]
    if not step.has_entries:
        return worth
    means = worth.cumsum(axis=1) - price * step.entries_s[:, None]
    means /= np.arange(1, step.depth + 1)
    last = means.argmax(axis=1)[:, None]
    return np.where(np.arange(step.depth) <= last, means.max(axis=1)[:, None], worth)


def _best_cut(step: Step, slots: _Ranking, cuts: range) -> tuple[int, int, float]:
    """Depth, number of slots and score of the best of these cuts. A cut is a prefix length.

    A candidate of depth d contains the slots before the cut that are in draft passes 0..d. For
    speed, slots are first counted by (pass, stride), shape [K + 1, cuts], and then summed.
    """
    num_slots, shape = min(len(slots.tokens), cuts[-1]), (step.depth + 1, len(cuts))
    cells = (np.arange(num_slots) - (cuts.start - cuts.step)) // cuts.step
    if cuts.start:
        np.maximum(cells, 0, out=cells)
    cells += slots.passes[:num_slots] * len(cuts)

    def summed(weights: Floats | Ints | None) -> Floats:
        by_cell = np.bincount(cells, weights, shape[0] * shape[1])
        return np.add.accumulate(by_cell.reshape(shape), axis=1)

    counts = rows = summed(None)
    if slots.rows is not None:
        rows = summed(slots.rows[:num_slots]).astype(np.int64)
    at_held = step.pass_s[step.held_rows]
    seconds = np.zeros(shape)
    seconds[1:] = step.pass_s[step.held_rows[:, None] + rows[1:]] - at_held[:, None]
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
