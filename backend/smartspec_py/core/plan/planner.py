"""Chooses the draft length of every sequence in a step.

`plan` is a pure function of the views, the cost model and the settings. The same inputs give the
same plan. The policies, by name:

| name | draft length |
|---|---|
| `none` | 0 |
| `fixed:K` | K |
| `batch_table` | the same for all sequences, by batch size (Su et al.) |
| `goodput_global` | the same for all sequences, with the best goodput (SmartSpec) |
| `goodput` | chosen per sequence, with the best goodput |

The draft length is limited by the sequence's `max_draft_len`. If prompt lookup finds no match, the
draft length is 0 under every policy. The sequences of a step may have different policies.
`goodput_global` chooses after the policies above it, and `goodput` last. Each treats earlier
choices as fixed and assumes no drafts for sequences that have no choice yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from smartspec_py.core.cost import CostModel
from smartspec_py.core.plan.problem import (
    MIN_STEP_S,
    OPEN,
    PREFILLING_TOKENS,
    Choice,
    Ints,
    PlanProblem,
    best_alone,
    problem_of,
)
from smartspec_py.core.plan.search import best_for_all, best_of_each, uniform_scores
from smartspec_py.core.types import DraftOption, SequenceId, SequenceView, SpecPlan

MAX_FIXED_DRAFT_LEN = 64
"""The largest K of `fixed:K`; an engine's own limit is usually far smaller."""

BATCH_TABLE = "batch_table"
GOODPUT = "goodput"
SEARCHES: Mapping[str, Callable[[PlanProblem], Choice]] = {
    "goodput_global": best_for_all,
    GOODPUT: best_of_each,
}
"""The policies that search for a plan, in the order in which they choose."""

COST_POLICIES = (BATCH_TABLE, *SEARCHES)
"""Policies that use the cost model."""


@dataclass(frozen=True)
class BatchTable:
    """The draft length by batch size, as in Su et al., "The Synergy of Speculative Decoding and
    Batching in Serving Large Language Models" (arXiv 2310.18813).

    rows: batch sizes, ascending, at least 1. draft_lens: one draft length per batch size, at least
    0. Raises ValueError for other values.
    """

    rows: tuple[int, ...]
    draft_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rows or self.rows[0] < 1 or any(a >= b for a, b in pairwise(self.rows)):
            raise ValueError(f"rows must ascend from 1 or more, got {self.rows}")
        if len(self.draft_lens) != len(self.rows) or min(self.draft_lens) < 0:
            raise ValueError("draft_lens must have one number, 0 or more, per entry of rows")

    def draft_len(self, batch_size: int) -> int:
        """The entry of the smallest batch size in the table that is not smaller than batch_size.

        Rounding up is safer, because drafts that are too long for a batch cost more than drafts
        that are too short. Beyond the table, the last entry is used.
        """
        return self.draft_lens[min(bisect_left(self.rows, batch_size), len(self.rows) - 1)]


@dataclass(frozen=True)
class PlannerSettings:
    """Inputs of the planner in addition to views and costs.

    batch_table: table for sequences with the policy `batch_table`.
    num_prefilling: requests in prefill during the step. They gain nothing from drafts.
    warm_shapes: the numbers of tokens that a target pass can have without preparation. Others cost
        `CostModel.shape_change_s` more.
    forced: draft lengths by sequence that replace the choice of its policy, limited by
        `max_draft_len`.
    """

    batch_table: BatchTable | None = None
    num_prefilling: int = 0
    warm_shapes: Collection[int] = ()
    forced: Mapping[SequenceId, int] = field(default_factory=dict)


DEFAULT_SETTINGS = PlannerSettings()


@lru_cache(maxsize=256)
def parse_policy(name: str) -> int | None:
    """The draft length of `none` and `fixed:K`; None for a policy that decides at each step. Raises
    ValueError for an unknown name; its message lists the valid names."""
    if name == "none":
        return 0
    if name == BATCH_TABLE or name in SEARCHES:
        return None
    kind, _, length = name.partition(":")
    is_fixed = kind == "fixed" and length.isascii() and length.isdigit()
    if is_fixed and 1 <= int(length) <= MAX_FIXED_DRAFT_LEN:
        return int(length)
    raise ValueError(
        f"none, fixed:K with K in 1..{MAX_FIXED_DRAFT_LEN}, batch_table, goodput_global, or goodput"
    )


def plan(
    views: Sequence[SequenceView],
    cost: CostModel,
    settings: PlannerSettings = DEFAULT_SETTINGS,
) -> SpecPlan:
    """Choose a draft length and a drafting method for each view.

    The plan also has the expected tokens and seconds. Raises ValueError if a policy does not exist
    or if the settings lack a value that it needs.
    """
    given = [_given_len(view, len(views), settings) for view in views]
    if not any(k and _can_draft(view) for k, view in zip(given, views, strict=True)):
        return without_drafts(views, cost, settings)
    if given == [OPEN] and views[0].policy == GOODPUT and views[0].slo_s_per_token is None:
        return _plan_alone(views[0], cost, settings)
    lengths = np.array(given)
    policies = [view.policy if k == OPEN else "" for view, k in zip(views, given, strict=True)]
    problem = choice = None
    for policy, search in SEARCHES.items():
        if policy in policies:
            mine = np.array([name == policy for name in policies])
            others = None if mine.all() else np.where(mine, OPEN, lengths.clip(0))
            problem = _problem_of(views, cost, settings, others)
            choice = search(problem)
            lengths = np.where(mine, choice.lengths, lengths)
    if problem is None or choice is None:
        problem = _problem_of(views, cost, settings, lengths)
        choice = Choice(problem.first_options, problem.min_lens)
    return _spec_plan(views, problem, choice, settings)


def _plan_alone(view: SequenceView, cost: CostModel, settings: PlannerSettings) -> SpecPlan:
    option, length, tokens, seconds = best_alone(
        view, cost, settings.num_prefilling, settings.warm_shapes
    )
    return SpecPlan(
        draft_lens={view.sequence: length},
        expected_tokens=float(tokens) - PREFILLING_TOKENS * settings.num_prefilling,
        expected_s=seconds,
        choices={view.sequence: option} if option else {},
    )


def _problem_of(
    views: Sequence[SequenceView],
    cost: CostModel,
    settings: PlannerSettings,
    given: Ints | None = None,
) -> PlanProblem:
    return problem_of(
        views,
        cost,
        given,
        num_prefilling=settings.num_prefilling,
        warm_shapes=settings.warm_shapes,
    )


def evaluate(
    views: Sequence[SequenceView],
    draft_lens: Sequence[int],
    cost: CostModel,
    choices: Mapping[SequenceId, int] | None = None,
    settings: PlannerSettings = DEFAULT_SETTINGS,
) -> SpecPlan:
    """The plan with the given draft lengths, and its expected tokens and seconds.

    choices: the option of each sequence, as in `SpecPlan.choices`.
    """
    if not views:
        return SpecPlan()
    problem = _problem_of(views, cost, settings)
    options = [(choices or {}).get(view.sequence, 0) for view in views]
    choice = Choice(problem.first_options + np.array(options), np.array(draft_lens))
    return _spec_plan(views, problem, choice, settings)


def without_drafts(
    views: Sequence[SequenceView], cost: CostModel, settings: PlannerSettings = DEFAULT_SETTINGS
) -> SpecPlan:
    """`evaluate` for no drafts, in a few microseconds: prompt lookup often has no match."""
    if not views:
        return SpecPlan()
    num_tokens = len(views)
    context_len = sum([view.context_len for view in views]) / num_tokens
    seconds = cost.target_s(num_tokens, num_tokens, context_len) + cost.host_s
    if num_tokens not in settings.warm_shapes:
        seconds += cost.shape_change_s
    draft_lens = dict.fromkeys([view.sequence for view in views], 0)
    return SpecPlan(draft_lens, float(num_tokens), max(seconds, MIN_STEP_S))


def batch_table_of(
    cost: CostModel, accept_prob: float, rows: Sequence[int], max_draft_len: int
) -> BatchTable:
    """Compute the table by grid search: for each batch size, the fastest k in 0..max_draft_len.

    accept_prob: one probability for all positions. The paper does not use measured acceptance
    either. A draft length that stays the same needs no preparation of other sizes.
    """
    cost = replace(cost, shape_change_s=0.0)
    option = DraftOption(max_draft_len, (accept_prob,) * max_draft_len)
    view = SequenceView(
        sequence=0, context_len=0, remaining=1, policy=BATCH_TABLE, options=(option,)
    )
    scores = [uniform_scores(problem_of([view] * batch_size, cost))[1] for batch_size in rows]
    return BatchTable(tuple(rows), tuple(int(of_size.argmax()) for of_size in scores))


def _given_len(view: SequenceView, batch_size: int, settings: PlannerSettings) -> int:
    """The draft length of the sequence before the limit of its options; OPEN if it is to be
    chosen."""
    if view.sequence in settings.forced:
        return settings.forced[view.sequence]
    if view.policy != BATCH_TABLE:
        draft_len = parse_policy(view.policy)
        return OPEN if draft_len is None else draft_len
    if settings.batch_table is None:
        raise ValueError("the policy batch_table needs a batch_table in the planner's settings")
    return settings.batch_table.draft_len(batch_size)


def _can_draft(view: SequenceView) -> bool:
    return any(option.max_draft_len for option in view.options)


def _spec_plan(
    views: Sequence[SequenceView],
    problem: PlanProblem,
    choice: Choice,
    settings: PlannerSettings,
) -> SpecPlan:
    sequences, lengths = [view.sequence for view in views], choice.lengths.tolist()
    choices: dict[SequenceId, int] = {}
    if not problem.has_one_option:
        options = (choice.options - problem.first_options).tolist()
        choices = {s: o for s, o, k in zip(sequences, options, lengths, strict=True) if o and k}
    tokens, seconds = problem.expected(choice.options, choice.lengths)
    return SpecPlan(
        draft_lens=dict(zip(sequences, lengths, strict=True)),
        # No request receives the tokens that stand for requests in prefill.
        expected_tokens=float(tokens) - PREFILLING_TOKENS * settings.num_prefilling,
        expected_s=float(seconds),
        choices=choices,
    )
