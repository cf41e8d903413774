"""Decides how many tokens to draft for every sequence of a step.

`plan` is a pure function of the views and the cost model: the same inputs give the same plan.
A policy is a name: `none`, `fixed:K` or `goodput`. Sequences under `none` and `fixed:K` are set
first; the sequences under `goodput` then share what they cost together with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from smartspec_py.core.cost import CostModel
from smartspec_py.core.goodput import expected_tokens, survival
from smartspec_py.core.types import SequenceView, SpecPlan

MAX_FIXED_DRAFT_LEN = 64
"""The largest K of `fixed:K`; an engine's own limit is usually far smaller."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

IMPOSSIBLE = -1.0
"""In place of a survival, where the sequence may not draft so deep."""

MIN_STEP_S = 1e-9
"""Keeps goodput finite where a cost model says that a step costs nothing."""


@lru_cache(maxsize=256)
def parse_policy(name: str) -> int | None:
    """The fixed draft length that a policy's name asks for; None for `goodput`.

    Raises ValueError, whose message is what is allowed, for any other name.
    """
    if name == "goodput":
        return None
    if name == "none":
        return 0
    kind, _, length = name.partition(":")
    if kind == "fixed" and length.isascii() and length.isdigit():
        draft_len = int(length)
        if 1 <= draft_len <= MAX_FIXED_DRAFT_LEN:
            return draft_len
    raise ValueError(f"none, fixed:K with K in 1..{MAX_FIXED_DRAFT_LEN}, or goodput")


def plan(views: Sequence[SequenceView], cost: CostModel) -> SpecPlan:
    """Choose a draft length for each view, and say what the step should bring."""
    asked = [parse_policy(view.policy) for view in views]
    lengths = [min(k or 0, view.max_draft_len) for k, view in zip(asked, views, strict=True)]
    free = [i for i, k in enumerate(asked) if k is None and views[i].max_draft_len > 0]
    if free and len(views) == 1:
        lengths = [_best_alone(views[0], cost)]
    elif free:
        lengths = _best_of_both_kinds(views, lengths, free, cost)
    return evaluate(views, lengths, cost)


def _best_of_both_kinds(
    views: Sequence[SequenceView], lengths: list[int], free: Sequence[int], cost: CostModel
) -> list[int]:
    """Slots that take draft passes and slots that take none cannot be ranked together, so each kind
    is set with the other held; the first kind twice, since the second may have changed its bar."""
    looked_up = [i for i in free if not views[i].has_draft_passes]
    drafted = [i for i in free if views[i].has_draft_passes]
    rounds = [looked_up, drafted, looked_up] if looked_up and drafted else [free]
    for kind in rounds:
        held = [0 if i in kind else length for i, length in enumerate(lengths)]
        lengths = _best_lengths(views, held, kind, cost)
    return lengths


def evaluate(views: Sequence[SequenceView], draft_lens: Sequence[int], cost: CostModel) -> SpecPlan:
    """The plan with these draft lengths: its expected tokens and its seconds."""
    if not views:
        return SpecPlan()
    pairs = list(zip(views, draft_lens, strict=True))
    tokens = sum(expected_tokens(view.accept_probs, length) for view, length in pairs)
    return SpecPlan(
        draft_lens={view.sequence: length for view, length in pairs},
        expected_tokens=tokens,
        expected_s=_step_s(views, draft_lens, cost),
    )


def _step_s(views: Sequence[SequenceView], draft_lens: Sequence[int], cost: CostModel) -> float:
    num_rows = len(views)
    drafted = _drafted(views, draft_lens)
    passes = sum(
        cost.draft_s(sum(1 for length in drafted if length >= p))
        for p in range(1, max(drafted, default=0) + 1)
    )
    catch_up = sum(
        _catch_up_s(view, cost)
        for view, length in zip(views, draft_lens, strict=True)
        if length > 0
    )
    target = cost.target_s(num_rows, num_rows + sum(draft_lens), _mean_context(views))
    return passes + catch_up + target + cost.step_host_s(num_rows)


def _drafted(views: Sequence[SequenceView], draft_lens: Sequence[int]) -> list[int]:
    """The lengths that passes of the draft model bring about."""
    return [length for view, length in zip(views, draft_lens, strict=True) if view.has_draft_passes]


def _mean_context(views: Sequence[SequenceView]) -> float:
    return sum(view.context_len for view in views) / len(views)


def _catch_up_s(view: SequenceView, cost: CostModel) -> float:
    """Reading the missed tokens is paid once and serves every later step, so it is spread over
    the tokens that may still come. Steps are fewer than tokens, but a cost that grew with the lag
    and was not spread far enough would make "off" final."""
    return cost.catch_up_s * view.draft_lag / max(1, view.remaining)


def _best_alone(view: SequenceView, cost: CostModel) -> int:
    """`_best_lengths` for a step of one sequence, where it is worth a fifth of its time."""
    draft_lens = np.arange(view.max_draft_len + 1, dtype=np.float64)
    gained = np.cumsum(survival(view.accept_probs[: view.max_draft_len]))
    tokens = 1.0 + np.concatenate(([0.0], gained))
    seconds = cost.targets_s(1, 1.0 + draft_lens, view.context_len) + cost.step_host_s(1)
    if view.has_draft_passes:
        seconds += cost.draft_s(1) * draft_lens
    seconds[1:] += _catch_up_s(view, cost)
    return int(np.argmax(tokens / np.maximum(seconds, MIN_STEP_S)))


@dataclass(frozen=True)
class _Slots:
    """Every (sequence, position) that a draft could take, best survival first; arrays of [n].

    owners: index of the view. positions: from 1. entries: seconds that taking the slot brings by
    itself, which is the catch-up on a sequence's first slot.
    """

    survivals: Floats
    owners: Ints
    positions: Ints
    entries: Floats


def _best_lengths(
    views: Sequence[SequenceView], base: Sequence[int], free: Sequence[int], cost: CostModel
) -> list[int]:
    """For each depth, rank the slots by survival and cut where expected E/T is largest.

    Because s_i(j) does not rise with j, a prefix of the ranking holds positions 1..k_i of every
    sequence. Every prefix of every depth is scored, since measured costs are jagged. Exact where
    the cost of a depth is affine in its number of slots; a sequence's own entry cost makes it a
    heuristic. `base` holds the lengths of sequences that are not free, part of every candidate.
    The free ones are of one kind: all take draft passes, or none does.
    """
    slots = _ranked_slots(views, free, cost)
    depth = int(slots.positions.max())
    # [depth, n + 1]: the slots of one position among the first 0, 1, .. n of the ranking.
    is_at = np.zeros((depth, len(slots.positions) + 1))
    is_at[slots.positions - 1, np.arange(1, len(slots.positions) + 1)] = 1.0
    counts = np.cumsum(is_at, axis=1)
    survivals = np.cumsum(is_at[:, 1:] * slots.survivals, axis=1)
    gained = np.cumsum(np.pad(survivals, ((0, 0), (1, 0))), axis=0)
    tokens = sum(expected_tokens(v.accept_probs, k) for v, k in zip(views, base, strict=True))
    passes = counts if views[free[0]].has_draft_passes else np.zeros_like(counts)
    goodput = (tokens + gained) / _candidate_s(views, base, counts, passes, slots.entries, cost)
    best_depth, cut = np.unravel_index(int(np.argmax(goodput)), goodput.shape)
    taken = slots.owners[:cut][slots.positions[:cut] <= best_depth + 1]
    more = np.bincount(taken, minlength=len(views))
    return [length + int(extra) for length, extra in zip(base, more, strict=True)]


def _ranked_slots(views: Sequence[SequenceView], free: Sequence[int], cost: CostModel) -> _Slots:
    depth = max(views[i].max_draft_len for i in free)
    positions = np.tile(np.arange(1, depth + 1), len(free))
    owners = np.repeat(np.array(free), depth)
    entries = np.repeat([_catch_up_s(views[i], cost) for i in free], depth)
    survivals = np.full((len(free), depth), IMPOSSIBLE)
    for row, i in enumerate(free):
        length = views[i].max_draft_len
        survivals[row, :length] = survival(views[i].accept_probs[:length])
    survivals = survivals.ravel()
    order = np.argsort(-survivals, kind="stable")[: int((survivals > IMPOSSIBLE).sum())]
    return _Slots(
        survivals[order],
        owners[order],
        positions[order],
        np.where(positions == 1, entries, 0.0)[order],
    )


def _candidate_s(
    views: Sequence[SequenceView],
    base: Sequence[int],
    counts: Floats,
    passes: Floats,
    entries: Floats,
    cost: CostModel,
) -> Floats:
    """Seconds of the step for each depth and cut, shape [depth, n + 1].

    counts: [depth, n + 1], slots taken of each position at each cut; passes: those of them that the
    draft model passes over. A candidate of depth d takes the slots of positions 1..d, beside the
    drafts that `base` has at any position.
    """
    depth, num_rows = len(counts), len(views)
    drafted = _drafted(views, base)
    rows_of_base = [
        sum(1 for length in drafted if length >= p)
        for p in range(1, max(depth, max(drafted, default=0)) + 1)
    ]
    at_base = cost.draft_pass_s[rows_of_base]
    rows = passes.astype(np.int64) + np.array(rows_of_base[:depth])[:, None]
    beyond = at_base.sum() - np.cumsum(at_base[:depth])
    draft = np.cumsum(cost.draft_pass_s[rows], axis=0) + beyond[:, None]
    catch_up = np.concatenate(([0.0], np.cumsum(entries))) + sum(
        _catch_up_s(view, cost) for view, length in zip(views, base, strict=True) if length > 0
    )
    num_tokens = num_rows + sum(base) + np.cumsum(counts, axis=0)
    target = cost.targets_s(num_rows, num_tokens, _mean_context(views))
    seconds: Floats = draft + catch_up + target + cost.step_host_s(num_rows)
    return np.maximum(seconds, MIN_STEP_S)
